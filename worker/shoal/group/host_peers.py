"""Members of a group who run on one host and see each other's processes: what is large passes between them through
shared memory in place of the loopback device, at half of its cost.

The message of the group that would have carried the bytes is a short one then, which says where they lie. Where the
sender finds no room, or the receiver has not opened the sender's memory, the message carries them: so nobody ever waits
for room, and receives are posted as ever. Called by gloo.py.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.group.message_bytes import message_bytes
from shoal.group.shared_memory import OpenedMemory, SharedMemory
from shoal.unnamed_memory import ADDRESS, TOKEN_BYTES, MemoryAddress

LEAST_BYTES = 1 << 20
"""What is smaller is sent at the same cost. Not less than a short message."""
PLACE = struct.Struct(f"<{TOKEN_BYTES}sq")
"""The short message: the token of the sender's memory, and where in it the bytes lie. gloo takes a message that is
shorter than the receive; that a long one begins with a token is as likely as to guess it."""


class Gloo(Protocol):
    """What we use of `ProcessGroupGloo`, which has no types. Raises `RuntimeError`."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work: ...


class GlooWork(Protocol):
    """A message on its way, as gloo's works are."""

    def wait(self) -> object:
        """Blocks until it is over. Raises `RuntimeError` when the connection breaks."""


class HostPeers:
    """Those of this process in one group."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._opened: dict[int, OpenedMemory] = {}

    def announce(self, members: int) -> bytes:
        """What this process says of itself where members meet, as `ADDRESS` has it; zeros: it shares no memory."""
        with contextlib.suppress(OSError, AttributeError):
            self._memory = SharedMemory(members)
        return self._memory.address.to_bytes() if self._memory is not None else bytes(ADDRESS.size)

    def meet(self, rank: int, hosts: Sequence[str], announced: Sequence[bytes]) -> None:
        """`hosts`, `announced`: by rank, where members are reached and what they say."""
        if self._memory is None:
            return
        for peer, content in enumerate(announced):
            if peer != rank and hosts[peer] == hosts[rank]:
                with contextlib.suppress(OSError, struct.error):
                    address = MemoryAddress.from_bytes(content)
                    if address.is_seen_from(self._memory.address):
                        self._opened[peer] = OpenedMemory(address, rank, len(announced))

    def send(self, wire: Gloo, message: Tensor, to: int, tag: int) -> GlooWork:
        """Posts a contiguous message."""
        if self._memory is not None and message.nbytes >= LEAST_BYTES:
            place = self._memory.put(message_bytes(message), to)
            if place is not None:
                content = PLACE.pack(self._memory.address.token, place)
                message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return wire.send([message], to, tag)

    def receive(self, wire: Gloo, message: Tensor, source: int, tag: int) -> GlooWork:
        """Posts the receive of a contiguous message."""
        work, memory = wire.recv([message], source, tag), self._opened.get(source)
        return work if memory is None or message.nbytes < LEAST_BYTES else _Arrival(work, message, memory)

    def close(self) -> None:
        """No byte is copied any more when this returns."""
        if self._memory is not None:
            self._memory.close()
        for memory in self._opened.values():
            memory.close()


class _Arrival:
    """A message that may be a short one. Copied on the thread that waits."""

    def __init__(
        self,
        work: dist.Work,
        message: Tensor,  # contiguous
        memory: OpenedMemory,
    ) -> None:
        self._work, self._message, self._memory = work, message_bytes(message), memory

    def wait(self) -> None:
        self._work.wait()
        head = self._message[: PLACE.size].clone()  # numpy pins what it looks at
        token, place = PLACE.unpack(head.numpy().tobytes())
        if token == self._memory.token:
            self._memory.take(place, self._message)
