"""What an operator asks for. The impossible is refused in one sentence, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_protos.acts import Cancel, ConfirmLost, DrainWorker, OperatorRequest, Pause, Resume, Save, Scale
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, NotFound
from shoal_protos.plan import WorkerId
from shoal_protos.text import at_step, plural, shown_name

from shoal_controller.core.machine.durable import Leaving, Standing, WorkerRecord
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job_size import JobSize, resized
from shoal_controller.core.machine.phases import (
    checkpoints,
    ending,
    failure_detector,
    planned_changes,
    progress,
    scaling,
    silence,
    waiting,
)
from shoal_controller.core.machine.phases.next_message import is_member, send_if_due
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn


def on_scale(turn: Turn, event: Scale) -> None:
    """Change the wanted number of workers and its bounds. A launcher follows; without one the youngest are drained."""
    durable = turn.durable
    known = durable.description
    lanes, mirrors = (known.lanes, known.mirrors) if known is not None else (turn.spec.lanes, None)
    together = turn.spec.started_together
    before = JobSize(
        turn.spec.job, durable.wanted, durable.bounds, lanes, durable.cell, together, durable.spares, mirrors
    )
    size = resized(before, event)
    if size.bounds != before.bounds:
        turn.keep(changed_bounds=size.bounds)
        most = "as many as it has lanes" if size.bounds.most is None else plural(size.bounds.most, "worker")
        sentence = f"the job may have from {size.bounds.least} to {most}"
        turn.note(EventKind.SCALED, sentence, min=size.bounds.least, max=size.bounds.most)
    if size.wanted != before.wanted:
        turn.keep(wanted=size.wanted, scaled_up=size.wanted > before.wanted)
        sentence = f"the job is scaled from {before.wanted} to {plural(size.wanted, 'worker')}"
        turn.note(EventKind.SCALED, sentence, workers=size.wanted)
    if size.spares != before.spares:
        turn.keep(spares=size.spares)
        turn.note(EventKind.SCALED, f"the job is to have {plural(size.spares, 'spare')}", spares=size.spares)
    if size != before and not turn.spec.traits.starts:
        all_wanted = size.wanted + size.spares
        is_as_before = all_wanted == before.wanted + before.spares
        room = size.top if is_as_before else all_wanted
        staying = scaling.first_to_stay(turn, scaling.staying_workers(turn), all_wanted)
        for record in reversed(staying[room:] if room is not None else ()):
            scaling.drain(turn, record.worker, Leaving.SCALE_DOWN, scaling.SCALE_DOWN_GRACE)


def on_drain(turn: Turn, event: DrainWorker) -> None:
    """Let one worker go; the launcher replaces it. One that is silent is given up by that."""
    record = _find_worker(turn, event.worker)
    if record.standing is Standing.LOST:
        return scaling.give_up(turn, event.worker, "an operator drained it while it was silent", "an operator")
    if record.leaving:
        raise Conflict(f"worker {event.worker} is already being drained.").coded(ErrorCode.WORKER_DRAINING)
    if _is_last(turn, record) and not _can_checkpoint(turn):
        cell = turn.durable.cell
        at = f" at {cell.named(record.coordinate)}" if cell.processes > 1 else ""
        raise Conflict(
            f"worker {event.worker} is the last one of job {turn.spec.job}{at}: its state would be lost. "
            "Start another worker first, or set checkpoint.path."
        ).coded(ErrorCode.LAST_WORKER)
    return scaling.drain(turn, event.worker, Leaving.DRAIN, event.grace_seconds, event.why)


def on_confirm_lost(turn: Turn, event: ConfirmLost) -> None:
    """An operator says that a silent worker's process is gone: nobody waits for it any more."""
    record = _find_worker(turn, event.worker)
    process = turn.process(record.worker)
    if (
        process is not None
        and process.connection is not None
        and record.standing is not Standing.LOST  # one that was evicted may keep its stream
        and record.worker not in silence.silent_workers(turn.job)
    ):
        raise Conflict(
            f"worker {record.worker} is not lost: it was heard {turn.now - process.last_message_at:.1f} s ago. "
            f'To let it go: "shoal drain {turn.spec.job} {record.worker}".'
        ).coded(ErrorCode.WORKER_ALIVE)
    failure_detector.confirm_death(
        turn, record.worker, "an operator confirmed that its process is gone", noticed_by="an operator"
    )


def _find_worker(turn: Turn, worker: WorkerId) -> WorkerRecord:
    """The worker that an operator means: one that is not gone."""
    record = turn.durable.roster.get(worker)
    if record is None:
        names = ", ".join(r.worker for r in turn.durable.roster.values() if r.serves) or "none"
        raise NotFound(f"job {turn.spec.job} has no worker {shown_name(worker)}; its workers are: {names}.").coded(
            ErrorCode.WORKER_UNKNOWN
        )
    if record.ending is not None or record.standing is Standing.DEAD:
        raise Conflict(f"worker {worker} is already gone: {record.why or 'it has left'}.").coded(ErrorCode.WORKER_GONE)
    return record


def _is_last(turn: Turn, record: WorkerRecord) -> bool:
    """Whether nobody else could go on with the state that it holds."""
    world = turn.world
    if world is None or not is_member(world, record.worker):
        return False
    staying = [other for other in scaling.staying_workers(turn) if other.coordinate == record.coordinate]
    others = [other.worker for other in staying if other.worker != record.worker]
    ready = planned_changes.waiting_joiners(turn, world)
    return not any(is_member(world, worker) or worker in ready for worker in others)


def _can_checkpoint(turn: Turn) -> bool:
    return turn.durable.description is not None and turn.durable.description.can_checkpoint


def on_pause(turn: Turn, _: Pause) -> None:
    """Commit no steps from the next planned change on."""
    if turn.durable.paused:
        raise Conflict(f"job {turn.spec.job} is already paused.").coded(ErrorCode.ALREADY_PAUSED)
    turn.keep(paused=True)
    turn.note(EventKind.PAUSED, "the job is being paused")


def on_resume(turn: Turn, _: Resume) -> None:
    """Commit steps again from the next planned change on."""
    if not turn.durable.paused:
        raise Conflict(f"job {turn.spec.job} is not paused; it is {turn.durable.phase.value}.").coded(
            ErrorCode.NOT_PAUSED
        )
    turn.keep(paused=False, paused_because="")
    turn.note(EventKind.RESUMED, "the job continues")


def on_cancel(turn: Turn, _: Cancel) -> None:
    """Ask a world that trains to stop after its step."""
    if turn.durable.stopping:
        return
    turn.note(EventKind.CANCELLING, "the job is being cancelled")
    turn.keep(stopping=True, ended_at=turn.now)
    if turn.world is not None and _trains(turn):
        for member in turn.world.members:
            send_if_due(turn, member.worker)


def on_save(turn: Turn, _: Save) -> None:
    """Ask for a checkpoint after the next step."""
    world = turn.world
    if world is not None and not _can_checkpoint(turn):
        raise Conflict(f"job {turn.spec.job} has no checkpoint folder; set checkpoint.path in its config.").coded(
            ErrorCode.NO_CHECKPOINT_PATH
        )
    members = [turn.process(member.worker) for member in world.members] if world is not None else []
    connected = [process for process in members if process is not None and process.connection is not None]
    if not connected or world is None:
        raise Conflict(f"job {turn.spec.job} is not training; nothing can be saved now.").coded(ErrorCode.NOT_TRAINING)
    checkpoints.request_save(turn)
    send_if_due(turn, connected[0].worker)
    turn.note(EventKind.SAVING, "a checkpoint was requested")


HANDLERS: dict[type, Callable[[Turn, Any], object]] = {
    Scale: on_scale, DrainWorker: on_drain, ConfirmLost: on_confirm_lost, Pause: on_pause, Resume: on_resume,
    Cancel: on_cancel, Save: on_save,
}  # fmt: skip
"""Of a job that is not over, by the type of request."""


def refuse(turn: Turn, _: OperatorRequest) -> None:
    """Refuse a request to a job that is over."""
    raise Conflict(f"job {turn.spec.job} is over ({turn.durable.phase.value}): {turn.durable.reason}.").coded(
        ErrorCode.JOB_OVER
    )


def settle_cancelled(turn: Turn) -> None:
    """A cancelled job is over where no world trains (any more): no step is made after which it could stop; and where
    workers do not stop by themselves.
    """
    since = max(
        turn.durable.ended_at or 0.0, turn.job.started_at
    )  # nobody could be asked while no controller was there
    seconds = ending.stop_seconds(turn)
    if not _trains(turn):
        progress.update(turn)
        turn.keep(step=max(turn.durable.step, turn.job.figures.step))
        trouble = waiting.trouble(turn.durable) if turn.world is None else ""
        why = f"cancelled {at_step(turn.durable.step)}, while no world was training{trouble}"
        ending.finish(turn, Phase.CANCELLED, why)
    elif turn.now - since > seconds:
        ending.finish(turn, Phase.CANCELLED, f"cancelled; workers did not stop within {seconds:g} s")


def _trains(turn: Turn) -> bool:
    return turn.durable.phase is Phase.RUNNING and turn.world is not None and turn.world.steps
