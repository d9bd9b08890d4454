"""The memory of parameters on one worker: whole and here all the time, or sharded.

Sharded: of the flats that forwards compute with, and of what is held. Where all workers are on one host's CPU, others
see what is held, and flats show it. Else flats are found and freed by torch, and what is held lies with its state.
Knows no unit and no group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_protos.runs import NO_BLOCKS
from shoal_protos.training_log import get_logger
from torch import nn

from shoal.blocks.flat import FlatMemory, Flats, adopt, adopt_without_values
from shoal.blocks.shared_weights import MappedFlats, SharedWeights, can_lie_in_pages
from shoal.core.layout import Layout

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


class WholeMemory:
    """Parameters are views of flats, whose values are here all the time."""

    shared: SharedWeights | None = None
    mapped: MappedFlats | None = None
    fetched = NO_BLOCKS
    """Blocks whose parameters are asked for where they are used: a step's are not handed out."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
    ) -> None:
        self.flats = self.always_here = adopt(layout, parameters)
        """Per bucket (elements,)."""


class ShardedMemory:
    """`can_be_seen`: all workers are on this host's CPU. `is_empty`: flats have no values at first."""

    def __init__(self, layout: Layout, can_be_seen: bool, is_empty: bool) -> None:
        self._layout, self._is_empty, self.fetched = layout, is_empty, layout.all_blocks
        self.always_here: Flats = []
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

    @property
    def flats(self) -> Flats:  # per bucket (elements,)
        """The memory of all parameters."""
        return self.beneath.flats

    def adopt(
        self,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
    ) -> None:
        """Make them views of the flats."""
        if self._is_empty:
            adopt_without_values(self._layout, parameters, self.beneath)
        else:
            adopt(self._layout, parameters, self.beneath.flats)
