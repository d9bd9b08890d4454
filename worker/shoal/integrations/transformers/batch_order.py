"""The order of samples that a Trainer's own data loader has, as lanes read it.

A step is the next `lanes × micro_batches_per_lane` batches of the loader's batch sampler, so a step has the samples
that it has in the Trainer; the last step of an epoch may have fewer batches, and its last batch fewer samples. An
epoch's order is laid out when it is first asked for: whoever joins in its middle finds the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import ceil
from typing import Any

import torch

from shoal.data.seeds import RandomState, seed_from

Batches = list[list[int]]


class BatchOrder:
    """In place of a `Sampler`."""

    def __init__(self, loader: Any, lanes: int, micro_batches: int, seed: int) -> None:
        self._batch_sampler, self._lanes, self._micro_batches = loader.batch_sampler, lanes, micro_batches
        self._seed = seed
        self.samples = len(loader.dataset)
        self.batches_per_epoch = len(loader)
        self.steps_per_epoch = max(1, ceil(self.batches_per_epoch / (lanes * micro_batches)))
        self._epochs: dict[int, Batches] = {}
        """Two at most: data workers read ahead."""

    def last_step(self, max_steps: int | None, epochs: int | None) -> int:
        """The Trainer has worked out how many steps there are."""
        assert max_steps is not None, "the door gives it"
        del epochs
        return max_steps

    def indices(self, step: int, lane: int, micro: int) -> list[int]:
        """The samples of one micro-batch; none where the epoch ends before it."""
        epoch, step = divmod(step, self.steps_per_epoch)
        batches = self._epoch(epoch)
        number = (step * self._micro_batches + micro) * self._lanes + lane
        return batches[number] if number < len(batches) else []

    @property
    def micro_batches(self) -> int:
        """Of a whole step, over all lanes."""
        return self._lanes * self._micro_batches

    @property
    def places(self) -> list[tuple[int, int]]:
        """Lanes and micro-batches of a step, in the order in which the loader has them."""
        return [(lane, micro) for micro in range(self._micro_batches) for lane in range(self._lanes)]

    def digest(self) -> str:
        """Of the first epoch's order: it must be the same on all workers."""
        return hashlib.sha256(repr(self._epoch(0)).encode()).hexdigest()

    def _epoch(self, epoch: int) -> Batches:
        if epoch not in self._epochs:
            kept = dict(list(self._epochs.items())[-1:])
            self._epochs = {**kept, epoch: self._laid_out(epoch)}
        return self._epochs[epoch]

    def _laid_out(self, epoch: int) -> Batches:
        """What samplers draw comes from the seed and the epoch alone."""
        random = RandomState.save()
        try:
            seed_from(f"{self._seed} order of epoch {epoch}")
            for sampler in _samplers(self._batch_sampler):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                generator = getattr(sampler, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            return [list(numbers) for numbers in self._batch_sampler]
        finally:
            random.restore()


def _samplers(batch_sampler: Any) -> Iterator[Any]:
    """The batch sampler, what it wraps, and what these read from."""
    seen: list[int] = []
    waiting = [batch_sampler]
    while waiting:
        sampler = waiting.pop()
        if sampler is None or id(sampler) in seen:
            continue
        seen.append(id(sampler))
        yield sampler
        waiting += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
