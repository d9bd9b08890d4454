"""Parameters of held blocks where the other workers of this host can see them (sharded parameters, on the CPU).

Each block lies at its place in the layout, the same in every worker's memory; what is not held takes none. Whoever sees
this memory sees it change: so its head says as of which vote it may be read, and nothing while that changes. Who reads
what, and where it is mapped, is others' affair (mapped_flats.py, exchange/unit_fetch.py).
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.layout import Bucket, Layout, Stretch
from shoal.group.unnamed_memory import (
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
