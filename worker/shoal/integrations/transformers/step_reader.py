"""Reads micro-batches for a Trainer, which needs to know what the whole step has before its first forward.

The loss is divided by the items (tokens that count) of all lanes' micro-batches. So a worker reads those of the other
lanes too, counts, and drops them; its own are read once. Seeds are those of each lane: what is counted is what is
trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core.stream_position import Bookmark
from shoal.data.source import NO_SAMPLES, Collate, NumberedSamples, Place, Read


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

    def __init__(self, dataset: Any, collate_fn: Collate, order: Any, seed: int, look: Look) -> None:
        """`order`: a `BatchOrder`."""
        super().__init__(dataset, collate_fn, order, seed)
        self.order, self._look = order, look
        self._facts: StepFacts | None = None
        self._kept: dict[tuple[int, int], Any] = {}

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
        return super().read(place).batch if self.order.indices(*place) else NO_SAMPLES

    def read(self, place: Place, bookmark: Bookmark | None = None) -> Read:  # noqa: ARG002  (nothing is quicker)
        """A batch is given out once: the loop may change it, and it is read again if it is asked for again."""
        step, *at = place
        self.facts(step)
        batch = self._kept.pop((at[0], at[1]), None)
        return Read(batch if batch is not None else self._read_place(place))
