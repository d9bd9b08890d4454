"""Reads micro-batches for a Trainer, which needs to know what the whole step has before its first forward.

The loss is divided by the items (tokens that count) of all lanes' micro-batches. So a worker reads those of the other
lanes too, counts, and drops them; its own are read once. Seeds are those of each lane: what is counted is what is
trained. Data workers read ahead where the loader has some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from shoal.core.stream_position import Bookmark
from shoal.data.data_workers import DataWorkers, Reading
from shoal.data.source import NO_SAMPLES, NumberedSamples, Place, Read


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
