"""Evaluation at a step boundary: each member over the lanes it holds, waiting for nobody.

The sums travel with the next vote, with the count of lanes that arrived. Nothing that training reads is changed: mode,
random state and buffers are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from shoal_protos.errors import UserError

from shoal.data.seeds import RandomState

if TYPE_CHECKING:
    from shoal.engine import Engine


class Evaluation:
    """`active` within `engine.evaluating()`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.active = False
        self._lane: dict[str, list[float]] = {}
        self._arrived: dict[str, list[float]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Eval mode without gradients. Raises `UserError` in the middle of a micro-batch."""
        engine = self._engine
        if engine.loop.in_flight:
            raise UserError("engine.evaluating was entered before engine.step; evaluate between two micro-batches.")
        random, was_training = RandomState.save(), engine.module.training
        self.active = True
        engine.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.active = False
            engine.module.train(was_training)
            engine.state.buffers.put_back()
            random.restore()

    def shard(self, dataset: Any) -> Iterator[Any]:
        """Micro-batches of the samples `i` with `i % lanes` held here, lane by lane; a lane's last may be short."""
        if not self.active:
            raise UserError("engine.shard is for `with engine.evaluating():`.")
        config, loop = self._engine.config, self._engine.loop
        for lane in self._engine.lanes:
            numbers = list(range(lane, len(dataset), config.lanes))
            for at in range(0, len(numbers), config.micro_batch_size):
                yield loop.collated(dataset, numbers[at : at + config.micro_batch_size])
                self._engine.step_on()
            self._lane_over()

    def report(self, numbers: dict[str, float]) -> None:
        """One micro-batch's numbers."""
        for name, value in numbers.items():
            kept = self._lane.setdefault(name, [0.0, 0.0])
            kept[0] += value
            kept[1] += 1

    def _lane_over(self) -> None:
        for name, (total, count) in self._lane.items():
            kept = self._arrived.setdefault(name, [0.0, 0.0])
            kept[0] += total / count
            kept[1] += 1
        self._lane = {}

    def take(self) -> dict[str, list[float]]:
        """What the next vote carries: by name the sum of the lanes' means, and how many lanes."""
        arrived, self._arrived = self._arrived, {}
        return arrived
