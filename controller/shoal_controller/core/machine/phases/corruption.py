"""Silent corruption: copies of a block that differ. Reported by whoever saw it in a vote; concluded here.

Each block is noted and counted once, until all have gone back to a checkpoint: it is not mended before. Then the policy
of the job (`shoal.on_corruption`) says what follows: to go back to the newest checkpoint whose copies were compared, to
pause, or nothing. A worker that is in two differences is evicted, whatever the policy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.corruption import CorruptBlock, OnCorruption
from shoal_protos.messages import Ending, Status
from shoal_protos.plan import WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.phases import scaling
from shoal_controller.core.machine.phases.next_message import is_member, send_if_due
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.turn import Turn

PATIENCE = 2
"""Differences that a worker may be in: one has two sides, and nobody can tell which is right."""


def on_status(turn: Turn, worker: WorkerId, status: Status) -> None:
    """A member says which blocks it has seen to differ."""
    world = turn.world
    if (
        not status.corrupt
        or world is None
        or not is_member(world, worker)
        or status.generation < turn.durable.first_valid_generation
    ):
        return
    known, roster = turn.durable.corruption.blocks, turn.durable.roster
    news = {one.block: one for one in status.corrupt if one.block not in known}
    found = [one for one in news.values() if one.workers and all(name in roster for name in one.workers)]
    if not found:
        return
    turn.keep(corruption=replace(turn.durable.corruption, blocks=known | Runs.of(one.block for one in found)))
    for one in found:
        turn.count("shoal_corrupt_blocks_total")
        turn.note(
            EventKind.CORRUPT_BLOCK, one.sentence, block=one.block, first_step=one.first_step, step=one.step,
            workers=list(one.workers),
        )  # fmt: skip
    if not turn.durable.corruption.restoring:
        _blame(turn, found)
        _conclude(turn, found[0])


def verified_checkpoint(durable: Durable) -> CheckpointRef | None:
    """The newest checkpoint of which it is known that all copies agreed when it was saved."""
    return max((one for one in durable.checkpoints if one.verified), default=None)


def give_up_from(turn: Turn, shown: int) -> None:
    """All are to begin again, at a checkpoint or anew, and step `shown` is given up."""
    corruption = turn.durable.corruption
    if corruption.restoring:
        turn.keep(corruption=replace(corruption, returned_at=max(shown, corruption.returned_at)))


def on_return(turn: Turn) -> None:
    """All have begun again: what differed is no more."""
    turn.keep(corruption=replace(turn.durable.corruption, blocks=NO_BLOCKS, restoring=""))


# ---- what follows


def _blame(turn: Turn, found: list[CorruptBlock]) -> None:
    """Differences are counted by vote and by who is in them: blocks that went wrong together are one."""
    implicated = Counter(turn.durable.corruption.implicated)
    for _, workers in {(one.step, one.workers) for one in found}:
        implicated.update(workers)
    roster = turn.durable.roster
    there = {worker: times for worker, times in implicated.items() if worker in roster and roster[worker].serves}
    worst = max(there, key=lambda worker: (there[worker], roster[worker].join_order), default="")
    if worst and there[worst] >= PATIENCE:
        _quarantine(turn, worst, there[worst])
        there = {}  # the others were in its differences
    turn.keep(corruption=replace(turn.durable.corruption, implicated=there))


def _quarantine(turn: Turn, worker: WorkerId, times: int) -> None:
    how = Ending.REPLACED if turn.record(worker).launched else Ending.FAILED
    why = f"worker {worker} is evicted: it was part of {times} differences between copies of blocks; check its machine"
    scaling.dismiss(turn, worker, how, why)
    send_if_due(turn, worker)


def _conclude(turn: Turn, one: CorruptBlock) -> None:
    assert turn.durable.description is not None
    policy, found = turn.durable.description.on_corruption, verified_checkpoint(turn.durable)
    if policy is OnCorruption.CONTINUE:
        return None
    if policy is OnCorruption.PAUSE:
        return _pause(turn, f"{one.sentence}; on_corruption is pause")
    if found is None:
        return _pause(turn, f"{one.sentence}; there is no checkpoint whose copies were compared")
    if not _is_beyond(turn):
        before = turn.durable.corruption.returned_at
        again = f"all members already went back from step {before} for this, and have not passed it since"
        return _pause(turn, f"{one.sentence}; {again}")
    turn.keep(corruption=replace(turn.durable.corruption, restoring=one.sentence))
    turn.note(
        EventKind.RESTORING,
        f"all members go back to the checkpoint of step {found.step}: {one.sentence}",
        path=found.path,
    )
    return None


def _is_beyond(turn: Turn) -> bool:
    """Whether a step was committed above the highest that was shown when all went back the last time."""
    return max(turn.durable.step, known_step(turn)) > turn.durable.corruption.returned_at


def _pause(turn: Turn, why: str) -> None:
    """Also where an operator's pause has not begun yet: it waits for a vote, and before a step that is not finite all
    wait for what is concluded here.
    """
    if turn.durable.paused_because:
        return
    turn.keep(paused=True, paused_because=why)
    turn.note(EventKind.PAUSED, f"the job is being paused: {why}")
