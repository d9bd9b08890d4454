"""Block runs: a set of block numbers held as few intervals.

Every map of blocks in Shoal (owners, mirrors, fills, inventories) is made of these. Pure: standard library only.
A `Runs` is immutable and canonical (sorted, disjoint, no two intervals touch), so equal sets compare and hash equal.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from shoal_protos.errors import UserError

Span = tuple[int, int]
"""A half-open interval of block numbers: `(start, stop)`."""


class Runs:
    """An immutable set of block numbers. Supports `|`, `&`, `-`, `in`, `len`, `bool`, `==`, iteration in order."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        """Any spans: unsorted, touching and overlapping ones are joined, empty ones dropped."""
        joined: list[Span] = []
        end = -sys.maxsize
        for span in sorted(spans):
            start, stop = span
            if start > end:
                if start < stop:
                    joined.append(span)
                    end = stop
            elif stop > end:
                joined[-1] = (joined[-1][0], stop)
                end = stop
        if joined and joined[0][0] < 0:
            raise ValueError(f"a block number is {joined[0][0]}; block numbers start at 0")
        self._spans = tuple(joined)

    @classmethod
    def of_canonical(cls, spans: Iterable[Span]) -> Runs:
        """What is sorted, disjoint and apart already: such as any part of canonical runs."""
        made = cls.__new__(cls)
        made._spans = tuple(spans)
        return made

    @classmethod
    def of(cls, blocks: Iterable[int]) -> Runs:
        """The runs of single block numbers in any order."""
        spans: list[Span] = []
        for block in sorted(set(blocks)):
            if spans and spans[-1][1] == block:
                spans[-1] = (spans[-1][0], block + 1)
            else:
                spans.append((block, block + 1))
        return cls(spans)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The maximal intervals in ascending order."""
        return self._spans

    def first(self, count: int) -> Runs:
        """The `count` lowest blocks (all of them when there are fewer)."""
        taken: list[Span] = []
        for start, stop in self._spans:
            if count <= 0:
                break
            taken.append((start, min(stop, start + count)))
            count -= stop - start
        return Runs.of_canonical(taken)

    def __or__(self, other: Runs) -> Runs:
        return Runs(self._spans + other._spans) if other._spans else self

    def __and__(self, other: Runs) -> Runs:
        mine, theirs, common = self._spans, other._spans, []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start, stop = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
            if start < stop:
                common.append((start, stop))
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return Runs.of_canonical(common)

    def __sub__(self, other: Runs) -> Runs:
        left: list[Span] = []
        theirs, j = other._spans, 0
        for start, stop in self._spans:
            k = j = _first_beyond(theirs, start, j)
            while k < len(theirs) and theirs[k][0] < stop:
                if start < theirs[k][0]:
                    left.append((start, theirs[k][0]))
                start = max(start, theirs[k][1])
                k += 1
            if start < stop:
                left.append((start, stop))
        return Runs.of_canonical(left)

    def __contains__(self, block: object) -> bool:
        if not isinstance(block, int):
            return False
        index = bisect_right(self._spans, (block, sys.maxsize)) - 1
        return index >= 0 and block < self._spans[index][1]

    def __iter__(self) -> Iterator[int]:
        for start, stop in self._spans:
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum([stop - start for start, stop in self._spans])

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runs) and self._spans == other._spans

    def __hash__(self) -> int:
        return hash(self._spans)

    def __repr__(self) -> str:
        return "Runs(" + ", ".join(f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in self._spans) + ")"

    def __le__(self, other: Runs) -> bool:
        """Whether every block of this set is in the other."""
        return not self - other

    def encode(self) -> list[int]:
        """Run lengths for the wire: gap before the run, length of the run, alternating."""
        lengths: list[int] = []
        at = 0
        for start, stop in self._spans:
            lengths += [start - at, stop - start]
            at = stop
        return lengths

    @classmethod
    def decode(cls, lengths: Iterable[int], limit: int) -> Runs:
        """The inverse of `encode`.

        Raises `UserError` where the numbers are not a canonical encoding, or reach `limit` (the count of blocks).
        """
        numbers = tuple(lengths)
        if len(numbers) % 2:
            raise UserError(f"block runs have {len(numbers)} numbers; expected pairs of gap and length")
        spans: list[Span] = []
        at = 0
        for index in range(0, len(numbers), 2):
            gap, length = numbers[index], numbers[index + 1]
            if length <= 0 or gap < 0 or (gap == 0 and index > 0):
                raise UserError(f"block runs hold gap {gap} and length {length}; runs must be positive and apart")
            start = at + gap
            at = start + length
            if at > limit:
                raise UserError(f"block runs reach block {at - 1}; the job has {limit} blocks (0 to {limit - 1})")
            spans.append((start, at))
        return cls.of_canonical(spans)


def _first_beyond(spans: tuple[Span, ...], start: int, low: int) -> int:
    """The index, `low` or more, of the first span that ends beyond `start`."""
    index = bisect_right(spans, (start, sys.maxsize), low)
    return index - 1 if index > low and spans[index - 1][1] > start else index


NO_BLOCKS = Runs()


def every(count: int) -> Runs:
    """All of `count` blocks."""
    return Runs(((0, count),))


def union(parts: Iterable[Runs]) -> Runs:
    """The blocks that are in any of the parts."""
    return Runs(span for part in parts for span in part.spans)


def in_two(parts: Iterable[Runs]) -> Runs:
    """The blocks that are in two of the parts at least."""
    edges = sorted(edge for part in parts for start, stop in part.spans for edge in ((start, 1), (stop, -1)))
    spans: list[Span] = []
    depth = began = 0
    for place, change in edges:
        if depth == 1 and change > 0:
            began = place
        elif depth == 2 and change < 0:
            spans.append((began, place))
        depth += change
    return Runs(spans)
