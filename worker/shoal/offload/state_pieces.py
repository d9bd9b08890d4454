"""The pieces of one worker's file: which there are, where they lie, and how they come into memory and go back.

A piece is blocks that follow each other in one bucket, whose state is in the file and is carried at one time. Pieces
lie on a grid of the bucket, so that what fills bring part by part grows together again and no piece is larger than a
cell. Where a piece's tensors lie in the file is no order of the blocks: pages are given back and taken again. No
optimizer is known here: what is done to a piece while it is in a buffer is the affair of the home that carries it
(state_place.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from shoal_protos.runs import Runs, Span, union
from torch import Tensor

from shoal.blocks.loaded_state import State
from shoal.core.layout import Layout, Stretch, overlaps
from shoal.offload.state_file import PAGE_BYTES, Pages, StateFile
from shoal.offload.transfers import BUFFERS, Buffer, FileRange, Ranges, Transfers

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


class PieceStore:
    """`pieces` are in the order of the blocks."""

    def __init__(self, layout: Layout, file: StateFile, buffers: int = BUFFERS) -> None:
        self._layout, self.file = layout, file
        self.transfers = Transfers(file, buffers)
        self.pieces: list[HeldPiece] = []

    def file_bytes(self) -> int:
        """Of all pieces in the file."""
        return sum(piece.bytes for piece in self.pieces)

    def shared_bytes(self) -> int:
        """Of the numbers that stay in memory."""
        return sum(value.nbytes for piece in self.pieces for value in piece.shared.values())

    def cells(self, stretches: Iterable[Stretch]) -> list[Stretch]:
        """The stretches, cut into such as can be pieces."""
        return [cell for stretch in stretches for cell in cells(self._layout, stretch)]

    # ---- into the file

    def put(self, stretches: Sequence[Stretch], state_of: Callable[[Stretch], State]) -> None:
        """Adds these pieces; each is within a cell, and `state_of` is asked for one after the other."""
        added = []
        for index, buffer in enumerate(self.transfers.carry([()] * len(stretches), 0)):
            state = state_of(stretches[index])
            elements = stretches[index].blocks * self._layout.buckets[stretches[index].bucket].block_elements
            piece = HeldPiece(stretches[index], elements, {}, {})
            piece.shared = {key: value.clone() for key, value in state.items() if not value.dim()}
            self._keep_large(piece, buffer, state)
            added.append(piece)
        self.pieces = sorted([*self.pieces, *added], key=lambda one: one.stretch)

    def keep(
        self,
        piece: HeldPiece,
        buffer: Buffer,
        state: State,  # each (elements of the piece,), or ()
    ) -> None:
        """The piece's state is this from now on: it is written when the buffer's turn is over."""
        piece.shared = {key: value for key, value in state.items() if not value.dim()}
        self._keep_large(piece, buffer, state)

    def _keep_large(
        self,
        piece: HeldPiece,
        buffer: Buffer,
        state: State,  # each (elements of the piece,), or ()
    ) -> None:
        """Copies only what does not lie in the buffer already: what an optimizer has just made."""
        for key, value in state.items():
            if not value.dim():
                continue
            if key not in piece.places:
                piece.places[key] = FilePlace(value.dtype, self.file.take(value.nbytes))
                buffer.reserve(piece.bytes)
            target = buffer.view(piece.starts()[key], piece.elements, value.dtype)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        buffer.to_write = piece.ranges()

    def grow_together(self, may_be_one: Callable[[Stretch], bool]) -> None:
        """Neighbours within a cell become one piece; nothing is moved."""
        found: list[HeldPiece] = []
        for piece in self.pieces:
            if found and found[-1].is_continued_by(piece, self._layout):
                whole = found[-1].and_then(piece)
                if may_be_one(whole.stretch):
                    found[-1] = whole
                    continue
            found.append(piece)
        self.pieces = found

    def keep_only(self, stretches: Sequence[Stretch]) -> None:
        """Gives every other block's pages back."""
        kept: list[HeldPiece] = []
        for piece in self.pieces:
            stays = overlaps(stretches, piece.stretch)
            if stays == [piece.stretch]:
                kept.append(piece)
                continue
            parts = [piece.part(stretch).with_own_numbers() for stretch in stays]
            left = piece.pages
            for part in parts:
                left -= part.pages
            self.file.give_back(left)
            kept += parts
        self.pieces = kept

    # ---- out of it

    def parts_of(self, stretches: Sequence[Stretch]) -> list[HeldPiece]:
        """What of the pieces lies in these stretches."""
        return [piece.part(stretch) for piece in self.pieces for stretch in overlaps(stretches, piece.stretch)]

    def read(self, piece: HeldPiece, key: str) -> Tensor:  # (elements,)
        """One tensor of a piece, in memory of its own: by any thread, while the piece's state is not written. Raises
        `OffloadFailed`.
        """
        alone, buffer = HeldPiece(piece.stretch, piece.elements, {}, {key: piece.places[key]}), Buffer()
        buffer.reserve(alone.bytes)
        buffer.read(self.file, alone.ranges())
        return buffer.view(0, piece.elements, piece.places[key].dtype)

    def stream(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, State]]:  # each (elements,), or ()
        """Their state, each valid until the next is asked for."""
        parts = self.parts_of(stretches)
        most = max((part.bytes for part in parts), default=0)
        for index, buffer in enumerate(self.transfers.carry([part.ranges() for part in parts], most)):
            yield parts[index].stretch, parts[index].state(buffer)
