"""Seats: what a cell of the job is, which coordinate a process has, and whether what it says of that can be so.

A process asks for its seat before it builds its part of a model (`admission.on_seat_asked`). The seat is durable in the
worker's record, and lapses when its process does; one that the store does not know keeps the coordinate that it names,
for its model is built. Which coordinate is best: `core/planning/seats.py`. Nothing here where a cell is one process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

from shoal_protos.description import shapes_differ
from shoal_protos.messages import AskSeat, Hello, MemberState
from shoal_protos.plan import WorkerId
from shoal_protos.shape import Shape, absent
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import Durable, Leaving, Standing, WorkerRecord, bounds_of
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.job_size import JobSize, broken_bounds, broken_spares
from shoal_controller.core.machine.phases import places, progress_watch, scaling
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.seats import Seated, best_seat

MOST_NAMED = 4
"""So many new cells an event names."""


def seat(turn: Turn, worker: WorkerId, ask: AskSeat) -> int:
    """The coordinate of a worker that asks; the same one where it asks again."""
    learn_cell(turn, ask.cell)
    record = turn.durable.roster.get(worker) or turn.enlist_new(worker)
    if record.seated != ask.incarnation:
        lasting, _ = places.divided(turn, scaling.staying_workers(turn))
        # what is left of a pod goes when another comes in its place
        others = (one for one in lasting if one.seated and one.worker != worker)
        starts = turn.world is None  # then all are about to join, and get their coordinates in the order of asking
        here = [Seated(one.worker, one.coordinate, one.host, starts or bool(one.incarnation)) for one in others]
        coordinate = best_seat(turn.durable.cell, here, ask.host, ask.wish)
        turn.mark(worker, coordinate=coordinate, seated=ask.incarnation, seated_at=turn.now, host=ask.host)
        turn.note(EventKind.SEATED, f"worker {worker} on {ask.host} gets {turn.durable.cell.named(coordinate)}", worker)
    return turn.record(worker).coordinate


def seated_before(turn: Turn, ask: AskSeat) -> WorkerId:
    """The worker of this very process, which has not heard the answer; empty where it has no seat."""
    roster = turn.durable.roster.values()
    return next((one.worker for one in roster if one.seated == ask.incarnation and one.ending is None), "")


def _knows_cell(turn: Turn) -> bool:
    """Whether it is settled what a cell of the job is. A process that is gone before the job was described says
    nothing of it.
    """
    is_said = turn.spec.cell is not None or turn.durable.description is not None
    return is_said or any(one.serves and one.seated for one in turn.durable.roster.values())


def learn_cell(turn: Turn, cell: Shape) -> None:
    """The first one that comes says what a cell is; a default number of workers becomes one of whole ones."""
    if _knows_cell(turn) or cell == turn.durable.cell:
        return
    spec, wanted = turn.spec, turn.durable.wanted
    turn.keep(cell=cell)
    if spec.wanted_by_default and wanted == spec.wanted:
        turn.keep(wanted=max(wanted - wanted % cell.processes, turn.durable.bounds.least))


def impossible_cell(turn: Turn, name: str, cell: Shape) -> str:
    """Why a job cannot have such cells; empty where it can."""
    durable = turn.durable
    if _knows_cell(turn):
        return shapes_differ(name, cell, durable.cell) or ""
    bounds = durable.changed_bounds or bounds_of(turn.spec, None, cell)
    if why := broken_bounds(bounds, cell.processes):
        return f"job {turn.spec.job} cannot have {why}. Change workers.min and workers.max."
    if why := broken_spares(JobSize(turn.spec.job, durable.wanted, bounds, None, cell, spares=durable.spares)):
        return why
    if durable.wanted < cell.processes and not turn.spec.wanted_by_default:
        return (
            f"job {turn.spec.job} asks for {plural(durable.wanted, 'worker')}, but a cell of its script ({cell}) has "
            f"{cell.processes}. Ask for so many at least."
        )
    return ""


def wrong_seat(turn: Turn, hello: Hello) -> str:
    """Why a hello names a coordinate that this worker does not have; empty where it has it."""
    record, cell = turn.durable.roster.get(hello.worker), hello.description.cell
    if hello.coordinate not in cell.coordinates:
        name = hello.worker or "(new)"
        return f"worker {name} is at coordinate {hello.coordinate}; expected one below {cell.processes} ({cell})"
    if record is None or record.seated != hello.incarnation or record.coordinate == hello.coordinate:
        return ""
    return (
        f"worker {hello.worker} on {hello.host} has built its model for {cell.named(hello.coordinate)}; its seat is "
        f"{cell.named(record.coordinate)}. Start it again."
    )


def forget_unused_seats(turn: Turn) -> None:
    """A process that no launcher watches, and that has not said hello `stall_seconds` after it was seated."""
    for record in tuple(turn.durable.roster.values()):
        waits = record.seated and not record.incarnation and not record.launched and record.serves
        if waits and turn.now - max(record.seated_at, turn.job.started_at) > turn.spec.stall_seconds:
            why = f"it did not connect within {turn.spec.stall_seconds:g} s of being given its coordinate"
            turn.mark(record.worker, standing=Standing.DEAD, why=why)
            turn.note(EventKind.LOST, f"worker {record.worker} is given up: {why}", record.worker)


# ---- what is told of cells


def tell_of_cells(turn: Turn) -> None:
    """Note which cells are new in the world that may train, and which coordinate has lost its last worker."""
    before, now = turn.before.durable, turn.durable
    if now.current is not before.current and (made := set(_cells(now)) - set(_cells(before))):
        pairs = sorted(" with ".join(members) for members in made)
        more = f" and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else ""
        cells = plural(len(_cells(now)), "cell")
        sentence = (
            f"{cells} {'trains' if len(_cells(now)) == 1 else 'train'}; new: {', '.join(pairs[:MOST_NAMED])}{more}"
        )
        turn.note(EventKind.PAIRED, sentence, cells=len(_cells(now)))
    if now.roster is before.roster or now.started_at is None:
        return
    for coordinate in sorted(_without_workers(now) - _without_workers(before)):
        sentence = f"{now.cell.named(coordinate)} has no worker any more: no cell is whole until one is there"
        turn.note(EventKind.COORDINATE_MISSING, sentence)


def _cells(durable: Durable) -> list[tuple[WorkerId, ...]]:
    return durable.current.workers_of_cells if durable.current is not None else []


def _without_workers(durable: Durable) -> frozenset[int]:
    seated = (one.coordinate for one in durable.roster.values() if one.seated and one.serves)
    return frozenset(absent(seated, durable.cell.processes))


@dataclass(frozen=True, slots=True)
class Uneven:
    """Fewer cells train than the workers present could form, and no other worker is to come."""

    possible: int
    cells: int
    lacking: int
    """The coordinate with the fewest."""
    spare: WorkerRecord | None
    """A worker that no cell needs, and whose replacement would get that coordinate; None: there is none yet."""

    def sentence(self, cell: Shape) -> str:
        """Why fewer cells train, without an end."""
        return (
            f"{plural(self.possible, 'cell')} could train and {self.cells} can, because {cell.named(self.lacking)} has "
            f"{plural(self.cells, 'worker')}"
        )


def uneven(durable: Durable) -> Uneven | None:
    """What keeps the workers present from forming as many cells as they could; None where nothing does, or where others
    may still come.
    """
    cell = durable.cell
    serving = [one for one in durable.roster.values() if one.serves and not one.leaving]
    here = [one for one in serving if one.seated and one.incarnation]
    if len(here) < len(serving) or len(here) + durable.spec.started_together <= durable.wanted:
        return None
    counts = Counter(one.coordinate for one in here)

    def helps(spare: WorkerRecord) -> bool:
        """Whether the process in its place would get the coordinate that is lacking."""
        others = (Seated(one.worker, one.coordinate, one.host) for one in here if one is not spare)
        return best_seat(cell, others, spare.host) == lacking

    possible = min(len(here), durable.wanted) // cell.processes
    lacking = min(cell.coordinates, key=counts.__getitem__)
    if counts[lacking] >= possible:
        return None
    most, busy = max(counts.values()), _in_whole_cells(durable)
    spares = [one for one in here if counts[one.coordinate] == most and one.worker not in busy]
    spares.sort(key=lambda one: one.join_order, reverse=True)
    return Uneven(possible, counts[lacking], lacking, next((one for one in spares if helps(one)), None))


def _in_whole_cells(durable: Durable) -> frozenset[WorkerId]:
    """The workers of the cells that train with nobody missing."""
    whole = (cell for cell in _cells(durable) if all(durable.roster[worker].serves for worker in cell))
    return frozenset(chain.from_iterable(whole))


def make_even(turn: Turn) -> None:
    """Drain a spare process where another one in its place makes one cell more, and a launcher starts that."""
    durable = turn.durable
    if not durable.spec.traits.starts or durable.stopping:
        return
    if (found := uneven(durable)) is not None and found.spare is not None:
        why = f"{found.sentence(durable.cell)}; the process in its place gets that one"
        scaling.drain(turn, found.spare.worker, Leaving.DRAIN, scaling.SCALE_DOWN_GRACE, why)


def advice(durable: Durable) -> str:
    """Why fewer cells train than could, and what makes them more; empty where as many do, and where `make_even` does
    it.
    """
    found = uneven(durable) if not durable.spec.traits.starts else None
    if found is None or found.spare is None:
        return ""
    drain = f'"shoal drain {durable.spec.job} {found.spare.worker}"'
    return f"{found.sentence(durable.cell)}: {drain} makes room there for another one"


def with_joiners(turn: Turn, attempt: Attempt) -> Attempt:
    """An attempt whose starters make no cell, with those that are ready to join: they are asked with a heartbeat."""
    ready = [process.worker for process in turn.serving() if process.status.state is MemberState.WAITING]
    staying = (worker for worker in ready if not turn.record(worker).leaving)
    joiners = frozenset(worker for worker in staying if not progress_watch.is_backing_off(turn, worker))
    return replace(attempt, starters=attempt.starters | joiners)
