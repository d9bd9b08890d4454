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

from shoal_controller.core.durable import Durable, from_json, to_json
from shoal_controller.core.effects import Effect
from shoal_controller.core.events import (
    Cancel,
    ConfirmLost,
    Connected,
    Disconnected,
    DrainWorker,
    Event,
    Exited,
    NeverStarted,
    Pause,
    Probed,
    Resume,
    Said,
    Save,
    Scale,
    Spawned,
    Started,
    Tick,
)
from shoal_controller.core.job import Job, new_job, restore
from shoal_controller.core.phases import (
    admission,
    checkpoints,
    ending,
    feuds,
    known,
    population,
    presence,
    progress_watch,
    recovery,
    running,
    statuses,
    waiting,
    wishes,
)
from shoal_controller.core.spec import Phase
from shoal_controller.core.turn import Turn
from shoal_controller.core.view import view

__all__ = ["Durable", "Job", "from_json", "new_job", "restore", "step", "to_json", "view"]


def started(turn: Turn, _: Started) -> None:
    """A controller's life begins. [Note: what a restart changes] in `job.py`."""
    population.restarted(turn)
    feuds.restarted(turn)
    checkpoints.restarted(turn)


def ticked(turn: Turn, _: Tick) -> None:
    presence.watch(turn)
    feuds.forget(turn)
    feuds.forgive(turn)
    known.look(turn)
    progress_watch.look(turn)
    if turn.durable.stopping:
        wishes.stop_overdue(turn)


def nothing(turn: Turn, _: Event) -> None:
    """It changes nothing in this phase."""


Handler = Callable[[Turn, Any], object]
"""Records an event. Returns False where it cannot matter for the job, so that nothing need be settled."""

ALIVE: dict[type, Handler] = {
    Started: started,
    Tick: ticked,
    Connected: admission.connected,
    Said: statuses.said,
    Disconnected: presence.disconnected,
    Probed: presence.probed,
    Spawned: presence.spawned,
    NeverStarted: population.never_started,
    Exited: presence.exited,
    Scale: wishes.scale,
    DrainWorker: wishes.drain,
    ConfirmLost: wishes.lost,
    Pause: wishes.pause,
    Resume: wishes.resume,
    Cancel: wishes.cancel,
    Save: wishes.save,
}
OVER: dict[type, Handler] = {
    Started: ending.restarted,
    Tick: nothing,
    Connected: ending.connected,
    Said: ending.said,
    Disconnected: ending.disconnected,
    Probed: nothing,
    Spawned: presence.spawned,
    NeverStarted: ending.never_started,
    Exited: ending.exited,
    Scale: wishes.refuse,
    DrainWorker: wishes.refuse,
    ConfirmLost: wishes.refuse,
    Pause: wishes.refuse,
    Resume: wishes.refuse,
    Cancel: nothing,
    Save: wishes.refuse,
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
            population.settle(turn)
    return turn.job, turn.effects_in_order()
