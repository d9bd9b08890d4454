"""Framed messages: the receiver does not know how long they are, so a length travels before the bytes.

For what is small or rare: job state for a joiner, slices of fills, digests. A FIRST_MESSAGE is read by the
session's builder thread, the others by the training thread.
"""

from __future__ import annotations

import torch
from shoal_protos.errors import PeerError
from torch import Tensor

from shoal.group.group import Group, Work

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
