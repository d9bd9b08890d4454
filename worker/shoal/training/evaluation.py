"""Evaluation between two micro-batches: each member over the lanes it holds, waiting for nobody.

The sums travel with the next vote that passes, with the count of lanes that arrived; after the last step with one that
is cast for them. Nothing that training reads is changed: modes, random state and buffers are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.core.exact_sum import add
from shoal.data.seeds import RandomState, seed_everything
from shoal.exchange.vote import check_names
from shoal.training.context import TrainingContext
from shoal.training.gathered_rows import GatheredRows


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Afterwards modes, buffers and random state are what they were."""
    random, modes = RandomState.save(), [(part, part.training) for part in module.modules()]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for part, named in buffers:
            part._buffers.clear()
            part._buffers.update(named)
        with torch.no_grad():
            for buffer, before in values:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        random.restore()


def check_numbered(dataset: Any) -> None:
    """Raises `UserError` for what has no numbered samples, of which each lane takes its own."""
    if isinstance(dataset, DataLoader):
        raise UserError(
            "engine.shard got a DataLoader; give its dataset, engine.shard(loader.dataset): each worker reads the "
            "samples of its lanes, and the collate_fn of training makes micro-batches of them."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UserError(
            f"engine.shard got a {type(dataset).__name__}, which has no numbered samples; give a map-style dataset "
            "(__getitem__ and __len__)."
        )


Sums = dict[str, list[float]]
"""By name the number of terms, and parts of their sum (core/exact_sum.py)."""


class Evaluation:
    """`active` within `engine.evaluating()`."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self.active = False
        self._anywhere = False
        self.rows = GatheredRows(context)
        self._samples: list[int] = []
        """Of the micro-batch of an evaluation that the script has."""
        self.since_the_step: dict[str, float] = {}
        """Results that arrived by votes without a step since the last committed one."""
        self._lane: Sums = {}
        self._arrived: Sums = {}
        self._in_vote: Sums = {}
        """What a vote carries now, or has carried that did not pass."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Eval mode without gradients. Raises `UserError` in the middle of a micro-batch."""
        context, module = self._context, self._context.state.module
        at_hand = context.loop.in_flight and (context.forward_seed.begun or context.loop.has_gradient)
        if at_hand and not self._anywhere:
            raise UserError(
                "engine.evaluating was entered between a micro-batch's forward and engine.step; evaluate before the "
                "forward or after engine.step."
            )
        self.active, weights = True, context.state.module_guard.whole()
        try:
            with _untouched(module), context.forward_seed.away(), context.autocast.here(), torch.no_grad():
                module.eval()
                yield
        finally:
            self.active, self._lane = False, {}
        context.state.module_guard.forgive(weights)

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """A context for callbacks: one that a change of the world left owed is called in the midst of a lane."""
        self._anywhere = True
        try:
            yield
        finally:
            self._anywhere = False

    def shard(self, dataset: Any) -> Iterator[Any]:
        """Micro-batches of the samples `i` with `i % lanes` held here, lane by lane; a lane's last may be short.

        What a dataset or a forward draws has the seed of step, lane and micro-batch, in every world.
        """
        if not self.active:
            raise UserError("engine.shard is for `with engine.evaluating():`.")
        check_numbered(dataset)
        context = self._context
        config, loop = context.config, context.loop
        for lane in context.lanes:
            numbers = list(range(lane, len(dataset), config.lanes))
            try:
                for at in range(0, len(numbers), config.micro_batch_size):
                    seed_everything(config.seed, max(0, context.state.step), lane, at, purpose="evaluation")
                    self._samples = numbers[at : at + config.micro_batch_size]
                    yield loop.collate(dataset, self._samples)
                    context.step_on()
            finally:
                self._samples = []
                self._lane_over()

    def gather(self, named: dict[str, Tensor]) -> None:
        """One micro-batch's rows. Raises `UserError` outside `shard`."""
        if not self._samples:
            raise UserError("engine.gather is for the batches of engine.shard, within `with engine.evaluating():`.")
        self.rows.add(self._samples, named)

    def report(self, numbers: dict[str, float]) -> None:
        """One micro-batch's numbers. Raises `UserError` outside `shard`, and for more names than a vote can carry."""
        if self._context.world is None:
            return  # a warm-up is of no world
        if not self._samples:
            raise UserError(
                "engine.report in an evaluation is for the batches of engine.shard: within that loop, report each "
                "batch's mean, and engine.reports has the mean over all lanes. A number of this worker alone would "
                "be another one in every world."
            )
        if not numbers.keys() <= self._lane.keys():
            known = self._lane.keys() | self._arrived.keys() | self._in_vote.keys()
            check_names(known | numbers.keys(), "engine.report in an evaluation")
        for name, value in numbers.items():
            kept = self._lane.setdefault(name, [0.0, 0.0])
            kept[0] += 1
            kept[1] += value

    def _lane_over(self) -> None:
        for name, (count, lane_total) in self._lane.items():
            _take_in(self._arrived, name, 1.0, [lane_total / count])
        self._lane = {}

    # ---- in the vote

    def take_to_vote(self) -> Sums:
        """What the next vote carries, by name: how many lanes, and the sum of their means."""
        for name, (count, *parts) in self._arrived.items():
            _take_in(self._in_vote, name, count, parts)
        self._arrived = {}
        return self._in_vote

    def on_commit(self) -> None:
        """A step's vote has passed, here or where this worker's ballot was read: its record has the results."""
        self._in_vote, self.since_the_step = {}, {}

    def on_vote(self, results: dict[str, float]) -> None:
        """A vote without a step has passed."""
        self._in_vote = {}
        self.since_the_step.update(results)

    @property
    def has_unsettled(self) -> bool:
        """Whether there are results that no vote has carried yet: after the last step none of a step comes."""
        return bool(self._arrived or self._in_vote or self.rows.is_pending)


def _take_in(sums: Sums, name: str, count: float, parts: list[float]) -> None:
    known, *sum_of = sums.get(name, [0.0])
    for part in parts:
        add(sum_of, part)
    sums[name] = [known + count, *sum_of]
