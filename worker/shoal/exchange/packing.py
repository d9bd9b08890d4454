"""Messages: several extents packed into one, and framed ones, whose length the receiver does not know.

A message of one extent is a view and costs nothing; several are packed into a buffer of their own, so they are small
(pieces.py). Only this file knows how a message maps to the extents.

A framed message's length travels first. Small or rare data is framed: a joiner's job state, slices of fills, digests. A
FIRST_MESSAGE is read by the session's builder thread, the others by the training thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_protos.errors import PeerError
from torch import Tensor

from shoal.blocks.values import RangeValues
from shoal.exchange.pieces import Extent, elements_in, is_alone
from shoal.exchange.traffic import DIGESTS
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


MOST_BYTES = 1 << 36
"""Of one message; a peer that announces more does not say what is so."""


NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def as_bytes_tensor(content: bytes) -> Tensor:  # (len(content),) uint8
    """Owns its memory."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else NOTHING


class FramedSend:
    """A framed message on its way out; `wait` returns when it has left."""

    def __init__(self, group: Group, to: int, tag: int, content: bytes) -> None:
        self._length = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
        self._content = as_bytes_tensor(content)
        self._works: list[Work] = [group.send(self._length, to, tag)]
        if content:
            self._works.append(group.send(self._content, to, tag))

    def wait(self) -> None:
        """Raises `WorldChanged` when the group is broken."""
        for work in self._works:
            work.wait()


def receive_framed(group: Group, source: int, tag: int) -> bytes:
    """Block for the next framed message of that tag.

    Raises `WorldChanged` when the group is broken, `PeerError` for a length that cannot be.
    """
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    group.receive(length, source, tag).wait()
    size = int(length.item())
    if not 0 <= size <= MOST_BYTES:
        raise PeerError(f"rank {source} announced a message of {size} bytes; expected 0 to {MOST_BYTES}")
    content = torch.empty(size, dtype=torch.uint8, device="cpu")
    if content.numel():
        group.receive(content, source, tag).wait()
    return content.numpy().tobytes()


def exchange_framed(group: Group, tag: int, content: bytes) -> dict[int, bytes]:
    """Send a message to every other member, and block for theirs. Returns them by rank. Raises as `receive_framed`."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [FramedSend(group, rank, tag, content) for rank in others]
    found = {rank: receive_framed(group, rank, tag) for rank in others}
    for send in sends:
        send.wait()
    return found


def contents_of(group: Group, ranks: Sequence[int], content: bytes) -> list[bytes]:
    """What these members have, in that order; all call it alike. `content`: this one's own. Raises `WorldChanged`."""
    others = [peer for peer in range(group.size) if peer != group.rank]
    sends = [FramedSend(group, peer, DIGESTS, content) for peer in others] if group.rank in ranks else []
    found = [content if rank == group.rank else receive_framed(group, rank, DIGESTS) for rank in ranks]
    for send in sends:
        send.wait()
    return found
