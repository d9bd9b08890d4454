"""What members report of a job's data: micro-batches that were skipped, steps that were not finite.

Members count alike, by the vote's records; whoever has come furthest is heard. Nothing is decided by it.
"""

from __future__ import annotations

from shoal_protos.milestones import passes_milestone
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.turn import Turn


def on_telemetry(turn: Turn, worker: WorkerId) -> None:
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
