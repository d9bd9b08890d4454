"""The pieces of one worker's file: which there are, where they lie, and how they come into memory and go back.

Knows no optimizer: what is done to a piece while it is in a buffer is the affair of whoever carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from shoal.blocks.loaded_state import State
from shoal.core.layout import Layout, Stretch, overlaps
from shoal.offload.held_piece import FilePlace, HeldPiece, cells
from shoal.offload.state_file import StateFile
from shoal.offload.transfers import BUFFERS, Buffer, Transfers


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

    def stream(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, State]]:  # each (elements,), or ()
        """Their state, each valid until the next is asked for."""
        parts = self.parts_of(stretches)
        most = max((part.bytes for part in parts), default=0)
        for index, buffer in enumerate(self.transfers.carry([part.ranges() for part in parts], most)):
            yield parts[index].stretch, parts[index].state(buffer)
