"""A pipeline within the loop: a lane is one call of a schedule, which makes all forwards and backwards of its stages.

The schedule divides the lane's batch into micro-batches, and adds their gradients up where `engine.backward` would. The
last stage's losses are noted as it computes them. Random numbers begin anew with each call, others on each stage: two
stages would else drop the same places. Called by training_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.cells.pipelining import PipelineSchedules
from shoal.data.seeds import seed_everything
from shoal.guards.loop_guards import check_loss
from shoal.training.context import TrainingContext
from shoal.training.lane_loop import Loss, Made, kept_loss


class StageLoss:
    """A script's loss function, as a schedule calls it for each micro-batch."""

    def __init__(self, pipeline: Pipeline, function: Callable[..., Tensor]) -> None:
        self._pipeline, self._function = pipeline, function

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:  # ()
        return self._pipeline.divided(self._function(*arguments, **named))


class Pipeline:
    """Of one engine."""

    def __init__(self, context: TrainingContext) -> None:
        config = context.config
        self._context, self.micro_batches = context, config.micro_batches_per_call
        self._schedules = PipelineSchedules(config.cell.pipeline, self.micro_batches)
        self._is_used = config.cell.pipeline > 1
        self._losses: list[Loss] = []
        """Of the call at hand."""

    def refuse(self, call: str) -> NoReturn:
        """Raises `UserError` for what is made of one micro-batch, where a lane is a schedule's."""
        raise UserError(
            f"{call} is for one micro-batch, and in a pipeline a schedule trains all of a lane; call "
            "engine.run(schedule.step, …) and engine.step."
        )

    def loss_fn(self, function: Callable[..., Tensor]) -> StageLoss:
        """`Engine.loss_fn`."""
        return StageLoss(self, function)

    def divided(
        self,
        loss: Tensor,  # ()
    ) -> Tensor:  # ()
        """What a micro-batch's loss adds to its lane's, scaled as the job's losses are. Raises `UserError` for one that
        is of no training.
        """
        if not torch.is_grad_enabled():
            raise UserError(
                "engine.loss_fn got a loss outside of training, as a schedule's eval makes it, which is not supported "
                "yet; in engine.evaluating call the stage itself, and pass activations over "
                'cell.group("pipeline") by torch.distributed.send and recv.'
            )
        check_loss(loss, "engine.loss_fn")
        state = self._context.state
        if not self._schedules.is_shaking_hands:
            self._losses.append(kept_loss(loss, state))
        scaled = loss if state.loss_scale is None else loss.float() * state.scale
        return scaled / self.micro_batches

    def prepared(self, call: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Made:
        """The call of a schedule's `step` as it is to be made. Raises `UserError` for any other."""
        if not self._is_used:
            raise UserError(
                "engine.run is for cells with a pipeline, and this job's have none; call engine.module and "
                'engine.backward, or set `"shoal": {"cell": {"pipeline": 2}}`.'
            )
        schedule = self._schedules.of(call, "step", StageLoss)
        return partial(self._run, schedule, partial(call, *inputs, **named))

    def _run(self, schedule: Any, call: Callable[[], Any]) -> Sequence[Loss]:
        """Returns the losses of the micro-batches; none but on the last stage. In a warm-up it has no neighbours, and
        does nothing. Raises `WorldChanged`.
        """
        context, self._losses = self._context, []
        if context.world is None:
            return ()
        place = context.state.layout.part.place
        with context.forward_seed.away():
            self._schedules.enter(context.world, schedule, context.state.module)
            seed_everything(context.config.seed, context.state.step, *context.loop.place, purpose=f"stage {place}")
            call()
        context.autocast.end()
        return self._losses
