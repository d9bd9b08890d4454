"""Bytes that fills have moved, counted: into the present generation's place in the history and into the job's counter
at the same moment, so that the report and the metric always say the same.

A worker tells how much its process has received since it began; how much of that is counted is in its record, so that
another controller goes on from there. Counted where something is written anyway, and not with every slice.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_controller.core.machine.turn import Turn


def count_fills(turn: Turn) -> None:
    """What workers have told since the last time was moved by the present generation."""
    history = turn.durable.history
    if not history:
        return
    moved = 0
    for worker, process in turn.job.processes.items():
        received, counted = process.telemetry.fill_bytes, turn.record(worker).fill_bytes_counted
        if received > counted:
            moved += received - counted
            turn.mark(worker, fill_bytes_counted=received)
    if moved:
        newest = replace(history[-1], fill_bytes=history[-1].fill_bytes + moved)
        turn.keep(history=(*history[:-1], newest))
        turn.count("shoal_repartition_bytes_total", moved, source="peer")
