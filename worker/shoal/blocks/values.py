"""One value per element of the blocks that a worker keeps: parameters, or reduced gradients, read range by range.

What a worker keeps of a block whole and what only of its own blocks depends on the stage (training/residency.py);
update, norm, exchange, digests and saves read by range and need not know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from shoal_protos.runs import NO_BLOCKS, Runs, Span
from torch import Tensor

from shoal.core.layout import Layout, Stretch


class StretchValues(Protocol):
    """Values of blocks that follow each other."""

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        """Those of blocks that are kept here; as a view, where nothing else is said."""
        ...


class RangeValues(Protocol):
    """Values of elements of a bucket: parameters, gradients, whole or in parts."""

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        """A view of elements of a bucket that lie in such blocks."""
        ...


class BlockValues(StretchValues, RangeValues, Protocol):
    """Values of the blocks that are kept here."""


def without_gaps(
    value: Tensor,  # (elements,) or ()
    first: int,
    gaps: Sequence[Span],
) -> Tensor:  # the same, or a copy of it
    """+0 where no parameter lies: an optimizer may count there (Rprop's step sizes) or turn a sign (`maximize`).

    `gaps`: of the bucket, of which `value` begins with the element `first`.
    """
    if value.dim() == 0:
        return value
    inside = [(max(a - first, 0), min(b - first, value.numel())) for a, b in gaps if a - first < value.numel()]
    inside = [(a, b) for a, b in inside if a < b and value[a:b].view(torch.uint8).count_nonzero()]
    if inside:
        value = value.clone()
        for start, stop in inside:
            value[start:stop] = 0
    return value


class WholeValues:
    """Of all blocks, in one flat per bucket."""

    def __init__(
        self,
        layout: Layout,
        flats: list[Tensor],  # per bucket (elements,)
    ) -> None:
        self._layout, self.flats = layout, flats

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        return self.range(stretch.bucket, *self._layout.elements(stretch))

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        return self.flats[bucket][start:stop]

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(flat.nbytes for flat in self.flats)


FindMemory = Callable[[int, torch.dtype], Tensor]  # (elements,) of the dtype


@dataclass(slots=True)
class _Part:
    """Of a stretch. `values`: `(elements,)`; None: nothing has come yet."""

    elements: int
    is_owned: bool
    values: Tensor | None = None


class ShardValues:
    """Of some blocks, in the wide dtype of their buckets. Memory is found for what comes: it comes for all blocks of a
    stretch, or none is read.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self.runs, self._owned = layout, NO_BLOCKS, NO_BLOCKS
        self.find_for_copies: FindMemory | None = None
        """Where those of blocks that others own lie; None: where all lie."""
        self._starts: list[list[int]] = []
        self._parts: list[list[_Part]] = []
        """Per bucket and stretch."""

    def keep(self, runs: Runs, owned: Runs = NO_BLOCKS) -> None:
        """Of these blocks, from now on; the values of others are forgotten. `owned`: those of them that this worker
        owns; read only where copies lie elsewhere.
        """
        owned = runs & owned if self.find_for_copies is not None else NO_BLOCKS
        if (runs, owned) == (self.runs, self._owned):
            return
        self.runs, self._owned = runs, owned
        self._starts, self._parts = [[] for _ in self._layout.buckets], [[] for _ in self._layout.buckets]
        mine = [(one, True) for one in self._layout.stretches(owned)]
        for stretch, is_owned in sorted(mine + [(one, False) for one in self._layout.stretches(runs - owned)]):
            start, stop = self._layout.elements(stretch)
            self._starts[stretch.bucket].append(start)
            self._parts[stretch.bucket].append(_Part(stop - start, is_owned))

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        return self.range(stretch.bucket, *self._layout.elements(stretch))

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        index = bisect_right(self._starts[bucket], start) - 1
        first = self._starts[bucket][index]
        part = self._parts[bucket][index]
        assert index >= 0 and stop - first <= part.elements, f"{bucket}:{start}:{stop} lies in no kept blocks"
        if part.values is None:
            dtype = self._layout.buckets[bucket].wide_dtype
            if part.is_owned or self.find_for_copies is None:
                part.values = torch.empty(part.elements, dtype=dtype, device=self._layout.device)
            else:
                part.values = self.find_for_copies(part.elements, dtype)
        return part.values[start - first : stop - first]

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(one.values.nbytes for parts in self._parts for one in parts if one.values is not None)
