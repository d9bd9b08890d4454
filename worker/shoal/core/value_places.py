"""Which elements of a bucket have a value of a state that is not one for each: all others are zero.

Blocks cut such state like all other, so elsewhere it has a place for each element. Where it lies and travels (blocks,
fills, files of checkpoints) these values alone are there, in the order of their elements. Called by what keeps, sends,
writes and reads state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from shoal_protos.runs import Span
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """Those in these spans, ascending."""

    spans: tuple[Span, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.spans]

    @cached_property
    def _before(self) -> list[int]:
        """How many lie before each span."""
        return [0, *accumulate(stop - start for start, stop in self.spans)]

    def before(self, element: int) -> int:
        """How many have one before this element."""
        index = bisect_right(self._starts, element) - 1
        if index < 0:
            return 0
        start, stop = self.spans[index]
        return self._before[index] + min(element, stop) - start

    def within(self, first: int, stop: int) -> Iterator[Span]:
        """Their spans from `first` to before `stop`."""
        for start, end in self.spans[max(0, bisect_right(self._starts, first) - 1) :]:
            if start >= stop:
                return
            if end > first:
                yield max(start, first), min(end, stop)

    def part(self, first: int, stop: int) -> Spans:
        """The same of elements `[first, stop)`, counted from there."""
        return Spans(tuple((start - first, end - first) for start, end in self.within(first, stop)))

    def together(
        self,
        values: Tensor,  # (elements,)
        first: int,
    ) -> Tensor:  # (those that have one,)
        """Of the values of elements that begin at `first`, those that are there."""
        parts = [values[start - first : stop - first] for start, stop in self.within(first, first + values.numel())]
        return torch.cat(parts) if parts else values.new_empty(0)

    def apart(
        self,
        values: Tensor,  # (those that have one,)
        first: int,
        stop: int,
    ) -> Tensor:  # (stop - first,)
        """The inverse, of elements `[first, stop)`."""
        found, at = values.new_zeros(stop - first), 0
        for start, end in self.within(first, stop):
            found[start - first : end - first] = values[at : at + end - start]
            at += end - start
        return found


@dataclass(frozen=True)
class Strides:
    """The first `used` of each `each`, from element 0 on. All bounds are multiples of `each`."""

    each: int
    used: int

    def before(self, element: int) -> int:
        """How many have one before this element."""
        return element // self.each * self.used

    def part(self, _first: int, _stop: int) -> Strides:
        """The same of elements `[first, stop)`, counted from there."""
        return self

    def together(
        self,
        values: Tensor,  # (elements,)
        _first: int,
    ) -> Tensor:  # (those that have one,)
        """Of the values of elements that begin at `first`, those that are there."""
        return values.view(-1, self.each)[:, : self.used].reshape(-1)

    def apart(
        self,
        values: Tensor,  # (those that have one,)
        first: int,
        stop: int,
    ) -> Tensor:  # (stop - first,)
        """The inverse, of elements `[first, stop)`."""
        found = values.new_zeros((stop - first) // self.each, self.each)
        found[:, : self.used] = values.view(-1, self.used)
        return found.view(-1)


Places = Spans | Strides
