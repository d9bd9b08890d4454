"""Places of several processes (pods): what a launcher starts together comes and goes together. Pure.

A job's `started_together` says how many there are in one. Their ids follow each other, from a multiple of that number
on, so that a process's place follows from its id. A process that dies leaves the others of its place in the job, and
none is started beside them: another place is, and when its processes have come, those that were left make room. Nothing
here where a place has one process. Called by `scaling.py`, and by all that ends a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Leaving, WorkerRecord
from shoal_controller.core.machine.effects import Kill
from shoal_controller.core.machine.turn import Turn

FOR_GOOD = (Leaving.DRAIN, Leaving.SCALE_DOWN)
"""Of the reasons to leave: what a place is to go for may be taken back, and is said of each of its processes."""


def whole(turn: Turn, workers: int) -> int:
    """The number of workers in whole places that is next below, at least that of one."""
    each = turn.spec.started_together
    return max(each, workers - workers % each)


def new_ids(turn: Turn) -> list[WorkerId]:
    """The ids of the processes of a new place. Where one of them is there already, though the store has not given its
    id (it was restored from an older state), those of the others.
    """
    each = turn.spec.started_together
    if each == 1:
        return [turn.take_id()]
    first = -(-turn.durable.next_id // each) * each
    found = ([f"w{number}" for number in range(start, start + each)] for start in count(first, each))
    ids = next(unknown for ids in found if (unknown := [one for one in ids if one not in turn.durable.roster]))
    turn.keep(next_id=int(ids[-1][1:]) // each * each + each)
    return ids


def place_of(turn: Turn, record: WorkerRecord) -> str:
    """What processes of one place have in common; that of a process that no launcher has started is its own."""
    each = turn.spec.started_together
    return f"place {int(record.worker[1:]) // each}" if record.launched and each > 1 else record.worker


def divided(turn: Turn, staying: Sequence[WorkerRecord]) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Those whose place is whole, and those that are left of one from which another process has gone."""
    if turn.spec.started_together == 1:
        return list(staying), []
    gone = (one for one in turn.durable.roster.values() if not one.serves or one.leaving in FOR_GOOD)
    broken = {place_of(turn, one) for one in gone}
    sides = [[one for one in staying if (place_of(turn, one) in broken) is left] for left in (False, True)]
    return sides[0], sides[1]


def too_many(turn: Turn, ranked: Sequence[WorkerRecord], wanted: int) -> list[WorkerRecord]:
    """Those of the last in line that are to go where so many stay: none of whose place another stays."""
    kept = {place_of(turn, one) for one in ranked[:wanted]}
    return [one for one in ranked[wanted:] if place_of(turn, one) not in kept]


def in_whole(turn: Turn, ranked: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """In the same order, but those of one place beside its first."""
    by_place: dict[str, list[WorkerRecord]] = {}
    for one in ranked:
        by_place.setdefault(place_of(turn, one), []).append(one)
    return [one for ones in by_place.values() for one in ones]


def have_come(lasting: Iterable[WorkerRecord], wanted: int) -> bool:
    """Whether so many of these have joined the job."""
    return sum(bool(one.incarnation) for one in lasting) >= wanted


def kill(turn: Turn, worker: WorkerId) -> None:
    """End a process at once. One in a pod with others that are to go on ends with the last of them."""
    if not has_others(turn, worker):
        turn.do(Kill(worker))


def has_others(turn: Turn, worker: WorkerId) -> bool:
    """Whether another process of its place is to go on."""
    own = place_of(turn, turn.record(worker))
    serving = (one for one in turn.durable.roster.values() if one.serves and one.worker != worker)
    return turn.spec.started_together > 1 and any(place_of(turn, one) == own for one in serving)
