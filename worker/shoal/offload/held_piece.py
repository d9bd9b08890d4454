"""A piece: blocks that follow each other in one bucket, whose state is in the file and is carried at one time.

Pieces lie on a grid of the bucket, so that what fills bring part by part grows together again and no piece is larger
than a cell. Where a piece's tensors lie in the file is no order of the blocks: pages are given back and taken again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from shoal_protos.runs import Runs, Span, union
from torch import Tensor

from shoal.blocks.loaded_state import State
from shoal.core.layout import Layout, Stretch
from shoal.offload.state_file import PAGE_BYTES, Pages
from shoal.offload.transfers import Buffer, FileRange, Ranges

PIECE_ELEMENTS = 1 << 20
"""12 MiB of master weights and AdamW's state: far more than a disk needs to be busy."""


def cell_blocks(layout: Layout, bucket: int) -> int:
    """Blocks of a cell of the grid: of a whole piece."""
    return max(1, PIECE_ELEMENTS // layout.buckets[bucket].block_elements)


def cells(layout: Layout, stretch: Stretch) -> Iterator[Stretch]:
    """A stretch, cut at the grid."""
    size, start = cell_blocks(layout, stretch.bucket), stretch.start
    while start < stretch.stop:
        stop = min(stretch.stop, (start // size + 1) * size)
        yield Stretch(stretch.bucket, start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a tensor of a piece lies in the file."""

    dtype: torch.dtype
    pages: Pages

    def part(self, first: int, stop: int) -> FilePlace:
        """Where elements `[first, stop)` of it lie."""
        found, at = list[Span](), 0
        low, high = (element * self.dtype.itemsize // PAGE_BYTES for element in (first, stop))
        for start, end in self.pages:
            begin, until = max(start, start + low - at), min(end, start + high - at)
            if begin < until:
                found.append((begin, until))
            at += end - start
        return FilePlace(self.dtype, tuple(found))

    def and_then(self, other: FilePlace) -> FilePlace:
        """One after the other."""
        mine, theirs = self.pages, other.pages
        if mine and theirs and mine[-1][1] == theirs[0][0]:
            return FilePlace(self.dtype, (*mine[:-1], (mine[-1][0], theirs[0][1]), *theirs[1:]))
        return FilePlace(self.dtype, (*mine, *theirs))


@dataclass(slots=True)
class HeldPiece:
    """`elements`: of the stretch."""

    stretch: Stretch
    elements: int
    shared: State  # each ()
    """The numbers that all its blocks share: they stay in memory."""
    places: dict[str, FilePlace]
    """By key, in the order in which the tensors lie in a buffer."""

    @property
    def bytes(self) -> int:
        """Of the tensors in the file."""
        return sum(self.elements * place.dtype.itemsize for place in self.places.values())

    @property
    def pages(self) -> Runs:
        """All that it takes of the file."""
        return union(Runs(place.pages) for place in self.places.values())

    def starts(self) -> dict[str, int]:
        """Where in a buffer each tensor begins."""
        found, at = {}, 0
        for key, place in self.places.items():
            found[key] = at
            at += self.elements * place.dtype.itemsize
        return found

    def ranges(self) -> Ranges:
        """All its tensors; neighbours in the file are one range."""
        found: list[FileRange] = []
        at = 0
        for place in self.places.values():
            for first, stop in place.pages:
                file_at, count = first * PAGE_BYTES, (stop - first) * PAGE_BYTES
                if found and found[-1].at + found[-1].bytes == file_at:
                    found[-1] = found[-1]._replace(bytes=found[-1].bytes + count)
                else:
                    found.append(FileRange(file_at, at, count))
                at += count
        return tuple(found)

    def state(self, buffer: Buffer) -> State:  # each (elements,), or ()
        """Its state, with views of a buffer."""
        starts = self.starts()
        views = {key: buffer.view(starts[key], self.elements, place.dtype) for key, place in self.places.items()}
        return {**self.shared, **views}

    def outline(self) -> State:  # each (elements,) without values, or ()
        """Keys, dtypes and sizes of its state."""
        blank = {
            key: torch.empty(self.elements, dtype=place.dtype, device="meta") for key, place in self.places.items()
        }
        return {**self.shared, **blank}

    def part(self, stretch: Stretch) -> HeldPiece:
        """Some of its blocks, where they lie."""
        blocks = self.elements // self.stretch.blocks
        first, stop = ((at - self.stretch.start) * blocks for at in (stretch.start, stretch.stop))
        places = {key: place.part(first, stop) for key, place in self.places.items()}
        return HeldPiece(stretch, stop - first, self.shared, places)

    def with_own_numbers(self) -> HeldPiece:
        """The same, with copies of the shared numbers: an update changes each of them in place."""
        return HeldPiece(self.stretch, self.elements, {k: v.clone() for k, v in self.shared.items()}, self.places)

    def is_continued_by(self, other: HeldPiece, layout: Layout) -> bool:
        """Whether `other` has the next blocks of the same cell, and the same kind of state."""
        size, mine, theirs = cell_blocks(layout, self.stretch.bucket), self.stretch, other.stretch
        if (mine.bucket, mine.stop) != (theirs.bucket, theirs.start) or theirs.start % size == 0:
            return False
        if {key: place.dtype for key, place in self.places.items()} != {
            key: place.dtype for key, place in other.places.items()
        }:
            return False
        return _are_equal(self.shared, other.shared)

    def and_then(self, other: HeldPiece) -> HeldPiece:
        """Both as one; nothing is moved."""
        places = {key: place.and_then(other.places[key]) for key, place in self.places.items()}
        stretch = Stretch(self.stretch.bucket, self.stretch.start, other.stretch.stop)
        return HeldPiece(stretch, self.elements + other.elements, self.shared, places)


def _are_equal(
    mine: Mapping[str, Tensor],  # each ()
    theirs: Mapping[str, Tensor],  # each ()
) -> bool:
    if mine.keys() != theirs.keys():
        return False
    return all(value.dtype == theirs[key].dtype and torch.equal(value, theirs[key]) for key, value in mine.items())
