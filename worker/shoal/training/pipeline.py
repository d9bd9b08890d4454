"""A pipeline within the loop: a lane is one call of a schedule, which makes all forwards and backwards of its stages.

The schedule divides the lane's batch into micro-batches, and adds their gradients up where `engine.backward` would. The
last stage's losses are noted as it computes them. Random numbers begin anew with each call, others on each stage: two
stages would else drop the same places. In an evaluation a call makes forwards alone, and all stages get their loss. A
cell that breaks in it is void until the next lane, as in any evaluation. Called by training_loop.py and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.cells.call import LoopPlace
from shoal.cells.pipelining import ALONE, PipelineSchedules
from shoal.data.seeds import seed_everything
from shoal.group.group import WorldChanged
from shoal.guards.loop_guards import check_loss
from shoal.training.context import TrainingContext
from shoal.training.lane_loop import Loss, Made, kept_loss


class StageLoss:
    """A script's loss function, as a schedule calls it for each micro-batch."""

    def __init__(self, pipeline: Pipeline, function: Callable[..., Tensor]) -> None:
        self._pipeline, self._function = pipeline, function

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:  # ()
        return self._pipeline.divided(self._function(*arguments, **named))


class Evaluated(NamedTuple):
    """What a schedule has made of a batch of an evaluation."""

    loss: Tensor  # ()
    """float64, the mean over the micro-batches, the same on all stages; zero where the cell broke, and not counted."""
    output: Any
    """Of the model, on the last stage; elsewhere, and where the cell broke, None."""


class Pipeline:
    """Of one engine."""

    def __init__(self, context: TrainingContext) -> None:
        config = context.config
        self._context, self.micro_batches = context, config.micro_batches_per_call
        self._schedules = PipelineSchedules(config.cell, self.micro_batches)
        self._is_used = config.cell.pipeline > 1
        self._losses: list[Loss] = []
        """Of the call at hand."""
        self._evaluates = False
        """Whether that is one of an evaluation."""

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
        if self._evaluates:
            check_loss(loss, "engine.loss_fn", has_graph=False)
            self._losses.append(loss.item())
            return loss
        if not torch.is_grad_enabled():
            raise UserError(
                "engine.loss_fn got a loss outside of training; in an evaluation call engine.run(schedule.eval, …) "
                "within `with engine.evaluating():`."
            )
        check_loss(loss, "engine.loss_fn")
        state = self._context.state
        if not self._schedules.is_shaking_hands:
            self._losses.append(kept_loss(loss, state))
        scaled = loss if state.loss_scale is None else loss.float() * state.scale
        return scaled / self.micro_batches

    def prepared(self, call: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Made:
        """The call of a schedule's `step` as it is to be made. Raises `UserError` for any other."""
        schedule = self._taken(call, "step")
        return partial(self._run, schedule, partial(call, *inputs, **named))

    def _taken(self, call: Callable[..., Any], name: str) -> Any:
        """The schedule of a call. Raises `UserError`."""
        if not self._is_used:
            raise UserError(
                "engine.run is for cells with a pipeline, and this job's have none; call engine.module and "
                'engine.backward, or set `"shoal": {"cell": {"pipeline": 2}}`.'
            )
        return self._schedules.of(call, name, StageLoss)

    def _run(self, schedule: Any, call: Callable[[], Any]) -> Sequence[Loss]:
        """Returns the losses of the micro-batches; none but on the last stage. In a warm-up it has no neighbours, and
        rehearses the call where it can. Raises `WorldChanged`.
        """
        context, self._losses = self._context, []
        if context.world is None and not self._schedules.can_rehearse(schedule):
            return ()
        generation = ALONE if context.world is None else context.world.plan.generation
        place = context.state.layout.part.place
        with context.forward_seed.away():
            self._schedules.enter(generation, schedule, context.state.module, context.config.micro_batch_size)
            seed_everything(context.config.seed, context.state.step, *context.loop.place, purpose=f"stage {place}")
            call()
        context.autocast.end()
        return self._losses

    def evaluate(
        self, call: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], samples: int
    ) -> Evaluated:
        """What a call of a schedule's `eval` makes of a batch of so many samples. Raises `UserError` for any other."""
        schedule, context, hub = self._taken(call, "eval"), self._context, self._context.hub
        broken = Evaluated(torch.zeros((), dtype=torch.float64), None)
        if context.world is None or hub is None:
            return broken
        self._losses, self._evaluates = [], True
        try:
            with hub.raising():
                hub.meet(LoopPlace.EVALUATION)
                self._schedules.enter(context.world.plan.generation, schedule, context.state.module, samples)
                output = call(*inputs, **named)
                loss = torch.tensor(sum(self._losses) / self.micro_batches, dtype=torch.float64)
                hub.spread_from_last_stage(loss)
        except WorldChanged:  # all that follows is answered from here, until the next lane
            return broken
        finally:
            self._evaluates = False
        return Evaluated(loss, output)
