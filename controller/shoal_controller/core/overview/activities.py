"""What a worker's training thread does, or for whom it waits, as a sentence. Pure."""

from __future__ import annotations

from shoal_protos.activity import Activity, StepPhase

from shoal_controller.core.machine.spec import State, WorkerView
from shoal_controller.core.overview.amounts import duration, listed

LONG_SECONDS = 1.0
"""What is shorter than this is not told."""

DOES = {
    StepPhase.BUILDING: "builds the group of generation {generation}",
    StepPhase.BUILT: "has built the group of generation {generation}, which has not begun",
    StepPhase.CATCHING_UP: "catches up with the others",
    StepPhase.LANES: "runs the script: forward and backward",
    StepPhase.REDUCTION: "adds up gradients",
    StepPhase.FILLS: "receives or sends blocks",
    StepPhase.BUFFERS: "shares buffers",
    StepPhase.SENDS: "sends what the last step left",
    StepPhase.VOTE: "votes",
    StepPhase.HAND_OUT: "hands out parameters",
}
WITHOUT_STEPS = "waits: its generation makes no steps"
"""Between two votes of a world without steps, where in another one the script runs."""
AFTER_THE_VOTE = "has voted: updates parameters, or runs the script before its forward"
"""A member that is in a vote waits for somebody; its position stays that of the vote until the parameters are here."""
GONE = (State.LOST, State.LEFT)


def activity_sentence(worker: WorkerView) -> str:
    """One for every worker; where nothing is known of it, that."""
    if worker.state in GONE:
        return worker.why or "is gone"
    if worker.state is State.STARTING and worker.activity is None:
        return worker.why or ("warms up" if worker.member_state else "starts: it has not said hello yet")
    activity = worker.activity
    if activity is None:
        return worker.why or "has not been heard of since this controller leads"
    if not activity.generation:
        return "warms up" if worker.state is State.STARTING else "waits to be taken into a generation"
    does = DOES[activity.phase].format(generation=activity.generation)
    if activity.phase is StepPhase.LANES and not worker.makes_steps:
        return WITHOUT_STEPS
    if activity.waits_for:
        does = f"{does}, waits for {listed(list(activity.waits_for))}"
    elif activity.phase is StepPhase.VOTE and activity.seconds >= LONG_SECONDS:
        does = AFTER_THE_VOTE
    return f"{does}{_since(activity, worker.activity_age_seconds)}"


def _since(activity: Activity, age: float) -> str:
    seconds = activity.seconds + age
    return f" ({duration(seconds)})" if seconds >= LONG_SECONDS else ""
