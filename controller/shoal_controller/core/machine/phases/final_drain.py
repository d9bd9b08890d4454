"""The last members of a job leave and nobody has come: their state goes into a checkpoint, and the job waits.

● Half of the shortest grace they train on for a joiner's sake. Then no steps run any more, they are asked to save, and
once the checkpoint of the very last step is reported they are let go. Whoever comes later begins with it.
"""

from __future__ import annotations

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.phases import checkpoints, lost_blocks, scaling
from shoal_controller.core.machine.phases.next_message import is_member, send_if_due
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn


def settle(turn: Turn, world: Plan, members: list[WorkerId]) -> None:
    """Called while all members are leaving and no joiner waits."""
    if not turn.durable.final_drain:
        if any(_half_gone(turn, worker) for worker in members if not _goes_by_plan(turn, worker)):
            turn.keep(final_drain=True)
            turn.change(failed_save_step=-1)
            turn.note(
                EventKind.PARTING,
                f"no worker came to take over from {', '.join(members)}: their state is being saved",
            )
        return
    if world.steps or not _all_in(turn, world):
        return  # the change to a world without steps is under way
    step = known_step(turn)
    found = checkpoints.latest(turn.durable)
    if found is not None and found.step == step:  # perhaps by an earlier world: no step is saved twice
        _release(turn, members, found.path)
    elif turn.job.failed_save_step == step and turn.durable.save is None:
        turn.note(
            EventKind.LOST, f"the state of the last workers ({', '.join(members)}) could not be saved: it is lost"
        )
        _release(turn, members, "")
    elif turn.durable.save is None:
        checkpoints.request_save(turn)
        for worker in members:
            send_if_due(turn, worker)


def _goes_by_plan(turn: Turn, worker: WorkerId) -> bool:
    """A planned world is without it: others have its blocks, and nobody needs to hurry for its sake."""
    return not all(is_member(plan, worker) for plan in turn.durable.planned)


def _half_gone(turn: Turn, worker: WorkerId) -> bool:
    record = turn.record(worker)
    return turn.now >= record.leaves_at - record.grace_seconds / 2


def _all_in(turn: Turn, world: Plan) -> bool:
    processes = (turn.process(member.worker) for member in world.members)
    return all(p is not None and p.status.generation == world.generation for p in processes)


def _release(turn: Turn, members: list[WorkerId], path: str) -> None:
    """Let them go; the job has no world any more."""
    for worker in members:
        scaling.dismiss_last(turn, worker, f"; its state is in {path}" if path else "")
    left = f"a new worker continues from the checkpoint at {path}" if path else "their state is lost"
    lost_blocks.start_anew(turn, f"the last workers were drained; {left}")
    turn.enter(Phase.WAITING)
