"""The memory of training's state on a worker: a line of its log, and what advice depends on when memory ran out.

The line has the bytes as counted and as estimated (`shoal estimate`), once, after the first step that finds here all
that this worker is to hold.

`memory_setting` (for `shoal.config.out_of_memory`) is called by the update, and for an error that the script has not
caught. Makes no tensor.
"""

from __future__ import annotations

import torch
from shoal_protos.memory_estimate import (
    PARAMETER_BYTES,
    CellShare,
    MemorySetup,
    Offload,
    Precision,
    estimate,
    state_bytes_of,
)
from shoal_protos.shape import Shape
from shoal_protos.training_log import get_logger

from shoal.config.out_of_memory import Advice, Setting
from shoal.config.training import TrainingConfig
from shoal.core.layout import Layout
from shoal.exchange.world import World
from shoal.optim.several import title_of
from shoal.optim.twin import may_step_in_parts
from shoal.state.training_state import TrainingState, frozen_in_blocks, frozen_parameters
from shoal.training.activation_checkpointing import finds_units
from shoal.training.context import TrainingContext
from shoal.training.residency import residency_of
from shoal.training.telemetry import held_bytes

PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

FILES = "state_files"
"""What is held in files, among the kinds of memory."""

log = get_logger("shoal")


class MemoryReport:
    """Of one worker."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._is_said = False

    def on_step(self, world: World) -> None:
        """A step is committed and handed out in `world`."""
        if self._is_said or self._context.boundaries < world.plan.boundaries:
            return
        if not (world.lanes and world.kept):
            return
        self._is_said = True
        held = held_bytes(self._context.state)
        processes = self._context.config.cell.processes
        expected = estimate(self._setup(max(1, world.plan.world_size // processes)))
        in_memory = sum(held.values()) - held.get(FILES, 0)
        files = {"estimated_file_bytes": expected.at_rest("file")} if FILES in held else {}
        log.info("memory", measured_bytes=in_memory,
                 estimated_bytes=expected.at_rest("device") + expected.at_rest("host"), **held, **files)  # fmt: skip

    def _setup(self, workers: int) -> MemorySetup:
        """Of a world of so many cells."""
        config, state = self._context.config, self._context.state
        buckets = state.layout.buckets
        precision = PRECISIONS[buckets[0].dtype]
        known: float | None = state_bytes_of(title_of(state.optimizer), state.optimizer.defaults)
        by_parameter = known
        if by_parameter is None:  # with what else is kept
            blocks = len(state.held_layout.trained_runs(state.held.runs))
            by_parameter = state.held.home.state_bytes() / (blocks * state.layout.block_elements)
        elif precision == "fp64":
            by_parameter *= PARAMETER_BYTES["fp64"] / PARAMETER_BYTES["fp32"]
        frozen = [*frozen_parameters(state).values(), *frozen_in_blocks(state).values()]
        elements = sum(parameter.numel() for parameter in frozen)
        sizes = [slot.parameter.elements for bucket in buckets for slot in bucket.slots]
        return MemorySetup(
            parameters=sum(sizes),
            largest_parameter=max(sizes),
            frozen=elements,
            frozen_width=sum(one.numel() * one.element_size() for one in frozen) / elements if elements else 0,
            workers=workers,
            stage=_advice(config).stage_number,
            lanes=config.lanes,
            micro_batches=config.micro_batches_per_lane,
            mirrors=min(config.mirrors, workers - 1),
            precision=precision,
            state_bytes=by_parameter,
            average=config.average is not None and known is not None,
            offload=_offload(config, state),
            cell=_share_of(state.layout, config.cell) if config.cell.processes > 1 else None,
            offload_parameters=config.parameters_on_host and not state.device.on_host,
            mirrors_on_host=config.mirrors_on_host and not state.device.on_host,
        )


def _share_of(layout: Layout, shape: Shape) -> CellShare:
    """What this process has to do with its parameters."""
    kept, contributed, common = 0.0, 0.0, 0
    for bucket in layout.buckets:
        elements, division = sum(slot.parameter.elements for slot in bucket.slots), bucket.division
        mine = elements / layout.part.share(division)[1]
        kept += mine
        contributed += mine * len(layout.part.contributors_to(division))
        common += 0 if division.by_tensor else elements
    return CellShare(shape, round(kept), round(contributed), common)


def _offload(config: TrainingConfig, state: TrainingState) -> Offload:
    if config.state_folder is not None:
        return "file"
    return "host" if config.state_on_host and not state.device.on_host else "none"


def memory_setting(context: TrainingContext) -> Setting:
    """As it is now."""
    config, state = context.config, context.state
    return Setting(
        config=config,
        by_stage=_advice(config),
        workers=context.world.plan.world_size if context.world is not None else 1,
        is_on_host=state.device.on_host,
        has_units=finds_units(state.module, config),
        steps_in_parts=may_step_in_parts(state.optimizer),
    )


def _advice(config: TrainingConfig) -> Advice:
    return residency_of(config.stage).advice(config)
