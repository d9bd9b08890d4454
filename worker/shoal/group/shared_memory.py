"""Shared memory: one process puts there what it sends to others of its host, who take it from there.

Each process makes its own for each group, and no other group uses it. It has no name: whoever sees the process opens
its descriptor, and nothing is left when the processes have died, however they did. That what lies there is whole is
said by messages of the group alone; the marks at its head say who has opened it and which places are taken.
Called by host_peers.py; knows no group.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
from pathlib import Path
from typing import NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor

from shoal.group.forks import OPEN_FILES

PLACE_BYTES = 256 << 10
"""What is sent takes so many places in a row."""
PLACES = 64
"""16 MiB: for what is on its way at one time, as pieces.py has it."""
TOKEN_BYTES = 16
ADDRESS = struct.Struct(f"<36s32sqi{TOKEN_BYTES}s")
BOOT, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
TAKEN, FREE = b"\1", b"\0"
SEALED_BY_THE_SYSTEM = 0x20
"""F_SEAL_EXEC, which Python has no name for: `vm.memfd_noexec` puts it on all such memory."""

NAME = "shoal-group"
"""What the kernel calls it where it lists what a process has open."""

_seen: WeakSet[_Memory] = WeakSet()
"""What this process sees of its own and of others'."""


class MemoryAddress(NamedTuple):
    """Where a process's memory is opened."""

    boot: bytes
    """The host, from one start of it to the next."""
    processes: bytes
    """The kernel's name of the space in which `process` means something: a container may have its own."""
    process: int
    descriptor: int
    token: bytes
    """Lies at its head: the descriptor may be another file's by now."""

    def to_bytes(self) -> bytes:
        return ADDRESS.pack(*self)

    @classmethod
    def from_bytes(cls, content: bytes) -> MemoryAddress:
        """Raises `struct.error` for what is none."""
        boot, processes, *rest = ADDRESS.unpack(content)
        return cls(boot.rstrip(b"\0"), processes.rstrip(b"\0"), *rest)

    def is_seen_from(self, other: MemoryAddress) -> bool:
        return (self.boot, self.processes) == (other.boot, other.processes)


class _Memory:
    """What a process sees of it: the token, a mark for each member (it has opened this) and for each place (it is
    taken), and the places.
    """

    def __init__(self, descriptor: int, members: int) -> None:
        """Raises `ValueError` where the descriptor's file is too short for it."""
        self._first = TOKEN_BYTES + members
        self._head = _head_bytes(members)
        self._mapped = mmap.mmap(descriptor, self._head + PLACES * PLACE_BYTES)
        self._mapped.madvise(mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        _seen.add(self)

    @classmethod
    def in_new_file(cls, descriptor: int, members: int) -> _Memory:
        """Its size is fixed from here on: nobody who maps it can be killed because it has become shorter."""
        head = _head_bytes(members)
        os.ftruncate(descriptor, head + PLACES * PLACE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        _reserve(descriptor, head)
        os.pwrite(descriptor, secrets.token_bytes(TOKEN_BYTES), 0)
        return cls(descriptor, members)

    def reserve(self, descriptor: int, places: int) -> None:
        """Takes memory for the head and so many places. Raises `OSError` where there is not so much."""
        _reserve(descriptor, self._head + places * PLACE_BYTES)

    @property
    def token(self) -> bytes:
        return self._mapped[:TOKEN_BYTES]

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
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            memory = _Memory.in_new_file(self._descriptor, members)
            boot, processes = BOOT.read_text().strip().encode(), str(PROCESSES.readlink()).encode()
        except BaseException:
            self.close()
            raise
        self._memory: _Memory | None = memory
        self.address = MemoryAddress(boot, processes, os.getpid(), self._descriptor, memory.token)

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
        descriptor = _open(address)
        try:
            memory = _Memory(descriptor, members)
        except ValueError as error:  # shorter than such memory
            raise FileNotFoundError(str(error)) from None
        finally:
            os.close(descriptor)
        if memory.token != address.token:
            raise FileNotFoundError(f"process {address.process} has another file where its shared memory was")
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


def _reserve(descriptor: int, size: int) -> None:
    """Where a page cannot be had when it is first written, the process is killed."""
    os.posix_fallocate(descriptor, 0, size)


def _head_bytes(members: int) -> int:
    """The token and all marks, in whole pages."""
    return -(-(TOKEN_BYTES + members + PLACES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _seals() -> int:
    """What no other file has. In a function: they are the kernel's, which others than Linux do not know."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _open(address: MemoryAddress) -> int:
    """Never a device or a pipe, which would do something when they are opened, nor a file of somebody else: the process
    may have closed its memory by now, and the number be that of a file that it has just begun to write.

    Raises `OSError`.
    """
    path = f"/proc/{address.process}/fd/{address.descriptor}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - beside `os.open`
        raise FileNotFoundError(f"{path} is not the memory of a group")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & ~SEALED_BY_THE_SYSTEM != _seals():
            raise FileNotFoundError(f"{path} is not the memory of a group")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _let_go() -> None:
    """In a forked child, which may live on for long: it keeps no memory of a group. The addresses at which its parent
    has it may be others' in the child, so what would give them back never does.
    """
    if not _seen:
        return
    for memory in _seen:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir(OPEN_FILES)):  # noqa: PTH208 - a child has no time for paths
        with contextlib.suppress(OSError):  # closed by now, as that of the listing is
            if os.readlink(OPEN_FILES / str(descriptor)).startswith(f"/memfd:{NAME}"):  # noqa: PTH115
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_let_go)
