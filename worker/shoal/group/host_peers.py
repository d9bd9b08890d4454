"""Members of a group on one host: large messages pass through shared memory, at half the cost of the loopback device.

The members must see each other's processes. The message of the group that would have carried the bytes is a short one
then, which says where they lie. It carries them itself where the sender finds no room, or the receiver has not opened
the sender's memory: so no member waits for room, and receives are posted as ever. Called by gloo.py.

Each process makes a `SharedMemory` of its own for each group (unnamed_memory.py); no other group uses it. Only messages
of the group say that what lies there is whole; the marks at its head say who has opened it and which places are taken.

Each member also watches the next ones of its host (deaths.py): the death of one is known before its sockets are closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.group.group import message_bytes
from shoal.process.deaths import own_life, watch
from shoal.process.unnamed_memory import (
    ADDRESS,
    GROUP,
    TOKEN_BYTES,
    MemoryAddress,
    address_of,
    make,
    map_shared,
    open_at,
    reserve,
)

LEAST_BYTES = 1 << 20
"""What is smaller is sent at the same cost. Not less than a short message."""
PLACE = struct.Struct(f"<{TOKEN_BYTES}sq")
"""The short message: the token of the sender's memory, and where in it the bytes lie. gloo takes a message that is
shorter than the receive; that a long one begins with a token is as likely as to guess it."""
ANNOUNCED = struct.Struct(f"<{ADDRESS.size}s{ADDRESS.size}s")
"""Where a member shares memory, and where others watch it, each as `ADDRESS` has it; zeros where it has none."""
WATCHED = 2
"""Members of its host that each one watches, the next by rank: of two that die together one is seen at once."""


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
        """What this process says of itself where members meet, as `ANNOUNCED` has it."""
        memory = life = b""
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            self._memory = SharedMemory(members)
            memory = self._memory.address.to_bytes()
            life = own_life().to_bytes()
        return ANNOUNCED.pack(memory, life)

    def meet(
        self,
        rank: int,
        hosts: Sequence[str],
        announced: Sequence[bytes],
        on_death: Callable[[int], None],
    ) -> None:
        """`hosts`, `announced`: by rank, where members are reached and what they say. `on_death` is called with the
        rank of a member that has died, from a thread of its own, also after the group is closed.
        """
        if self._memory is None:
            return
        size, watched = len(announced), 0
        for peer in ((rank + distance) % size for distance in range(1, size)):
            if hosts[peer] != hosts[rank]:
                continue
            with contextlib.suppress(OSError, RuntimeError, struct.error):
                address, life = map(MemoryAddress.from_bytes, ANNOUNCED.unpack(announced[peer]))
                if address.is_seen_from(self._memory.address):
                    self._opened[peer] = OpenedMemory(address, rank, size)
                    if watched < WATCHED:
                        watch(life, partial(on_death, peer))
                        watched += 1

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


PLACE_BYTES = 256 << 10
"""What is sent takes so many places in a row."""
PLACES = 64
"""16 MiB: for what is on its way at one time, as pieces.py has it."""
TAKEN, FREE = b"\1", b"\0"


class _Memory:
    """What a process sees of it: the token, a mark for each member (it has opened this) and for each place (it is
    taken), and the places.
    """

    def __init__(self, descriptor: int, members: int) -> None:
        """Raises `OSError`, too where the descriptor's file is too short for it."""
        self._first = TOKEN_BYTES + members
        self._head = _head_bytes(members)
        self._mapped = map_shared(descriptor, self._head + PLACES * PLACE_BYTES)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def reserve(self, descriptor: int, places: int) -> None:
        """Takes memory for the head and so many places. Raises `OSError` where there is not so much."""
        reserve(descriptor, 0, self._head + places * PLACE_BYTES)

    def on_opened(self, by: int) -> None:
        self._mapped[TOKEN_BYTES + by : TOKEN_BYTES + by + 1] = TAKEN

    def is_open(self, by: int) -> bool:
        return self._mapped[TOKEN_BYTES + by : TOKEN_BYTES + by + 1] == TAKEN

    def find(self, count: int) -> int | None:
        """The first of so many free places in a row."""
        at = self._mapped.find(FREE * count, self._first, self._first + PLACES)
        return at - self._first if at >= 0 else None

    def mark(self, place: int, count: int, mark: bytes) -> None:
        at = self._first + place
        self._mapped[at : at + count] = mark * count

    def content(self, place: int, size: int) -> Tensor:  # (size,) uint8
        start = self._head + place * PLACE_BYTES
        return self._bytes[start : start + size]


class SharedMemory:
    """This process's own, in a group of so many members."""

    def __init__(self, members: int) -> None:
        """Raises `OSError` where there can be none, `AttributeError` on a system that knows no such memory."""
        self._lock = threading.Lock()
        self._reserved = 0
        """Places for which there is memory: as many as were ever taken at one time."""
        self._descriptor = make(GROUP, _head_bytes(members) + PLACES * PLACE_BYTES)
        try:
            memory = _Memory(self._descriptor, members)
            memory.reserve(self._descriptor, 0)
            self.address = address_of(self._descriptor)
        except BaseException:
            self.close()
            raise
        self._memory: _Memory | None = memory

    def put(
        self,
        content: Tensor,  # (bytes,) uint8, contiguous
        reader: int,
    ) -> int | None:
        """Copies it to where the member `reader` takes it: the first of its places. None where that one has not opened
        this memory, and where there is no room.
        """
        count = _places(content)
        with self._lock:
            memory = self._memory
            if memory is None or not memory.is_open(reader) or (place := memory.find(count)) is None:
                return None
            if place + count > self._reserved:
                try:
                    memory.reserve(self._descriptor, place + count)
                except OSError:
                    return None
                self._reserved = place + count
            memory.mark(place, count, TAKEN)
            _copy(content, memory.content(place, content.numel()))
        return place

    def close(self) -> None:
        """Its memory goes when those who opened it have closed it too. Idempotent."""
        with self._lock:
            self._memory = None
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


class OpenedMemory:
    """Another process's, opened by the member `rank` of so many."""

    def __init__(self, address: MemoryAddress, rank: int, members: int) -> None:
        """Raises `OSError` where it cannot be opened, or is not there any more."""
        self._lock = threading.Lock()
        descriptor = open_at(address)
        try:
            memory = _Memory(descriptor, members)
        finally:
            os.close(descriptor)
        memory.on_opened(rank)
        self.token, self._memory = address.token, cast(_Memory | None, memory)

    def take(
        self,
        place: int,
        target: Tensor,  # (bytes,) uint8, contiguous
    ) -> None:
        """Copies what lies there into `target`, and gives the places back. Raises `RuntimeError` where this is
        closed, and for a place that is not in it.
        """
        count = _places(target)
        with self._lock:
            if self._memory is None:
                raise RuntimeError("the shared memory is closed")
            if not 0 <= place <= PLACES - count:
                raise RuntimeError(f"a message of {count} places is said to lie at {place}; there are {PLACES}")
            _copy(self._memory.content(place, target.numel()), target)
            self._memory.mark(place, count, FREE)

    def close(self) -> None:
        """Nothing is copied any more when this returns. Idempotent."""
        with self._lock:
            self._memory = None


def _copy(
    content: Tensor,  # (bytes,) uint8, contiguous
    target: Tensor,  # (bytes,) uint8, contiguous
) -> None:
    """By the C library, in two thirds of torch's time. Not through numpy: memory that it has seen is never freed."""
    ctypes.memmove(target.data_ptr(), content.data_ptr(), content.numel())


def _places(content: Tensor) -> int:
    return -(-content.numel() // PLACE_BYTES)


def _head_bytes(members: int) -> int:
    """The token and all marks, in whole pages."""
    return -(-(TOKEN_BYTES + members + PLACES) // mmap.PAGESIZE) * mmap.PAGESIZE
