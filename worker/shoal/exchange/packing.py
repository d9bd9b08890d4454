"""Packing: several extents travel as one message.

A message of one extent is a view and costs nothing; several are packed into a buffer of their own, so they are small
(pieces.py). Only this file knows how a message maps to the extents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.blocks.values import RangeValues
from shoal.exchange.pieces import Extent, elements_in, is_alone
from shoal.group.group import Group, Work

Posted = tuple[Work, Tensor]
"""A send, and its message `(elements,)`, which is kept until the work is done."""


def send_packed(
    group: Group,
    peer: int,
    tag: int,
    values: RangeValues,  # the extents are of one dtype
    extents: Sequence[Extent],
) -> Posted:  # the message: (elements in the extents,)
    """Posts one message."""
    return _send(group, peer, tag, ranges(values, extents))


def send_sums(
    group: Group,
    peer: int,
    tag: int,
    sums: Sequence[Sequence[Tensor]],  # of each subtree the extents, each (elements,)
    dtype: torch.dtype,
) -> list[Posted]:  # messages: (elements in the extents,) each, or one for all: (subtrees × elements in the extents,)
    """Posts the extents of every subtree's sum, as `receive_sums` takes them. `dtype`: what they travel in."""
    packed = [[part.to(dtype) for part in parts] for parts in sums]
    if _is_together(len(sums), sum(map(torch.numel, sums[0])), dtype.itemsize):
        return [_send(group, peer, tag, [part for parts in packed for part in parts])]
    return [_send(group, peer, tag, parts) for parts in packed]


def receive_sums(
    group: Group,
    source: int,
    tag: int,
    sums: Tensor,  # (subtrees, elements in the extents), contiguous
) -> list[Work]:
    """Posts the receives of what a peer sends by `send_sums`."""
    subtrees, elements = sums.shape
    apart = [sums.view(-1)] if _is_together(subtrees, elements, sums.itemsize) else list(sums)
    return [group.receive(message, source, tag) for message in apart]


def _is_together(subtrees: int, elements: int, itemsize: int) -> bool:
    return subtrees == 1 or not is_alone(elements, itemsize)


def ranges(values: RangeValues, extents: Sequence[Extent]) -> list[Tensor]:  # each (elements of its extent,)
    return [values.range(*extent) for extent in extents]


def _send(
    group: Group,
    peer: int,
    tag: int,
    parts: Sequence[Tensor],  # each (elements,)
) -> Posted:
    message = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return group.send(message, peer, tag), message


class PackedReceive:
    """A posted receive into extents: once `work` is done, `unpack` leaves the values there."""

    def __init__(
        self,
        group: Group,
        source: int,
        tag: int,
        values: RangeValues,
        extents: Sequence[Extent],
    ) -> None:
        self._values, self._extents = values, extents
        self._is_packed = len(extents) > 1
        first = values.range(*extents[0])
        self._message = first.new_empty(elements_in(extents)) if self._is_packed else first
        self.bytes: int = self._message.nbytes
        self.work: Work = group.receive(self._message, source, tag)

    def unpack(self) -> None:
        """The message is whole."""
        if self._is_packed:
            parts = self._message.split([stop - start for _, start, stop in self._extents])
            torch._foreach_copy_(ranges(self._values, self._extents), parts)
