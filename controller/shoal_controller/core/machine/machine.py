"""The job machine: what an event makes of a job, and what has to be done about it.

`TABLE` owns the transitions: (phase, event type) → function. Each function records what was heard; then the phase's
`settle` draws the conclusions from all that is known, so that nothing hangs on the order of messages. Pure: it reads no
clock, draws no chance and does no I/O; an operator's impossible wish raises a `UserError`, and nothing has changed.

    waiting ──► starting ──► running ◄──► resizing ──► stalled
       ▲            │           │             │            │
       └────────────┴───────────┴─────────────┴────────────┴──► succeeded, failed, cancelled
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_controller.core.machine.durable import Durable, from_json, to_json
from shoal_controller.core.machine.effects import Effect
from shoal_controller.core.machine.events import (
    Cancel,
    ConfirmLost,
    Connected,
    Disconnected,
    DrainWorker,
    Event,
    Exited,
    MessageReceived,
    NeverStarted,
    Pause,
    Probed,
    Resume,
    Save,
    Scale,
    Spawned,
    Started,
    Tick,
)
from shoal_controller.core.machine.job import Job, new_job, restore
from shoal_controller.core.machine.phases import (
    admission,
    checkpoints,
    ending,
    failure_detector,
    link_faults,
    operator_requests,
    progress,
    progress_watch,
    recovery,
    running,
    scaling,
    waiting,
    worker_messages,
)
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.machine.view import view

__all__ = ["Durable", "Job", "from_json", "new_job", "restore", "step", "to_json", "view"]


def started(turn: Turn, _: Started) -> None:
    """A controller's life begins. [Note: what a restart changes] in `job.py`."""
    scaling.restarted(turn)
    link_faults.restarted(turn)
    checkpoints.restarted(turn)


def ticked(turn: Turn, _: Tick) -> None:
    failure_detector.watch(turn)
    link_faults.forget(turn)
    link_faults.forgive(turn)
    progress.look(turn)
    progress_watch.look(turn)
    if turn.durable.stopping:
        operator_requests.stop_overdue(turn)


def nothing(turn: Turn, _: Event) -> None:
    """It changes nothing in this phase."""


Handler = Callable[[Turn, Any], object]
"""Records an event. Returns False where it cannot matter for the job, so that nothing need be settled."""

ALIVE: dict[type, Handler] = {
    Started: started,
    Tick: ticked,
    Connected: admission.connected,
    MessageReceived: worker_messages.said,
    Disconnected: failure_detector.disconnected,
    Probed: failure_detector.probed,
    Spawned: failure_detector.spawned,
    NeverStarted: scaling.never_started,
    Exited: failure_detector.exited,
    Scale: operator_requests.scale,
    DrainWorker: operator_requests.drain,
    ConfirmLost: operator_requests.lost,
    Pause: operator_requests.pause,
    Resume: operator_requests.resume,
    Cancel: operator_requests.cancel,
    Save: operator_requests.save,
}
OVER: dict[type, Handler] = {
    Started: ending.restarted,
    Tick: nothing,
    Connected: ending.connected,
    MessageReceived: ending.said,
    Disconnected: ending.disconnected,
    Probed: nothing,
    Spawned: failure_detector.spawned,
    NeverStarted: ending.never_started,
    Exited: ending.exited,
    Scale: operator_requests.refuse,
    DrainWorker: operator_requests.refuse,
    ConfirmLost: operator_requests.refuse,
    Pause: operator_requests.refuse,
    Resume: operator_requests.refuse,
    Cancel: nothing,
    Save: operator_requests.refuse,
}
TABLE: dict[tuple[Phase, type], Handler] = {
    (phase, event): handler for phase in Phase for event, handler in (OVER if phase.over else ALIVE).items()
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


def step(job: Job, event: Event, now: float) -> tuple[Job, list[Effect]]:
    """What `event`, at the time `now`, makes of `job`, and the effects in the order in which they must happen."""
    turn = Turn(job, now)
    matters = TABLE[job.durable.phase, type(event)](turn, event)
    if matters is not False:
        SETTLE[turn.durable.phase](turn)
        if not turn.durable.phase.over:
            scaling.settle(turn)
    return turn.job, turn.effects_in_order()
