"""Buffers that carry optimizer state from a file and back, some at a time, beside what the training thread does.

A few buffers go round: while one is with the training thread, the others are written and read by threads that do
nothing else. A buffer is with one of them at a time, so nothing is read into what is still being written, and nobody
sees what is not there yet.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config.out_of_memory import naming
from shoal.offload.state_file import PAGE_BYTES, OffloadFailed, StateFile

BUFFERS = 3
"""One is read, one updated, one written; more gain nothing."""
THREADS = 2
SECONDS = 120.0
"""A disk that takes longer for one buffer is broken."""


class FileRange(NamedTuple):
    """Bytes of the file, and where in a buffer they belong."""

    at: int
    start: int
    bytes: int


Ranges = tuple[FileRange, ...]


class Buffer:
    """Memory for one piece's state, aligned as direct reads and writes need it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.to_write: Ranges = ()
        """What of it is to be written when the training thread is done with it."""
        self._memory = mmap.mmap(-1, PAGE_BYTES)
        self._turn: Future[None] | None = None
        """The write and the read that it is in."""

    def reserve(self, count: int) -> None:
        """Room for so many bytes, what is in it now included. Nothing of it is in flight."""
        if count <= self.bytes:
            return
        # shared with forked children: a direct read into private memory is lost where a fork copies the page
        with naming(f"a buffer of {count:,} bytes was made, which carries optimizer state from its file and back"):
            larger = mmap.mmap(-1, -(-count // PAGE_BYTES) * PAGE_BYTES)
        larger[: self.bytes] = self._memory[: self.bytes]
        self._memory, self.bytes = larger, len(larger)

    def view(self, start: int, elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        """A part of it."""
        return torch.frombuffer(self._memory, dtype=dtype, count=elements, offset=start)

    def begin_turn(self, pool: ThreadPoolExecutor, file: StateFile, reads: Ranges) -> None:
        """Writes what is to be written, then reads what is next. Raises `OffloadFailed`."""
        writes, self.to_write = self.to_write, ()
        if not (writes or reads):
            return
        try:
            self._turn = pool.submit(self._carry, file, writes, reads)
        except RuntimeError as error:
            raise OffloadFailed(
                f"no thread can be started that carries optimizer state to {file.folder} and back: {error}; expected "
                f"{THREADS}. Give this process more memory, or let it start more threads (`ulimit -v`, `ulimit -u`)."
            ) from error

    def _carry(self, file: StateFile, writes: Ranges, reads: Ranges) -> None:
        memory = memoryview(self._memory)
        for at, start, count in writes:
            file.write(at, memory[start : start + count])
        self.read(file, reads)

    def read(self, file: StateFile, ranges: Ranges) -> None:
        """Brings these into it, at once. Raises `OffloadFailed`."""
        memory = memoryview(self._memory)
        for at, start, count in ranges:
            file.read(at, memory[start : start + count])

    def end_turn(self, folder: str) -> None:
        """Waits until it is written and read. Raises `OffloadFailed`."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        try:
            turn.result(SECONDS)
        except TimeoutError as error:
            raise OffloadFailed(
                f"the disk of {folder} has not answered for {SECONDS:.0f} s; expected a part of a second for "
                f"{self.bytes:,} bytes."
            ) from error

    def settle(self) -> None:
        """Waits for what a pass that was given up has left in flight, whatever became of it; what was not begun never
        is, and nobody would ever say that it is over.
        """
        if self._turn is not None and not self._turn.cancel():
            wait([self._turn], SECONDS)
        self._turn, self.to_write = None, ()


class Transfers:
    """The buffers of one file. The training thread alone uses it; one pass at a time."""

    def __init__(self, file: StateFile, buffers: int = BUFFERS) -> None:
        self._file, self._buffers = file, [Buffer() for _ in range(buffers)]
        self.moved = 0
        """Bytes read and written."""
        self.seconds = 0.0
        """That passes took, with what was done to the buffers in them."""

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.bytes for buffer in self._buffers)

    def carry(self, reads: Sequence[Ranges], most: int) -> Iterator[Buffer]:
        """A pass: for each entry a buffer that holds its ranges, valid until the next is asked for.

        `most`: bytes of the largest. When a buffer's turn is over, its `to_write` is written. Raises `OffloadFailed`.
        """
        began = time.monotonic()
        for buffer in self._buffers:
            buffer.settle()
        for buffer in self._buffers[: len(reads)]:
            buffer.reserve(most)
        pool, is_patient = ThreadPoolExecutor(THREADS, thread_name_prefix="shoal-offload"), True
        try:
            yield from self._go_round(pool, reads)
        except OffloadFailed:
            is_patient = False  # a thread may hang in a broken disk
            raise
        finally:
            pool.shutdown(wait=is_patient, cancel_futures=True)
            self.seconds += time.monotonic() - began

    def _go_round(self, pool: ThreadPoolExecutor, reads: Sequence[Ranges]) -> Iterator[Buffer]:
        buffers = self._buffers[: len(reads)]
        for buffer, first in zip(buffers, reads, strict=False):
            self._begin_turn(buffer, pool, first)
        for index in range(len(reads)):
            buffer = buffers[index % len(buffers)]
            buffer.end_turn(self._file.folder)
            yield buffer
            following = index + len(buffers)
            self._begin_turn(buffer, pool, reads[following] if following < len(reads) else ())
        for buffer in buffers:
            buffer.end_turn(self._file.folder)

    def _begin_turn(self, buffer: Buffer, pool: ThreadPoolExecutor, reads: Ranges) -> None:
        self.moved += sum(one.bytes for one in (*buffer.to_write, *reads))
        buffer.begin_turn(pool, self._file, reads)
