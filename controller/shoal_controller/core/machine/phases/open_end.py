"""A job whose end nothing says beforehand: its last step is the one at which all its scripts have ended.

Called while a world trains. A script that has ended waits, outside all exchange, until it is told that step
(`next_message.py`): so what it has committed is what the others have committed, and a script that begins another step
waits for it in vain. That fails the job by name: workers that count their batches themselves come to different ends.
"""

from __future__ import annotations

from shoal_protos.activity import LANES_BEGIN, StepPhase
from shoal_protos.plan import Plan

from shoal_controller.core.machine.job import Process
from shoal_controller.core.machine.phases import ending
from shoal_controller.core.machine.phases.next_message import send_all_if_due
from shoal_controller.core.machine.turn import Turn


def settle(turn: Turn, world: Plan) -> bool:
    """Learns the last step. Returns whether the job has failed."""
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
    last = ended[0].status.step
    beyond = next((one for one in members if _is_beyond(one, ended[0])), None)
    if beyond is not None:
        ending.fail(
            turn,
            f"the script of worker {ended[0].worker} has ended at step {last}, and worker {beyond.worker} goes on with "
            f"step {last + 1}; scripts must end at the same step on all workers. Loop over whole epochs, or leave the "
            "loop by engine.global_steps.",
        )
        return True
    if len(ended) == world.world_size:
        turn.keep(ends_at=last)
        send_all_if_due(turn)
    return False


def _is_beyond(process: Process, ended: Process) -> bool:
    """Whether it has begun to exchange a step after the one at which another script has ended, or ended later."""
    activity = process.activity
    exchanges = (activity.phase, activity.bucket) >= (StepPhase.LANES, LANES_BEGIN)
    in_next = activity.generation == process.status.generation and activity.boundary > ended.status.boundaries
    return (in_next and exchanges) or process.status.step > ended.status.step
