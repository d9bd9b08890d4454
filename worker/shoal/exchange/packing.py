"""Packing: several extents travel as one message.

A message of one extent is a view and costs nothing; several are packed into a buffer of their own. Only this file knows
how a message maps to the extents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.exchange.pieces import Extent, elements_in
from shoal.group.group import Group, Work


def pack(
    copies: Sequence[Flats],  # each per bucket (elements,); the extents are of one dtype
    extents: Sequence[Extent],
) -> Tensor:  # (copies × elements in the extents,)
    """One message: the extents of the first copy, then those of the next."""
    parts = [flats[bucket][start:stop] for flats in copies for bucket, start, stop in extents]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def send_packed(
    group: Group,
    peer: int,
    tag: int,
    copies: Sequence[Flats],  # each per bucket (elements,); the extents are of one dtype
    extents: Sequence[Extent],
) -> tuple[Work, Tensor]:  # (copies × elements in the extents,)
    """Posts one message. The caller keeps it until the work is done."""
    message = pack(copies, extents)
    return group.send(message, peer, tag), message


class PackedReceive:
    """A posted receive into extents of flats: once `work` is done, `unpack` leaves the values there."""

    def __init__(
        self,
        group: Group,
        source: int,
        tag: int,
        flats: Flats,  # per bucket (elements,)
        extents: Sequence[Extent],
    ) -> None:
        self._flats, self._extents = flats, extents
        bucket, start, stop = extents[0]
        self._is_packed = len(extents) > 1
        self._message = flats[bucket].new_empty(elements_in(extents)) if self._is_packed else flats[bucket][start:stop]
        self.bytes: int = self._message.nbytes
        self.work: Work = group.receive(self._message, source, tag)

    def unpack(self) -> None:
        """The message is whole."""
        if not self._is_packed:
            return
        at = 0
        for bucket, start, stop in self._extents:
            self._flats[bucket][start:stop].copy_(self._message[at : at + stop - start])
            at += stop - start
