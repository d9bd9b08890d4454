"""The memory of sharded parameters on one worker: of the flats that forwards compute with, and of what is held.

Where all workers are on one host's CPU, others see what is held, and flats show it. Else flats are found and freed by
torch, and what is held lies with its state. Knows no unit and no group.
"""

from __future__ import annotations

import torch

from shoal.blocks.flat import FlatMemory, Flats
from shoal.blocks.mapped_flats import MappedFlats
from shoal.blocks.shared_weights import SharedWeights, can_lie_in_pages
from shoal.core.layout import Layout
from shoal.process.logs import get_logger

log = get_logger("shoal")


class TorchMemory:
    """Storages that are found and freed. `is_empty`: nothing is there at first."""

    def __init__(self, layout: Layout, is_empty: bool) -> None:
        self.flats: Flats = []
        """Per bucket (elements,)."""
        self._sizes: list[int] = []
        for bucket in layout.buckets:
            make = torch.empty if is_empty else torch.zeros
            self.flats.append(make(bucket.elements, dtype=bucket.dtype, device=layout.device))
            self._sizes.append(self.flats[-1].nbytes)
            if is_empty:  # the next one may need the same memory
                self.give_back(bucket.index)

    def find(self, bucket: int) -> None:
        self._resize(bucket, self._sizes[bucket])

    def give_back(self, bucket: int) -> None:
        self._resize(bucket, 0)

    def _resize(self, bucket: int, size: int) -> None:
        """To so many bytes; not where numpy has a view of it (`parameter.numpy()`), or another process sees it (a queue
        of torch's), which are never told.
        """
        storage = self.flats[bucket].untyped_storage()
        if storage.resizable() and not storage.is_shared():
            storage.resize_(size)


class ShardedMemory:
    """`can_be_seen`: all workers are on this host's CPU. `is_empty`: flats have no values at first."""

    def __init__(self, layout: Layout, can_be_seen: bool, is_empty: bool) -> None:
        self.shared: SharedWeights | None = None
        """Where parameters of held blocks lie, if others can see them there."""
        self.mapped: MappedFlats | None = None
        """What is beneath the flats, if others' memory can be shown there."""
        if can_be_seen and layout.buckets and can_lie_in_pages(layout):
            try:
                self.shared, self.mapped = SharedWeights(layout), MappedFlats(layout)
            except (OSError, AttributeError) as error:
                self.shared = None
                log.info("weights_are_not_shared", why=str(error), means="workers of this host copy units")
        self.beneath: FlatMemory = TorchMemory(layout, is_empty) if self.mapped is None else self.mapped
