"""Units where parameters are sharded (stage 3): a unit's parameters come and go together, in flats of whole buckets.

The parameters stay views of their flats; what comes and goes is the memory beneath them. So tensors that autograd has
saved see the values again when the unit is gathered again. Knows no group: exchange/unit_fetch.py brings the values, or
the memory is that of others (shared_weights.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from itertools import count

import torch
from torch import nn

from shoal.blocks.flat import FlatMemory, Flats, storage_key
from shoal.blocks.released import OnTouch, release, restore
from shoal.blocks.shared_weights import MappedFlats
from shoal.core.layout import Layout

POISON = False
"""Set by tests: freed values are NaN before they go, and new memory is before anything comes."""


class Presence(Enum):
    """Where a unit's values are."""

    OUT = "with their owners and mirrors"
    COMING = "on their way here"
    HERE = "here"


class Unit:
    """`number`: its place among all units. Its values are here at first: those that the script made."""

    def __init__(
        self,
        number: int,
        buckets: Sequence[int],
        flats: Flats,  # of each of its buckets (elements,)
        parameters: Sequence[nn.Parameter],  # each of its own shape: views of the flats, in the order of the slots
        memory: FlatMemory,
    ) -> None:
        self.number, self.buckets, self.parameters = number, tuple(buckets), list(parameters)
        self._flats, self._memory = flats, memory
        self.presence = Presence.HERE
        self.gets_gradients: tuple[int, ...] = self.buckets
        """Those of its buckets that are not frozen."""
        self._uses_at_most: int | None = None
        """More than so many views of its memory are others' than ours: then it is not freed."""
        self.is_pinned = False
        """It stays until its gradients are in, or whoever asked for it is done."""

    def begin_elsewhere(self, on_touch: OnTouch) -> None:
        """Its flats never had memory."""
        release(self.parameters, on_touch)
        self.presence = Presence.OUT

    def allocate(self) -> None:
        """Memory for what comes."""
        for bucket, flat in zip(self.buckets, self._flats, strict=True):
            self._memory.find(bucket)
            if POISON:
                flat.fill_(torch.nan)
        self.presence = Presence.COMING

    def show(self, mapped: MappedFlats) -> None:
        """Its values are in sight, in memory of others, once these say so. Raises `OSError`."""
        for bucket in self.buckets:
            if POISON or not mapped.is_shown(bucket):
                mapped.show(bucket)
        self.presence = Presence.COMING

    def restore(self) -> None:
        """All values have come."""
        restore(self.parameters)
        self.presence = Presence.HERE

    def free(self, on_touch: OnTouch) -> None:
        """Nothing may be on its way into it."""
        if self._uses_at_most is not None and self.uses <= self._uses_at_most:
            self._uses_at_most = None
        release(self.parameters, on_touch)
        for bucket, flat in zip(self.buckets, self._flats, strict=True) if self._uses_at_most is None else ():
            if POISON and self.presence is Presence.HERE:
                flat.fill_(torch.nan)
            self._memory.give_back(bucket)
        self.presence, self.is_pinned = Presence.OUT, False

    @property
    def uses(self) -> int:
        """How many tensors lie in its memory, those of this class included."""
        return sum(torch._C._storage_Use_Count(key) for key in self.storages)

    @property
    def has_frozen(self) -> bool:
        """Whether some of its parameters are frozen."""
        return self.gets_gradients != self.buckets

    def is_used_beyond(self, views: int) -> bool:
        """Whether something but its parameters, its flats and so many views lies in its memory: what autograd has saved
        for nodes that are still to run, or a script keeps.
        """
        counted = 2 * len(self._flats)  # whoever counts is counted
        return self.uses > counted + len(self.parameters) + views

    @property
    def has_kept_views(self) -> bool:
        """Whether somebody has kept views of it, as far as is known."""
        return self._uses_at_most is not None

    def keep_for_views(self, uses: int) -> None:
        """Where there are more uses now, somebody has kept views: they stay good to read, as in the other stages."""
        if self.uses > uses:
            self._uses_at_most = uses

    @property
    def storages(self) -> list[int]:
        """Keys of its flats' storages: those of a tensor that lies in them."""
        return [storage_key(flat) for flat in self._flats]


def units_of(
    layout: Layout,
    flats: Flats,  # per bucket (elements,)
    parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
    memory: FlatMemory,
) -> list[Unit]:
    """In registration order."""
    slot = count(0)
    numbers = [[next(slot) for _ in bucket.slots] for bucket in layout.buckets]
    buckets: dict[int, list[int]] = defaultdict(list)
    for bucket in layout.buckets:
        buckets[bucket.slots[0].parameter.unit].append(bucket.index)
    found = [
        Unit(
            number,
            buckets[unit],
            [flats[bucket] for bucket in buckets[unit]],
            [parameters[slot] for bucket in buckets[unit] for slot in numbers[bucket]],
            memory,
        )
        for number, unit in enumerate(sorted(buckets))
    ]
    for unit_found in found:
        unit_found.gets_gradients = tuple(b for b in unit_found.buckets if not layout.buckets[b].is_frozen)
    return found
