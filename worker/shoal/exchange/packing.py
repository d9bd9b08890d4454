"""Packing: several ranges of a flat travel as one message.

A message of one range is a view and costs nothing; several ranges are packed into one buffer of their own. Only this
file knows how a message maps to the ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.group.group import Group, Work


def size_of(ranges: Sequence[Span]) -> int:
    """Elements in all ranges together."""
    return sum(stop - start for start, stop in ranges)


def pack(
    flats: Sequence[Tensor],  # each (elements,) of one bucket
    ranges: Sequence[Span],
) -> Tensor:  # (flats × elements in the ranges,)
    """One message: the ranges of the first flat, then those of the next."""
    pieces = [flat[start:stop] for flat in flats for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack(
    message: Tensor,  # (elements in the ranges,)
    flat: Tensor,  # (elements,) of the bucket, of the same dtype
    ranges: Sequence[Span],
) -> None:
    """Puts a message of one flat back into its ranges."""
    at = 0
    for start, stop in ranges:
        flat[start:stop].copy_(message[at : at + stop - start])
        at += stop - start


class PackedReceive:
    """A posted receive into ranges of a flat; `wait` leaves the values in place."""

    def __init__(
        self,
        group: Group,
        source: int,
        tag: int,
        flat: Tensor,  # (elements,) of the bucket
        ranges: Sequence[Span],
    ) -> None:
        self._flat, self._ranges = flat, ranges
        direct = len(ranges) == 1
        self._message = flat[slice(*ranges[0])] if direct else flat.new_empty(size_of(ranges))
        self._packed = not direct
        self._work: Work = group.receive(self._message, source, tag)

    def wait(self) -> None:
        """Raises `WorldChanged` when the group is broken; the ranges may then hold anything."""
        self._work.wait()
        if self._packed:
            unpack(self._message, self._flat, self._ranges)
