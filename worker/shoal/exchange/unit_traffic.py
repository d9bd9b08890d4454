"""What travels when a unit is gathered: from each owner, the blocks of the unit that the asker does not hold itself.

Derived from a world's plan; both sides come to the same messages. Pure bookkeeping, as traffic.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shoal_protos.plan import Plan
from shoal_protos.runs import Runs

from shoal.core.layout import Layout, Stretch
from shoal.exchange.pieces import Extent, Extents, in_messages

UnitMessages = tuple[tuple[Extents, ...], ...]
"""By unit, message by message."""


class UnitTraffic:
    """Of one world. `units`: the buckets of each."""

    def __init__(self, plan: Plan, rank: int, layout: Layout, units: Sequence[Sequence[int]]) -> None:
        self.plan, self.rank, self._layout = plan, rank, layout
        self._unit_of = {bucket: number for number, buckets in enumerate(units) for bucket in buckets}
        self._units = len(units)
        self._between = lru_cache(maxsize=None)(self._messages)

    def holds(self, rank: int, boundaries: int) -> Runs:
        """The blocks whose values a member has between that vote and the next one: fills come beside votes."""
        return self.plan.shares[rank].keeps | self.plan.filled(rank, min(boundaries, self.plan.boundaries))

    def messages(self, owner: int, asker: int, boundaries: int) -> UnitMessages:
        """What an owner sends to an asker."""
        return self._between(owner, asker, min(boundaries, self.plan.boundaries))

    def own(self, boundaries: int) -> list[list[Stretch]]:
        """By unit, what this member holds of it."""
        found: list[list[Stretch]] = [[] for _ in range(self._units)]
        for stretch in self._layout.stretches(self.holds(self.rank, boundaries)):
            found[self._unit_of[stretch.bucket]].append(stretch)
        return found

    def _messages(self, owner: int, asker: int, boundaries: int) -> UnitMessages:
        wanted = self.plan.shares[owner].owned - self.holds(asker, boundaries)
        by_kind: list[dict[object, list[Extent]]] = [{} for _ in range(self._units)]
        for stretch in self._layout.stretches(wanted):
            extent = Extent(stretch.bucket, *self._layout.elements(stretch))
            dtype = self._layout.buckets[stretch.bucket].dtype
            by_kind[self._unit_of[stretch.bucket]].setdefault(dtype, []).append(extent)
        return tuple(
            tuple(
                message
                for extents in kinds.values()
                for message in in_messages(tuple(extents), self._layout.buckets[extents[0].bucket].dtype.itemsize)
            )
            for kinds in by_kind
        )
