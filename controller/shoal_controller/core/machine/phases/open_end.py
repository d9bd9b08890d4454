"""A job whose end nothing says beforehand: its last step is the one at which all its scripts have ended.

Called while a world trains. A script that has ended waits, outside all exchange, until it is told that step
(`next_message.py`): so what it has committed is what the others have committed, and a script that begins another step
waits for it in vain. That fails the job by name: workers that count their batches themselves come to different ends.

A *follower* ran no body of that step, so its script could not end there: it had no lanes, or gets its first ones with
the next step. Where all others have ended it is stopped in that next step, and told the end before it trains again.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_protos.activity import LANES_BEGIN, StepPhase
from shoal_protos.plan import Plan, Reason, WorkerId

from shoal_controller.core.machine.job import Process
from shoal_controller.core.machine.phases import ending, recovery
from shoal_controller.core.machine.phases.next_message import send_all_if_due
from shoal_controller.core.machine.turn import Turn


def settle(turn: Turn, world: Plan) -> bool:
    """Learns the last step. Returns whether that ends this world: the job has failed, or followers are stopped."""
    durable = turn.durable
    if durable.description is None or durable.last_step is not None:
        return False
    found = (turn.process(member.worker) for member in world.members)
    members = [process for process in found if process is not None and process.status.generation == world.generation]
    known = max((process.status.last_step for process in members), default=0)
    if known:
        turn.keep(ends_at=known)  # a store that was restored has forgotten it, or the script has stopped the job
        return False
    ended = [process for process in members if process.status.ended]
    if not ended:
        return False
    last, followers = ended[0].status.step, _followers(world, members)
    living = {member.worker for member in world.members if turn.record(member.worker).serves}
    at_work = living - {process.worker for process in ended}
    beyond = {one.worker for one in members if one.worker in living and _is_beyond(one, ended[0])}
    ahead = min(beyond - followers, default="")
    if ahead:
        ending.fail(
            turn,
            f"the script of worker {ended[0].worker} has ended at step {last}, and worker {ahead} goes on with step "
            f"{last + 1}; scripts must end at the same step on all workers. Loop over whole epochs, or leave the loop "
            "by engine.global_steps.",
        )
        return True
    is_broken = len(living) < world.world_size
    if not at_work <= (followers if is_broken else beyond):
        return False
    turn.keep(ends_at=last)
    if is_broken:
        return False  # those of the next world are told before it begins
    if at_work:
        names = ", ".join(sorted(at_work))
        why = f"all scripts that trained step {last} have ended, and {names}, which had no lanes in it, is to end too"
        recovery.pause(turn, why)
        return True
    send_all_if_due(turn)
    return False


def _followers(world: Plan, members: Sequence[Process]) -> frozenset[WorkerId]:
    """Who has run no body of the last step: at a world's first step, unless all began with it, that may be anyone."""
    has_begun = any(process.status.committed_in == world.generation for process in members)
    if not has_begun and world.reason not in (Reason.START, Reason.RESTORE):
        return world.workers
    return frozenset(worker for worker, lanes in world.lanes_by_worker.items() if not lanes)


def _is_beyond(process: Process, ended: Process) -> bool:
    """Whether it has begun to exchange a step after the one at which another script has ended, or ended later."""
    activity = process.activity
    exchanges = (activity.phase, activity.bucket) >= (StepPhase.LANES, LANES_BEGIN)
    in_next = activity.generation == process.status.generation and activity.boundary > ended.status.boundaries
    return (in_next and exchanges) or process.status.step > ended.status.step
