"""Parameters of held blocks where the other workers of this host see them (sharded parameters, on the CPU).

The owner's side: each block lies at its place in the layout, the same in every worker's memory; what is not held takes
none. Whoever sees this memory sees it change: so its head says as of which vote it may be read, and nothing while that
changes. The reader's: flats of units that come and go, at addresses where that memory can be mapped. Where all who hold
a world's blocks run on this host, a unit need not be copied: its flats show the memory in which its owners keep it.
What a script writes there goes into pages of its own, which nobody else sees. Elsewhere, and for who reads longer than
the owners wait, a bucket has memory of its own. See mmap(2), MAP_PRIVATE. Who reads what and when is said by
exchange/unit_fetch.py; knows no group.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.core.layout import Bucket, Layout, Stretch
from shoal.process.host_memory import HUGE_PAGE_BYTES
from shoal.process.unnamed_memory import (
    TOKEN_BYTES,
    WEIGHTS,
    MemoryAddress,
    address_of,
    make,
    map_shared,
    open_at,
    reserve,
)

Key = tuple[int, int]
"""A world's generation, and how many votes have passed in it."""
NO_KEY: Key = (-1, -1)
KEY = struct.Struct("<qq")
KEY_ENDS = TOKEN_BYTES + KEY.size
STAT_BLOCK_BYTES = 512
"""Of `st_blocks`, whatever the file system's own are."""
HEAD_BYTES = BUCKETS_BEGIN_AT = 2 << 20
"""Places of buckets begin at multiples of it: those of huge pages, where a worker has values of its own there."""
MAP_FIXED = 0x10
READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MOST_PARTS = 16_384
"""Mappings; a process may have four times as many (vm.max_map_count)."""
SPARE_PARTS = 4
"""As many it takes to go back, where the process can have no more."""
PAGES = Path("/proc/self/pagemap")
PAGE = struct.Struct("<q")
IN_MEMORY, SWAPPED, SHARED = -1 << 63, 1 << 62, 1 << 61
"""What the kernel says of a page: see its admin-guide/mm/pagemap.rst. `SHARED`: it is a file's, not this process's."""


def can_lie_in_pages(layout: Layout) -> bool:
    """Whether each of its blocks is whole pages."""
    return all(block_bytes(bucket) % mmap.PAGESIZE == 0 for bucket in layout.buckets)


def block_bytes(bucket: Bucket) -> int:
    return bucket.block_elements * bucket.dtype.itemsize


def bucket_bytes(bucket: Bucket) -> int:
    return bucket.elements * bucket.dtype.itemsize


def places(layout: Layout) -> list[int]:
    """Where each bucket begins, in bytes, and where all end."""
    found = [HEAD_BYTES]
    for bucket in layout.buckets:
        end = found[-1] + bucket_bytes(bucket)
        found.append(-(-end // BUCKETS_BEGIN_AT) * BUCKETS_BEGIN_AT)
    return found


class SharedWeights:
    """This worker's own."""

    def __init__(self, layout: Layout) -> None:
        """Raises `OSError` where there can be none, `AttributeError` on a system that knows no such memory."""
        self._layout, self._places = layout, places(layout)
        self._descriptor = make(WEIGHTS, self._places[-1])
        weakref.finalize(self, os.close, self._descriptor)
        self._mapped = map_shared(self._descriptor, self._places[-1])
        self.address = address_of(self._descriptor)
        self._flats = [
            torch.frombuffer(self._mapped, dtype=bucket.dtype, count=bucket.elements, offset=place)
            for bucket, place in zip(layout.buckets, self._places, strict=False)
        ]
        self.begin_change()

    def part(self, stretch: Stretch) -> Tensor:  # (elements of the stretch,) of its bucket's dtype
        """Its place, for which there is memory. Raises `OSError` where there is none."""
        reserve(self._descriptor, *self._span(stretch))
        return self._there(stretch)

    def put(
        self,
        stretch: Stretch,
        values: Tensor | None,  # (elements of the stretch,)
    ) -> Tensor:  # (elements of the stretch,) of its bucket's dtype
        """Its place, with these values; None: with whatever is there. Raises `OSError` where there is no memory."""
        there = self._there(stretch)
        if values is not None and values.data_ptr() == there.data_ptr():
            return there
        there = self.part(stretch)
        return there if values is None else there.copy_(values)

    def give_back(self, stretches: Sequence[Stretch]) -> None:
        """The memory of these; their values are zeros from now on."""
        for stretch in stretches:
            self._mapped.madvise(mmap.MADV_REMOVE, *self._span(stretch))

    def _there(self, stretch: Stretch) -> Tensor:  # (elements of the stretch,) of its bucket's dtype
        start, stop = self._layout.elements(stretch)
        return self._flats[stretch.bucket][start:stop]

    def _span(self, stretch: Stretch) -> tuple[int, int]:
        """Where it begins, and how much it is, in bytes."""
        size = block_bytes(self._layout.buckets[stretch.bucket])
        return self._places[stretch.bucket] + stretch.start * size, stretch.blocks * size

    @property
    def taken_bytes(self) -> int:
        """Memory that the kernel has found for them, whole pages."""
        return os.fstat(self._descriptor).st_blocks * STAT_BLOCK_BYTES

    def begin_change(self) -> None:
        """Nobody may read them."""
        self.stand(NO_KEY)

    def stand(self, key: Key) -> None:
        """They are as of this vote until `begin_change`."""
        self._mapped[TOKEN_BYTES:KEY_ENDS] = KEY.pack(*key)


class SeenWeights:
    """Another worker's, or one's own as others see them."""

    def __init__(self, address: MemoryAddress) -> None:
        """Raises `OSError` where they cannot be opened, or are not there any more."""
        self.descriptor = open_at(address)
        weakref.finalize(self, os.close, self.descriptor)
        self._head = map_shared(self.descriptor, mmap.PAGESIZE)

    def stand_at(self, key: Key) -> bool:
        """Whether they are as of this vote."""
        return KEY.unpack(self._head[TOKEN_BYTES:KEY_ENDS]) == key


class Part(NamedTuple):
    """Of a bucket, what lies at its place in a worker's memory."""

    weights: SeenWeights
    stretch: Stretch


class MappedFlats:
    """Of all buckets. What is mapped at first is memory of one's own."""

    def __init__(self, layout: Layout) -> None:
        """Raises `OSError` where there are not so many addresses."""
        self._layout, self._places = layout, places(layout)
        self._sizes = [bucket_bytes(bucket) for bucket in layout.buckets]
        self._region = mmap.mmap(-1, self._places[-1] + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = torch.frombuffer(self._region, dtype=torch.uint8).data_ptr()
        self._first = -start % HUGE_PAGE_BYTES
        self._address = start + self._first
        self.flats, self._there = self._tensors(), self._tensors()
        """Views of the same memory, until torch moves the first ones (`Tensor.share_memory_`, a queue of processes)."""
        self._parts: dict[int, list[Part]] = {}
        """By bucket, what it shows where it is shown."""
        self._own = set(range(len(self.flats)))
        """Buckets that have memory of their own now."""
        for bucket in self._own:
            self._prefer_huge_pages(bucket)

    @property
    def addresses(self) -> tuple[int, int]:
        """The first one, and that after the last."""
        return self._address, self._address + self._places[-1]

    def _tensors(self) -> Flats:  # per bucket (elements,) of its dtype
        return [
            torch.frombuffer(self._region, dtype=bucket.dtype, count=bucket.elements, offset=self._first + place)
            for bucket, place in zip(self._layout.buckets, self._places, strict=False)
        ]

    # ---- others' memory

    def see(self, parts: Sequence[Part]) -> bool:
        """Whether buckets can show these, which are all of them, from now on."""
        self.forget()
        if len(parts) > MOST_PARTS:
            return False
        by_bucket: dict[int, list[Part]] = defaultdict(list)
        for part in parts:
            by_bucket[part.stretch.bucket].append(part)
        self._parts = dict(by_bucket)
        spare = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(SPARE_PARTS)]
        try:
            for bucket in self._parts:
                self.show(bucket)
            return not parts or self._tells_pages(parts[0].stretch)
        except OSError:  # too many mappings, or no look at the pages
            for one in spare:
                one.close()
            self.forget()
            return False

    def forget(self) -> None:
        """Buckets show nothing more of others."""
        for bucket in self._parts.keys() - self._own:
            self.find(bucket)
        self._parts = {}

    def show(self, bucket: int) -> None:
        """Its owners' memory, and nothing of what was written to it here. Raises `OSError`."""
        if bucket in self._own:
            size, place = block_bytes(self._layout.buckets[bucket]), self._places[bucket]
            try:
                for weights, stretch in self._parts[bucket]:
                    self._map(place + stretch.start * size, stretch.blocks * size, weights.descriptor)
            except OSError:  # then nothing of others stays
                self._map(place, self._sizes[bucket], None)
                raise
            self._own.discard(bucket)
        else:
            self._drop(bucket)

    def follow(self, buckets: Iterable[int]) -> None:
        """Flats that torch has moved elsewhere have the values that are shown."""
        for bucket in buckets:
            if self.is_shown(bucket) and self._has_moved(bucket):
                self.flats[bucket].copy_(self._there[bucket])

    def _has_moved(self, bucket: int) -> bool:
        return self.flats[bucket].data_ptr() != self._there[bucket].data_ptr()

    def is_shown(self, bucket: int) -> bool:
        """Whether what is there is the owners' memory."""
        return bucket not in self._own

    def written(self, bucket: int) -> list[int]:
        """The numbers of the pages of a shown bucket that were written to here, by whatever means."""
        pages = self._pages(bucket)
        mine = ((pages & (IN_MEMORY | SWAPPED)) != 0) & ((pages & SHARED) == 0)
        return mine.nonzero().flatten().tolist() if bool(mine.any()) else []

    def changed(self, bucket: int, pages: Iterable[int]) -> int | None:
        """The first element in these pages that is not as its owner has it. Raises `OSError`."""
        here, size = self._there[bucket].view(torch.uint8), self._layout.buckets[bucket].dtype.itemsize
        block = block_bytes(self._layout.buckets[bucket])
        for start in (page * mmap.PAGESIZE for page in pages):
            weights = next(one for one, at in self._parts[bucket] if at.start <= start // block < at.stop)
            theirs = bytearray(os.pread(weights.descriptor, mmap.PAGESIZE, self._places[bucket] + start))
            differ = here[start : start + mmap.PAGESIZE] != torch.frombuffer(theirs, dtype=torch.uint8)
            if bool(differ.any()):
                return (start + int(differ.nonzero()[0])) // size
        return None

    def _pages(self, bucket: int) -> torch.Tensor:  # (pages,) int64
        first = (self._address + self._places[bucket]) // mmap.PAGESIZE
        count = self._sizes[bucket] // mmap.PAGESIZE
        file = os.open(PAGES, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.pread(file, count * PAGE.size, first * PAGE.size)
        finally:
            os.close(file)
        if len(found) != count * PAGE.size:
            raise OSError(f"{PAGES} tells of {len(found)} bytes; expected {count * PAGE.size}")
        return torch.frombuffer(bytearray(found), dtype=torch.int64)

    def _tells_pages(self, stretch: Stretch) -> bool:
        """Whether this system says which pages were written to. Looks at one that was read, and was not."""
        start, _ = self._layout.elements(stretch)
        self._there[stretch.bucket][start].item()
        page = start * self._layout.buckets[stretch.bucket].dtype.itemsize // mmap.PAGESIZE
        return bool(int(self._pages(stretch.bucket)[page]) & SHARED)

    # ---- memory of one's own

    def find(self, bucket: int) -> None:
        """Memory of its own, with whatever values. Raises `OSError`."""
        if bucket in self._own:
            return
        self._map(self._places[bucket], self._sizes[bucket], None)
        self._own.add(bucket)
        self._prefer_huge_pages(bucket)

    def _prefer_huge_pages(self, bucket: int) -> None:
        huge = self._sizes[bucket] // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._region.madvise(mmap.MADV_HUGEPAGE, self._first + self._places[bucket], huge)

    def give_back(self, bucket: int) -> None:
        """The memory of its own, if it has any."""
        if bucket in self._own:
            self._drop(bucket)

    def keep(self, buckets: Iterable[int]) -> None:
        """What they show stays as it is, whatever becomes of it in their owners' memory. Raises `OSError`."""
        for bucket in buckets:
            if self.is_shown(bucket) and not self._has_moved(bucket):
                values = self.flats[bucket].clone()
                self.find(bucket)
                self.flats[bucket].copy_(values)

    def _drop(self, bucket: int) -> None:
        self._region.madvise(mmap.MADV_DONTNEED, self._first + self._places[bucket], self._sizes[bucket])

    def _map(self, place: int, size: int, descriptor: int | None) -> None:
        """None: no other's memory."""
        flags = mmap.MAP_PRIVATE | MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor is None else 0)
        at = self._address + place
        found = _libc().mmap(at, size, READ_AND_WRITE, flags, -1 if descriptor is None else descriptor,
                             0 if descriptor is None else place)  # fmt: skip
        if found != at:
            number = ctypes.get_errno()
            raise OSError(number, f"a unit's memory could not be mapped: {os.strerror(number)}")


@cache
def _libc() -> ctypes.CDLL:
    """Python's own `mmap` chooses addresses by itself."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return library
