"""Memory without a name that other processes of this host may map: a `memfd` whose size is fixed.

Whoever sees a process opens its descriptor, and nothing is left when the processes have died, however they did. Forked
children keep none of it. Knows neither groups nor parameters, and what lies in it is its users' affair.
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
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from shoal.process.forks import OPEN_FILES

TOKEN_BYTES = 16
"""Lie at the head of all such memory."""
ADDRESS = struct.Struct(f"<36s32sqi{TOKEN_BYTES}s")
BOOT, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
SEALED_BY_THE_SYSTEM = 0x20
"""F_SEAL_EXEC, which Python has no name for: `vm.memfd_noexec` puts it on all such memory."""

NAMES = GROUP, WEIGHTS, LIFE = "shoal-group", "shoal-weights", "shoal-life"
"""What the kernel calls it where it lists what a process has open: by what it is for."""

_mapped: WeakSet[mmap.mmap] = WeakSet()
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


def make(name: str, size: int) -> int:
    """A descriptor of so much, all zeros. Its size is fixed: nobody who maps it can be killed because it has become
    shorter. Raises `OSError` where there can be none, `AttributeError` on a system that knows no such memory.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        reserve(descriptor, 0, TOKEN_BYTES)
        os.pwrite(descriptor, secrets.token_bytes(TOKEN_BYTES), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, start: int, size: int) -> None:
    """Takes memory for so many bytes: where a page cannot be had when it is first written, the process is killed.
    Raises `OSError` where there is not so much.
    """
    os.posix_fallocate(descriptor, start, size)


def address_of(descriptor: int) -> MemoryAddress:
    """Of this process's own. Raises `OSError`."""
    boot, processes = BOOT.read_text().strip().encode(), str(PROCESSES.readlink()).encode()
    return MemoryAddress(boot, processes, os.getpid(), descriptor, os.pread(descriptor, TOKEN_BYTES, 0))


def map_shared(descriptor: int, size: int) -> mmap.mmap:
    """So much of it, as all who map it see it. Raises `OSError`, too where the descriptor's file is shorter."""
    try:
        mapped = mmap.mmap(descriptor, size)
    except ValueError as error:
        raise FileNotFoundError(str(error)) from None
    mapped.madvise(mmap.MADV_DONTFORK)
    _mapped.add(mapped)
    return mapped


def open_at(address: MemoryAddress) -> int:
    """A descriptor of another process's. Raises `OSError` where it cannot be opened, or is not there any more.

    Never opens a device or a pipe, which would do something when they are opened, nor a file of somebody else: the
    process may have closed its memory by now, and the number be that of a file that it has just begun to write. Nor
    what another user has made: what lies there may be a mutex, in which the C library follows pointers.
    """
    path = f"/proc/{address.process}/fd/{address.descriptor}"
    status = os.stat(path)  # noqa: PTH116 - beside `os.open`
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise FileNotFoundError(f"{path} is no memory of Shoal's")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & ~SEALED_BY_THE_SYSTEM != _seals():
            raise FileNotFoundError(f"{path} is no memory of Shoal's")
        if os.pread(descriptor, TOKEN_BYTES, 0) != address.token:
            raise FileNotFoundError(f"process {address.process} has another file where its shared memory was")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _seals() -> int:
    """What no other file has. In a function: they are the kernel's, which others than Linux do not know."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _let_go() -> None:
    """In a forked child, which may live on for long: it keeps no such memory. The addresses at which its parent has it
    may be others' in the child, so what would give them back never does.
    """
    if not _mapped:
        return
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    null, ours = os.open(os.devnull, os.O_RDWR), tuple(f"/memfd:{name}" for name in NAMES)
    for descriptor in map(int, os.listdir(OPEN_FILES)):  # noqa: PTH208 - a child has no time for paths
        with contextlib.suppress(OSError):  # closed by now, as that of the listing is
            if os.readlink(OPEN_FILES / str(descriptor)).startswith(ours):  # noqa: PTH115
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_let_go)
