"""Messages of workers: statuses, inventories, requests, results, telemetry. They are only recorded; `settle` concludes.

Any message proves that its process lives; a status older than the last one says nothing more. Telemetry reports
micro-batches that were skipped and steps that were not finite; members count these alike, by the vote's records, so the
member that is furthest counts, and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_protos.messages import Heartbeat, Inventory, Ready, Request, Result, Status
from shoal_protos.plan import WorkerId
from shoal_protos.text import passes_milestone

from shoal_controller.core.machine.durable import Leaving, Standing
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import MessageReceived
from shoal_controller.core.machine.job import Process
from shoal_controller.core.machine.phases import (
    checkpoints,
    claims,
    corruption,
    ending,
    failure_detector,
    failures,
    planned_changes,
    progress,
    scaling,
)
from shoal_controller.core.machine.phases.next_message import is_member, send_if_due
from shoal_controller.core.machine.phases.progress import shown_reports, step_seconds_median
from shoal_controller.core.machine.turn import Turn


def on_message(turn: Turn, event: MessageReceived) -> bool:
    """Handle a message; returns whether it may matter for the job, so that a plain heartbeat costs next to nothing."""
    worker = turn.job.connections.get(event.connection)
    if worker is None:
        return False
    if why := claims.false_claim(turn, worker, event.message):
        note_alive(turn, worker)
        claims.refuse_claim(turn, worker, why)
        return False
    return MESSAGES[type(event.message)](turn, worker, event.message)


def on_heartbeat(turn: Turn, worker: WorkerId, heartbeat: Heartbeat) -> bool:
    """Where a worker stands, its figures, and what its training thread does."""
    known, status = turn.job.processes[worker], heartbeat.status
    in_steps = known.telemetry.training_seconds
    is_newer = status.sequence >= known.status.sequence
    stands = {**_activity(turn, known, heartbeat), "status": status} if is_newer else {}
    pace_before = (known.status.step, in_steps) if in_steps else None
    note_alive(turn, worker, telemetry=heartbeat.telemetry, pace_before=pace_before, **stands)
    progress.on_telemetry(turn, worker)
    checkpoints.on_telemetry(turn, worker)
    _count_spoilt_steps(turn, worker)
    _count_void_lanes(turn, worker)
    if is_newer:
        _learn(turn, worker, status, known.status)
    send_if_due(turn, worker)
    return known.status.position != status.position  # for step and holdings a tick is soon enough


def on_ready(turn: Turn, worker: WorkerId, ready: Ready) -> bool:
    """The group of a plan is built, and the state is in place."""
    note_alive(turn, worker)
    on_status(turn, worker, ready.status)
    return True


def on_inventory(turn: Turn, worker: WorkerId, inventory: Inventory) -> bool:
    """What a worker that has stopped holds. One that answers another PREPARE says nothing."""
    note_alive(turn, worker)
    if inventory.status is not None:
        on_status(turn, worker, inventory.status)
    attempt = turn.job.attempt
    if attempt is not None and inventory.answers == attempt.generation:
        turn.see(worker, inventory=inventory)
        planned_changes.on_generation_seen(turn, inventory.generation)
    return True


def on_request(turn: Turn, worker: WorkerId, request: Request) -> bool:
    """A worker asks to be drained."""
    note_alive(turn, worker)
    scaling.drain(turn, worker, Leaving.DRAIN, request.grace_seconds)
    return True


def on_result(turn: Turn, worker: WorkerId, result: Result) -> bool:
    """Digests, or why the script failed; ignored if the worker was told to end, or the result is of a life given up."""
    note_alive(turn, worker)
    generation = turn.job.processes[worker].status.generation
    if turn.record(worker).ending is None and not 0 < generation < turn.durable.first_valid_generation:
        _take_result(turn, worker, result)
    return True


MESSAGES: dict[type, Callable[[Turn, WorkerId, Any], bool]] = {
    Heartbeat: on_heartbeat,
    Ready: on_ready,
    Inventory: on_inventory,
    Request: on_request,
    Result: on_result,
}
"""What is done with each kind of message of a living job's workers."""


def _activity(turn: Turn, known: Process, message: Heartbeat) -> dict[str, Any]:
    """What a heartbeat tells of the training thread."""
    stood, stands = (known.activity.position, known.status.ended), (message.activity.position, message.status.ended)
    moved = turn.now if stands != stood else known.moved_at
    gap = turn.now - known.last_message_at > turn.spec.heartbeat_seconds * turn.spec.suspect_after
    steady_since = turn.now if gap else known.steady_since
    return {
        "activity": message.activity, "builds": message.builds, "moved_at": moved, "steady_since": steady_since,
    }  # fmt: skip


def note_alive(turn: Turn, worker: WorkerId, **seen: Any) -> None:
    """Something was heard: the process lives, whatever was thought of it. `seen`: what else is known of it now."""
    turn.see(worker, last_message_at=turn.now, last_message_listening=turn.job.listening, ping=None, **seen)
    record = turn.record(worker)
    if record.standing is not Standing.HERE and record.ending is None:
        turn.note(EventKind.RETURNED, f"worker {worker} is back; it was evicted: {record.why}", worker)
        turn.mark(worker, standing=Standing.HERE, why="")


def on_status(turn: Turn, worker: WorkerId, status: Status) -> None:
    """A worker says where it stands."""
    process = turn.job.processes[worker]
    if status.sequence >= process.status.sequence:
        turn.see(worker, status=status)
        _learn(turn, worker, status, process.status)


def _learn(turn: Turn, worker: WorkerId, status: Status, before: Status) -> None:
    """What it tells of the job. `before`: what it said last."""
    durable = turn.durable
    highest = max(durable.last_generation, status.promised, status.generation)
    if highest > durable.last_generation:
        turn.keep(last_generation=highest)
    checkpoints.on_status(turn, worker, status, before)
    corruption.on_status(turn, worker, status)
    planned_changes.on_status(turn, status)
    if status.committed_in > durable.committed_in:
        turn.keep(committed_in=status.committed_in)
        progress.on_first_commit(turn, worker)
    failures.forgive(turn, status)
    if status.dead:
        failure_detector.on_seen_to_die(turn, worker, status.dead)
    if status.drain:
        scaling.drain(turn, worker, Leaving.DRAIN, status.grace_seconds)


def _learn_step(turn: Turn, worker: WorkerId, step: int) -> None:
    """It may have made steps since its last heartbeat."""
    status = turn.job.processes[worker].status
    if status.generation > 0 and step > status.step:
        turn.see(worker, status=replace(status, step=step))


def _take_result(turn: Turn, worker: WorkerId, result: Result) -> None:
    if result.failure:
        _learn_step(turn, worker, result.step)
        if result.everyone and claims.counts_for_all(turn, worker):
            ending.fail(turn, f"worker {worker}: {result.failure}")
        else:
            failures.on_failure(turn, worker, result.failure, result.fault, result.step)
        return
    if not claims.counts_for_all(turn, worker):
        return
    known = turn.durable.fingerprint
    if known and result.fingerprint != known and result.step == turn.durable.step:
        ending.fail(
            turn,
            f"worker {worker} ended step {result.step} with fingerprint {result.fingerprint[:16]}…, another worker "
            f"with {known[:16]}…. Their states differ; this is a bug in Shoal; please report it.",
        )
    elif result.fingerprint:
        turn.keep(
            fingerprint=result.fingerprint,
            loss=result.loss,
            reports=shown_reports(turn.job),
            step=max(turn.durable.step, result.step),
            step_seconds_median=step_seconds_median(turn.job),
        )


def _count_void_lanes(turn: Turn, worker: WorkerId) -> None:
    now, counted = turn.job.processes[worker].telemetry.void_lanes, turn.record(worker).void_lanes_counted
    if now > counted:
        turn.mark(worker, void_lanes_counted=now)
        turn.count("shoal_void_lanes_total", now - counted)


def _count_spoilt_steps(turn: Turn, worker: WorkerId) -> None:
    """Counts what is new in a member's telemetry; the 1st, 10th, 100th … is an event."""
    telemetry, durable = turn.job.processes[worker].telemetry, turn.durable
    skipped, before = telemetry.skipped_micro_batches, durable.skipped_micro_batches
    steps, steps_before = telemetry.not_finite_steps, durable.not_finite_steps
    if (skipped <= before and steps <= steps_before) or not is_member(turn.world, worker):
        return
    if skipped > before:
        turn.keep(skipped_micro_batches=skipped)
        turn.count("shoal_skipped_micro_batches_total", skipped - before)
        if passes_milestone(before, skipped):
            turn.note(EventKind.MICRO_BATCHES_SKIPPED, f"micro-batches skipped by the script so far: {skipped}", worker)
    if steps > steps_before:
        turn.keep(not_finite_steps=steps)
        if passes_milestone(steps_before, steps):
            turn.note(
                EventKind.NOT_FINITE, f"steps that were not finite so far: {steps}; {telemetry.not_finite}", worker
            )
