"""A worker's telemetry on the wire: its numbers, its changes of the world, its GPU.

`worker.py` has it in heartbeats. Reading raises `UserError` for a value that is out of bounds; a figure of a GPU is for
people alone, and is left out instead: a driver's odd answer must not end a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from shoal_protos import session_pb2 as pb
from shoal_protos.gpu import MOST_GPUS, Gpu, Throttle, is_possible
from shoal_protos.messages import MOST_REPORTS, Change, Telemetry
from shoal_protos.wire import bounds
from shoal_protos.wire.worker_parts import read_save_report, write_save_report

Figure = Literal["use_ratio", "memory_bytes", "memory_total_bytes", "celsius", "throttled"]


def write_telemetry(telemetry: Telemetry) -> pb.Telemetry:
    return pb.Telemetry(
        loss=telemetry.loss,
        step_seconds=telemetry.step_seconds,
        step_seconds_median=telemetry.step_seconds_median,
        training_seconds=telemetry.training_seconds,
        fill_bytes=telemetry.fill_bytes,
        memory_bytes=dict(telemetry.memory_bytes),
        changes=[_write_change(change) for change in telemetry.changes[-bounds.MAX_CHANGES :]],
        saves=[write_save_report(saved) for saved in telemetry.saves[-bounds.MAX_CHANGES :]],
        skipped_folders=bounds.readable(telemetry.skipped_folders),
        changed_values=bounds.readable(telemetry.changed_values),
        skipped_micro_batches=telemetry.skipped_micro_batches,
        not_finite_steps=telemetry.not_finite_steps,
        not_finite=bounds.readable(telemetry.not_finite),
        state_file_bytes_per_second=telemetry.state_file_bytes_per_second,
        reports={bounds.one_line(name): value for name, value in telemetry.reports.items()},
        void_lanes=telemetry.void_lanes,
        cell_wait_seconds=telemetry.cell_wait_seconds,
        gpu=_write_gpu(telemetry.gpu) if telemetry.gpu is not None else None,
        lane_seconds=telemetry.lane_seconds,
    )


def read_telemetry(given: pb.Telemetry) -> Telemetry:
    return Telemetry(
        loss=given.loss if given.HasField("loss") else None,
        step_seconds=bounds.seconds("telemetry.step_seconds", given.step_seconds),
        step_seconds_median=bounds.seconds("telemetry.step_seconds_median", given.step_seconds_median),
        training_seconds=bounds.seconds("telemetry.training_seconds", given.training_seconds),
        fill_bytes=bounds.whole("telemetry.fill_bytes", given.fill_bytes),
        memory_bytes=_read_bytes("telemetry.memory_bytes", given.memory_bytes),
        changes=tuple(map(_read_change, bounds.few("telemetry.changes", given.changes, bounds.MAX_CHANGES))),
        saves=tuple(map(read_save_report, bounds.few("telemetry.saves", given.saves, bounds.MAX_CHANGES))),
        skipped_folders=bounds.text("telemetry.skipped_folders", given.skipped_folders),
        changed_values=bounds.text("telemetry.changed_values", given.changed_values),
        skipped_micro_batches=bounds.whole("telemetry.skipped_micro_batches", given.skipped_micro_batches),
        not_finite_steps=bounds.whole("telemetry.not_finite_steps", given.not_finite_steps),
        not_finite=bounds.text("telemetry.not_finite", given.not_finite),
        state_file_bytes_per_second=bounds.whole(
            "telemetry.state_file_bytes_per_second", given.state_file_bytes_per_second
        ),
        reports={
            bounds.label("telemetry.reports", name): value
            for name, value in bounds.few("telemetry.reports", given.reports, MOST_REPORTS).items()
        },
        void_lanes=bounds.whole("telemetry.void_lanes", given.void_lanes),
        cell_wait_seconds=bounds.seconds("telemetry.cell_wait_seconds", given.cell_wait_seconds),
        gpu=_read_gpu(given.gpu) if given.HasField("gpu") else None,
        lane_seconds=bounds.seconds("telemetry.lane_seconds", given.lane_seconds),
    )


def _write_change(change: Change) -> pb.Change:
    return pb.Change(
        generation=change.generation,
        from_step=change.from_step,
        pause_seconds=change.pause_seconds,
        phases=dict(change.phases),
        promoted_blocks=change.promoted_blocks,
        pause_bytes=change.pause_bytes,
        checkpoint_bytes=change.checkpoint_bytes,
    )


def _read_change(message: pb.Change) -> Change:
    phases = bounds.few("change.phases", message.phases, bounds.MAX_KINDS)
    return Change(
        generation=bounds.whole("change.generation", message.generation),
        from_step=bounds.whole("change.from_step", message.from_step),
        pause_seconds=bounds.seconds("change.pause_seconds", message.pause_seconds),
        phases={
            bounds.name("change.phases's key", phase): bounds.seconds(f"change.phases.{phase}", value)
            for phase, value in phases.items()
        },
        promoted_blocks=bounds.whole("change.promoted_blocks", message.promoted_blocks),
        pause_bytes=bounds.whole("change.pause_bytes", message.pause_bytes),
        checkpoint_bytes=bounds.whole("change.checkpoint_bytes", message.checkpoint_bytes),
    )


def _read_bytes(field: str, table: Mapping[str, int]) -> dict[str, int]:
    bounds.few(field, table, bounds.MAX_KINDS)
    return {
        bounds.name(f"{field}'s key", kind): bounds.whole(f"{field}.{kind}", value) for kind, value in table.items()
    }


def _write_gpu(gpu: Gpu) -> pb.Gpu:
    return pb.Gpu(
        name=bounds.one_line(gpu.name),
        index=gpu.index,
        use_ratio=gpu.use_ratio,
        memory_bytes=gpu.memory_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
        celsius=gpu.celsius,
        throttled=int(gpu.throttled) if gpu.throttled is not None else None,
        why=bounds.readable(gpu.why),
    )


def _read_gpu(message: pb.Gpu) -> Gpu:
    throttled = _figure(message, "throttled")
    return Gpu(
        name=bounds.label("gpu.name", message.name),
        index=bounds.whole("gpu.index", message.index, most=MOST_GPUS - 1),
        use_ratio=_figure(message, "use_ratio"),
        memory_bytes=_figure(message, "memory_bytes"),
        memory_total_bytes=_figure(message, "memory_total_bytes"),
        celsius=_figure(message, "celsius"),
        throttled=Throttle(throttled) if throttled is not None else None,
        why=bounds.text("gpu.why", message.why),
    )


def _figure(message: pb.Gpu, name: Figure) -> Any:
    """Return the figure; None: it is not there, or cannot be."""
    value = getattr(message, name)
    return value if message.HasField(name) and is_possible(name, value) else None
