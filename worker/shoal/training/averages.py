"""Averages of weights as a script reads them: `engine.averaged()`.

How they come is the parameters' affair: as a whole copy (parameters.py), or, where parameters are sharded (stage 3),
unit by unit in the parameters' place. There, while a script reads them, other units stand in for those of the weights,
in memory of their own: what is gathered of weights stays as it is, with all that autograd has saved of it, and is the
parameters' again at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.flat import adopt_without_values
from shoal.blocks.released import OnTouch, release, restore
from shoal.blocks.sharded_memory import ShardedMemory
from shoal.blocks.unit_flats import Presence
from shoal.exchange.world import World
from shoal.training.context import TrainingContext
from shoal.training.evaluation import untouched
from shoal.training.gathered_units import GatheredUnits, Own
from shoal.training.parameters import Parameters
from shoal.training.sharded_parameters import ShardedParameters, listen, with_parameters


class AveragesRead:
    """What a script reads of averages of weights on one worker, and what is refused meanwhile."""

    def __init__(self, context: TrainingContext, parameters: Parameters) -> None:
        self._context, self._parameters = context, parameters
        self.are_shown = False
        """Whether the module's parameters are the averages: what a loop does with a step is refused then."""

    def check(self, call: str) -> None:
        """Raises `UserError` where this job has no averages to be read. `call`: how the script asks."""
        if self._context.config.average is None:
            raise UserError(f"{call} needs averages of weights, and this job keeps none; set `shoal.average`.")

    @contextmanager
    def here(self) -> Iterator[None]:
        """`Engine.averaged`."""
        context = self._context
        self.check("engine.averaged")
        context.first_weights.check("engine.averaged")
        if self.are_shown:
            raise UserError("engine.averaged was entered within engine.averaged; leave the first one before it.")
        with untouched(context.state.module), context.forward_seed.away(), torch.no_grad(), self._parameters.averaged():
            self.are_shown = True
            try:
                yield
            finally:
                self.are_shown = False

    def refuse(self, call: str) -> None:
        """Raises `UserError`: averages are shown."""
        raise UserError(f"{call} was called within engine.averaged; leave that context before it.")


class AveragedUnits(GatheredUnits):
    """Averages in the place of the parameters, until `put_back`. `weights`: what they are in the place of."""

    are_weights = False

    def __init__(self, context: TrainingContext, on_touch: OnTouch, weights: GatheredUnits) -> None:
        layout, self._placed, self._of_weights = context.state.held_layout, context.state.placed, weights
        restore(self._placed)
        memory = ShardedMemory(layout, can_be_seen=False, is_empty=True)
        self._give_back = adopt_without_values(layout, self._placed, memory.beneath)
        super().__init__(context, context.state.held.home.averages, on_touch, memory, None)
        for unit in self:
            unit.begin_elsewhere(on_touch)
        assert context.world is not None
        self.on_world(context.world)

    def on_world(self, world: World) -> None:
        super().on_world(world)
        release(self._placed, self.on_touch)

    def _own_of(self, unit: int) -> Own:
        """Read each time: what the parameters' dtype or a file makes copies of is kept by no one."""
        own = super()._own_of(unit)
        del self._own[unit]
        return own

    def put_back(self) -> None:
        """The parameters are views of the weights' memory again, here or not as they were."""
        if self._fetch is not None:
            self._fetch.give_up()
        self.free_all()
        restore(self._placed)
        for give_back in self._give_back:
            give_back()
        for unit in self._of_weights:
            if unit.presence is not Presence.HERE:
                release(unit.parameters, self._of_weights.on_touch)


class ParametersAndAverages(ShardedParameters):
    """Sharded parameters of a job that may keep averages."""

    _averaged: ShardedParameters | None = None
    """What stands in for this while the script reads averages."""

    def on_world(self, world: World) -> None:
        super().on_world(world)
        if self._averaged is not None:
            self._averaged.on_world(world)

    def after_evaluating(self) -> None:
        if self._averaged is not None:
            self._averaged.after_evaluating()
        else:
            super().after_evaluating()

    def reading(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:  # each of any shape
        return super().reading(tensors) if self._averaged is None else self._averaged.reading(tensors)

    @contextmanager
    def gathered(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        with super().gathered(modules) if self._averaged is None else self._averaged.gathered(modules):
            yield

    @contextmanager
    def averaged(self, is_owed: bool = False) -> Iterator[None]:
        if self._is_called or self._is_backward:
            raise UserError("engine.averaged was entered within a forward or backward; enter it around the forward.")
        if self._context.world is None:
            yield
            return
        weights, module = self.units, self._context.state.module
        self._averaged = averaged = ShardedParameters(
            self._context, lambda on_touch: AveragedUnits(self._context, on_touch, weights), self._take_part
        )
        averages = averaged.units
        assert isinstance(averages, AveragedUnits)
        open_units = {unit.number for some in self._open for unit in some}
        wanted = [unit for unit in averages if unit.number in open_units]
        try:
            if is_owed:
                averages.bring(wanted)
            else:
                averaged._bring(wanted)
            with averaged._staying(wanted):
                yield
        finally:
            self._averaged = None
            averages.put_back()
            listen(with_parameters(module), self)
