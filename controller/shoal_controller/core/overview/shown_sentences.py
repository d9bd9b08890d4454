"""What a worker does, and what a change of the world was and cost, each in one sentence: the same wherever it is shown.

The page, `shoal top` and REST show them. A change is told from what the job's history has of it, and from whom it took
away and added where that is known. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shoal_protos.activity import Activity, StepPhase
from shoal_protos.plan import Reason, WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.spec import ResizeView, State, WorkerView
from shoal_controller.core.overview.amounts import duration, listed, size

TOLD_SECONDS = 1.0
"""What is shorter than this is not told."""
AT_ONCE_SECONDS = 0.1
"""What was noticed sooner than this was noticed at once."""

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
    elif activity.phase is StepPhase.VOTE and activity.seconds >= TOLD_SECONDS:
        does = AFTER_THE_VOTE
    return f"{does}{_since(activity, worker.activity_age_seconds)}"


def _since(activity: Activity, age: float) -> str:
    seconds = activity.seconds + age
    return f" ({duration(seconds)})" if seconds >= TOLD_SECONDS else ""


def resize_sentence(resize: ResizeView, gone: Collection[WorkerId] = (), came: Collection[WorkerId] = ()) -> str:
    """`gone`, `came`: members of the world before only, and of this one only; empty: not known, or none."""
    return f"{_cause(resize, gone, came)}{_noticed(resize)}: {_cost(resize)}"


def last_telling(resizes: Sequence[ResizeView]) -> int | None:
    """Which one to show where there is room for one: the last that somebody made or suffered. A balance follows almost
    every change a few steps later, costs nothing, and would hide it; it counts where nothing else is remembered."""
    telling = (at for at in range(len(resizes) - 1, -1, -1) if resizes[at].reason != Reason.BALANCE)
    return next(telling, len(resizes) - 1 if resizes else None)


def changes_of(
    before: Mapping[WorkerId, object] | None, after: Mapping[WorkerId, object] | None
) -> tuple[list[WorkerId], list[WorkerId]]:
    """Who went and who came between two worlds of these members; nobody where one of them is not known."""
    if before is None or after is None:
        return [], []
    return sorted(set(before) - set(after)), sorted(set(after) - set(before))


def _cause(resize: ResizeView, gone: Collection[WorkerId], came: Collection[WorkerId]) -> str:
    who_went, who_came = listed(sorted(gone)) or "a worker", listed(sorted(came)) or "a worker"
    world = plural(resize.workers, "worker")
    causes = {
        Reason.START: _start(resize, world),
        Reason.KILL: f"{who_went} {_was(gone)} lost",
        Reason.JOIN: f"{who_came} joined",
        Reason.DRAIN: f"{who_went} {_was(gone)} drained",
        Reason.SCALE_UP: f"scaled up to {world}",
        Reason.SCALE_DOWN: f"scaled down to {world}",
        Reason.BALANCE: "filled blocks got their owners, lanes were balanced",
        Reason.RESTORE: f"all went back to step {resize.from_step}",
    }
    return causes.get(Reason(resize.reason), resize.reason)


def _start(resize: ResizeView, world: str) -> str:
    """Only the first one is the job's beginning."""
    if resize.starts_again and not resize.from_step and not resize.lost_steps:
        return f"the job began again with {world}, before its first step"
    if resize.starts_again:
        where = (
            f"went on from the checkpoint of step {resize.from_step}" if resize.from_step else "began again from step 0"
        )
        return f"nobody had the job's state any more: {world} {where}"
    return f"the job began with {world}" + (
        f", from a checkpoint of step {resize.from_step}" if resize.from_step else ""
    )


def _noticed(resize: ResizeView) -> str:
    """How long nobody knew: it is not in the pause, but who waited for a frozen worker stood still meanwhile."""
    seconds = resize.phases.get("detect", 0.0)
    return f", noticed after {duration(seconds)}" if seconds >= AT_ONCE_SECONDS else ""


def _was(workers: Collection[WorkerId]) -> str:
    return "were" if len(workers) > 1 else "was"


def _cost(resize: ResizeView) -> str:
    if not resize.phases:
        return "what it cost is not known yet"
    milliseconds = round(resize.pause_seconds * 1000)
    paused = f"training paused for {duration(resize.pause_seconds)}" if milliseconds else "training did not pause"
    lost = f"{plural(resize.lost_steps, 'step')} lost" if resize.lost_steps else "no step lost"
    moved = f"{size(resize.pause_bytes)} moved in the pause" if resize.pause_bytes else "nothing moved in the pause"
    parts = [paused, lost, moved]
    if resize.checkpoint_bytes:
        parts.append(f"{size(resize.checkpoint_bytes)} read from a checkpoint")
    return ", ".join(parts)
