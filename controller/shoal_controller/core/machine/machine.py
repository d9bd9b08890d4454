"""The job machine: what a batch of events makes of a job, and which effects follow.

`TABLE` maps (phase, event type) to the function that records the event; a worker's messages have a table of their own
(`worker_messages.MESSAGES`). Then, once per batch, the phase's `settle` concludes from everything known, so the order
of messages does not matter and what many workers report at once is concluded once. `turn.py` says which phase
leads to which. An operator's impossible request raises a `UserError` and changes nothing.

`count_version` then counts the job's version, which `If-Match` names: it grows with what is asked of a job (its size, a
pause, an end) so that two people notice each other's changes, and not with steps, losses or workers that come and go.

Pure: it reads no clock, draws no random number and does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal_protos.acts import Cancel, OperatorRequest
from shoal_protos.shape import ONE

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.effects import Effect
from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Endangered,
    Event,
    Exited,
    MessageReceived,
    NeverStarted,
    PlannerAnswered,
    PlannerBegan,
    PlannerFailed,
    Preempted,
    Probed,
    SeatAsked,
    Spared,
    Spawned,
    Started,
    Tick,
    Waiting,
)
from shoal_controller.core.machine.job import Job, new_job, restore
from shoal_controller.core.machine.phases import (
    admission,
    checkpoints,
    claims,
    ending,
    failure_detector,
    operator_requests,
    planner_questions,
    progress,
    progress_watch,
    recovery,
    running,
    scaling,
    seating,
    starts,
    waiting,
    worker_messages,
    worker_seconds,
)
from shoal_controller.core.machine.spec import Phase, WorkerBounds
from shoal_controller.core.machine.turn import Turn, forget_surplus
from shoal_controller.core.machine.view import view

__all__ = ["Durable", "Job", "new_job", "restore", "step", "view"]


def on_started(turn: Turn, _: Started) -> None:
    """A controller's life begins. [Note: what a restart changes] in `job.py`."""
    turn.set_clock()
    scaling.on_restart(turn)
    progress_watch.on_restart(turn)
    checkpoints.on_restart(turn)


def on_tick(turn: Turn, _: Tick) -> None:
    """Time has passed: look for whoever is silent or late, and forget what is old."""
    claims.on_tick(turn)
    if turn.durable.cell != ONE:
        seating.forget_unused_seats(turn)
    failure_detector.watch(turn)
    progress_watch.forget_departed(turn)
    progress_watch.forget_old_backoffs(turn)
    planner_questions.watch(turn)
    progress.update(turn)
    progress.keep_counted(turn)
    progress_watch.update(turn)


def ignore(turn: Turn, _: Event) -> None:
    """The event changes nothing in this phase."""


Handler = Callable[[Turn, Any], object]
"""Records an event. Returns False where it cannot matter for the job, so that nothing need be settled."""

ALIVE: dict[type, Handler] = {
    Started: on_started,
    Tick: on_tick,
    Connected: admission.on_connected,
    SeatAsked: admission.on_seat_asked,
    MessageReceived: worker_messages.on_message,
    Disconnected: failure_detector.on_disconnected,
    Probed: failure_detector.on_probed,
    Spawned: failure_detector.on_spawned,
    Waiting: starts.on_waiting,
    Preempted: scaling.on_preempted,
    Spared: scaling.on_spared,
    Endangered: scaling.on_endangered,
    NeverStarted: scaling.on_never_started,
    Exited: failure_detector.on_exited,
    PlannerBegan: planner_questions.on_begun,
    PlannerAnswered: planner_questions.on_answered,
    PlannerFailed: planner_questions.on_failed,
    **operator_requests.HANDLERS,
}
OVER: dict[type, Handler] = {
    Started: ending.on_restart,
    Tick: ignore,
    Connected: ending.on_connected,
    SeatAsked: ending.on_connected,
    MessageReceived: ending.on_message,
    Disconnected: ending.on_disconnected,
    Probed: ignore,
    Spawned: failure_detector.on_spawned,
    Waiting: ignore,
    Preempted: ignore,
    Spared: ignore,
    Endangered: ignore,
    NeverStarted: ending.on_never_started,
    Exited: ending.on_exited,
    PlannerBegan: ignore,
    PlannerAnswered: ignore,
    PlannerFailed: ignore,
    **dict.fromkeys(operator_requests.HANDLERS, operator_requests.refuse),
    Cancel: ignore,
}
TABLE: dict[tuple[Phase, type], Handler] = {
    (phase, event): handler for phase in Phase for event, handler in (OVER if phase.is_over else ALIVE).items()
}

SETTLE: dict[Phase, Callable[[Turn], None]] = {
    Phase.WAITING: waiting.settle,
    Phase.STARTING: recovery.settle,
    Phase.RUNNING: running.settle,
    Phase.RESIZING: recovery.settle,
    Phase.STALLED: recovery.settle,
    Phase.SUCCEEDED: ending.reap,
    Phase.FAILED: ending.reap,
    Phase.CANCELLED: ending.reap,
}
"""What a phase does about what is known. `paused` is running without steps, as `view` tells."""


def step(job: Job, events: Sequence[Event], now: float) -> tuple[Job, list[Effect]]:
    """What a batch of events (`events.first_batch`), heard by the time `now`, makes of `job`, and the effects in the
    order in which they must happen.
    """
    turn = Turn(job, now)
    worker_seconds.count_time(turn)
    recorded = [TABLE[turn.durable.phase, type(event)](turn, event) for event in events]
    if any(matters is not False for matters in recorded):
        _conclude(turn, any(isinstance(event, Probed) and event.refused for event in events))
    if turn.durable.cell != ONE and not turn.durable.phase.is_over:
        seating.tell_of_cells(turn)
    forget_surplus(turn)
    count_version(turn, events)
    return turn.job, turn.effects_in_order()


def _conclude(turn: Turn, refused: bool) -> None:
    """From all that is known, whatever was heard last. `refused`: a host was heard to refuse a connection."""
    if refused and not turn.durable.phase.is_over:
        failure_detector.judge_refusals(turn)
    SETTLE[turn.durable.phase](turn)
    if turn.durable.stopping and not turn.durable.phase.is_over:
        operator_requests.settle_cancelled(turn)
    if not turn.durable.phase.is_over:
        scaling.settle(turn)
    if turn.durable.cell != ONE and not turn.durable.phase.is_over:
        seating.make_even(turn)


def count_version(turn: Turn, events: Sequence[Event]) -> None:
    """One more where this batch has changed what is asked of the job."""
    before, after = turn.before.durable, turn.durable
    if before is after:
        return
    carried_out = any(isinstance(event, OperatorRequest) for event in events)
    if carried_out or _asked_of(before) != _asked_of(after):
        turn.keep(version=before.version + 1)


def _asked_of(durable: Durable) -> tuple[int, int, WorkerBounds, bool, bool, Phase | None]:
    over = durable.phase if durable.phase.is_over else None
    return durable.wanted, durable.spares, durable.bounds, durable.paused, durable.stopping, over
