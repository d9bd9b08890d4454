"""Reads micro-batches for a Trainer, which needs to know what the whole step has before its first forward.

The loss is divided by the items (tokens that count) of all lanes' micro-batches. So a worker reads those of the other
lanes too, counts, and drops them; its own are read once. Seeds are those of each lane: what is counted is what is
trained. Data workers read ahead where the loader has some.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any

import torch

from shoal.core.stream_position import Bookmark
from shoal.data.data_workers import DataWorkers, Reading
from shoal.data.seeds import RandomState, seed_from
from shoal.data.source import NO_SAMPLES, NumberedSamples, Place, Read

Batches = list[list[int]]


class BatchOrder:
    """The order of samples that a Trainer's own data loader has, as lanes read it: in place of a `Sampler`.

    A step is the next `lanes × micro_batches_per_lane` batches of the loader's batch sampler, so a step has the samples
    that it has in the Trainer; the last step of an epoch may have fewer batches, and its last batch fewer samples. An
    epoch's order is laid out when it is first asked for: whoever joins in its middle finds the same.
    """

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


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a Trainer wants to know of a batch."""

    items: Any
    """How many items its loss is a sum over, as the Trainer counts them; None: it does not."""
    operations: float
    """Floating-point operations of its forward and backward."""
    tokens: int
    """Of its inputs."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The same of all micro-batches of a step."""

    step: int
    batches: int
    items: Any
    operations: float
    tokens: int


Look = Callable[[Any], BatchFacts]


class StepReader(NumberedSamples):
    """A `Source` that looks at all batches of a step before it gives the first one out."""

    def __init__(self, loader: Any, order: Any, seed: int, look: Look, reading: Reading) -> None:
        """`order`: a `BatchOrder` of the loader's batches. `reading`: how the loader reads."""
        super().__init__(loader.dataset, loader.collate_fn, order, seed)
        self.order, self._look = order, look
        self._facts: StepFacts | None = None
        self._kept: dict[tuple[int, int], Any] = {}
        source = NumberedSamples(loader.dataset, loader.collate_fn, order, seed)
        self._workers = DataWorkers(source, reading, seed) if reading.processes else None

    def close(self) -> None:
        """Ends data workers; from then on samples are read on the training thread."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def facts(self, step: int) -> StepFacts:
        """Of a step, whose batches are read if they have not been."""
        if self._facts is None or self._facts.step != step:
            self._facts = self._read_step(step)
        return self._facts

    def _read_step(self, step: int) -> StepFacts:
        self._kept = {}
        found: list[BatchFacts] = []
        for lane, micro in self.order.places:
            batch = self._read_place((step, lane, micro))
            if batch is not NO_SAMPLES:
                self._kept[lane, micro] = batch
                found.append(self._look(batch))
        counted = [facts.items for facts in found if facts.items is not None]
        items = sum(counted) if len(counted) == len(found) else None
        operations = sum(facts.operations for facts in found)
        return StepFacts(step, len(found), items, operations, sum(facts.tokens for facts in found))

    def _read_place(self, place: Place) -> Any:
        if not self.order.indices(*place):
            return NO_SAMPLES
        read = super().read(place) if self._workers is None else self._workers.take(place, self._after(place), _nowhere)
        return read.batch

    def _after(self, place: Place) -> Iterator[Place]:
        """What is read next, of all lanes."""
        step, *at = place
        places = self.order.places
        for later in count(step):
            for lane, micro in places[places.index((at[0], at[1])) + 1 :] if later == step else places:
                if self.order.indices(later, lane, micro):
                    yield later, lane, micro

    def read(self, place: Place, bookmark: Bookmark | None = None) -> Read:  # noqa: ARG002  (nothing is quicker)
        """A batch is given out once: the loop may change it, and it is read again if it is asked for again."""
        step, *at = place
        self.facts(step)
        batch = self._kept.pop((at[0], at[1]), None)
        return Read(batch if batch is not None else self._read_place(place))


def _nowhere(_: Place) -> None:
    """No place is quicker from another."""
