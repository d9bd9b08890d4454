"""Shared memory: one process puts there what it sends to others of its host, who take it from there.

Each process makes its own for each group, and no other group uses it. That what lies there is whole is said by messages
of the group alone; the marks at its head say who has opened it and which places are taken. How such memory is made and
opened is unnamed_memory.py's affair. Called by host_peers.py; knows no group.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import cast

import torch
from torch import Tensor

from shoal.unnamed_memory import GROUP, TOKEN_BYTES, MemoryAddress, address_of, make, map_shared, open_at, reserve

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
        """Raises `ValueError` where the descriptor's file is too short for it."""
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
        except ValueError as error:  # shorter than such memory
            raise FileNotFoundError(str(error)) from None
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
