"""How a job ends: done, failed or cancelled. Every worker is told, and what does not end is ended.

Over means over: an event that comes later changes nothing, but whoever asks is still told how it ended.
"""

from __future__ import annotations

from shoal_protos.messages import Ending
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Standing, WorkerRecord
from shoal_controller.core.machine.effects import Adopt, Close, Kill, Send
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Exited,
    MessageReceived,
    NeverStarted,
    SeatAsked,
    Started,
)
from shoal_controller.core.machine.phases import claims, places, progress, worker_seconds
from shoal_controller.core.machine.phases.next_message import send_all_if_due, send_if_due, shutdown_of_all
from shoal_controller.core.machine.phases.progress import count_fills
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn

LINGER_SECONDS = 10.0
"""How long processes have to end by themselves before they are killed."""
STOP_STEPS = 2
"""A cancelled job's workers stop after the step that they are in: they have so many steps' time, if that is more."""


def finish(turn: Turn, phase: Phase, reason: str) -> None:
    """The job is over."""
    if turn.durable.phase.is_over:
        return
    turn.enter(phase, reason)
    turn.keep(planned=(), save=None, ended_at=turn.now)
    turn.change(attempt=None, reaped_at=turn.now)
    count_fills(turn)
    turn.keep_figures(worker_seconds.end(turn.job.figures))
    turn.note(EventKind[phase.name], reason)
    send_all_if_due(turn)
    _kill_the_unheard(turn)


def _kill_the_unheard(turn: Turn) -> None:
    """A process that has not said hello cannot be told that the job is over, and holds nothing."""
    for record in turn.durable.roster.values():
        if record.launched and not record.incarnation and record.standing is not Standing.DEAD:
            places.kill(turn, record.worker)


def fail(turn: Turn, reason: str) -> None:
    """The step that people are shown moves once a second: where that was too late, it is now the one that was made."""
    if not turn.durable.phase.is_over:
        progress.update(turn)
        turn.keep(step=max(turn.durable.step, progress.known_step(turn)))
    finish(turn, Phase.FAILED, reason)


def succeed(turn: Turn) -> None:
    """But a script may fail after the last step, as where a checkpoint that is owed cannot be saved, or in a line after
    its loop. The others do what is left to be done; where all have failed so, it was not done.
    """
    durable, world = turn.durable, turn.world
    members = [turn.record(member.worker) for member in world.members] if world is not None else []
    if members and durable.failures.script and all(record.ending is Ending.FAILED for record in members):
        last = members[-1]
        return fail(turn, f"all steps are done, and then every worker has failed; worker {last.worker}: {last.why}")
    why = f"done at step {durable.step}, fingerprint {durable.fingerprint or 'not given'}"
    return finish(turn, Phase.SUCCEEDED, why)


def stop_seconds(turn: Turn) -> float:
    """How long workers that were asked to stop may take."""
    step_seconds = max((process.telemetry.step_seconds for process in turn.serving()), default=0.0)
    return max(LINGER_SECONDS, STOP_STEPS * step_seconds)


# ---- events of a job that is over


def on_restart(turn: Turn, _: Started) -> None:
    """A controller's life begins: workers that have not ended get the full time again to learn that the job is over."""
    turn.set_clock()
    turn.change(reaped_at=turn.now)
    lingering = tuple(record.worker for record in turn.durable.roster.values() if _lingers(record))
    if lingering:
        turn.do(Adopt(lingering))


def on_connected(turn: Turn, event: Connected | SeatAsked) -> None:
    """A worker connects to a job that is over: tell it how the job ended, if the run is its own."""
    if claims.turns_away(turn, event):
        return
    turn.do(Send(event.connection, shutdown_of_all(turn.durable)))
    turn.do(Close(event.connection))


def on_message(turn: Turn, event: MessageReceived) -> None:
    """The worker lags behind: send the current message again."""
    worker = turn.job.connections.get(event.connection)
    if worker is not None:
        turn.see(worker, last_message_at=turn.now)
        send_if_due(turn, worker)


def on_disconnected(turn: Turn, event: Disconnected) -> None:
    """A stream ended, as it should."""
    worker = turn.job.connections.get(event.connection)
    if worker is not None:
        turn.see(worker, connection=None)
        turn.drop("connections", event.connection)


def on_exited(turn: Turn, event: Exited) -> None:
    """The launcher saw the process end: nobody need kill it."""
    _mark_dead(turn, event.worker)


def on_never_started(turn: Turn, event: NeverStarted) -> None:
    """An earlier controller died before it started this worker: there is no process to wait for."""
    _mark_dead(turn, event.worker)


def _mark_dead(turn: Turn, worker: WorkerId) -> None:
    if worker in turn.durable.roster:
        turn.mark(worker, standing=Standing.DEAD, ending_since=None)


def reap(turn: Turn) -> None:
    """Kill what has not ended by itself."""
    if turn.now - turn.job.reaped_at >= LINGER_SECONDS:
        for record in turn.durable.roster.values():
            if _lingers(record):
                turn.do(Kill(record.worker))
        turn.change(reaped_at=turn.now)


def _lingers(record: WorkerRecord) -> bool:
    return record.launched and (record.standing is not Standing.DEAD or record.ending_since is not None)
