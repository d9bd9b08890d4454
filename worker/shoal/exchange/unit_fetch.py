"""Gathering one unit on one member: asks the owners for what it does not hold, and puts in what it does.

`begin` posts, and has a thread of the group wait, so that what comes is copied beside the training thread's work;
`finish` waits for that. Several units can be on their way. The answers of one owner keep the order in which it was
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.blocks.originals import Originals
from shoal.blocks.shared_weights import Key
from shoal.blocks.unit_flats import Unit
from shoal.blocks.values import RangeValues
from shoal.device import DeviceCopy
from shoal.exchange.packing import PackedReceive
from shoal.exchange.traffic import GATHERED_UNIT
from shoal.exchange.unit_server import ask
from shoal.exchange.unit_traffic import UnitTraffic
from shoal.group.group import Group, Waiting, Work

PutOwn = Callable[[int], list[DeviceCopy]]
"""Begins to copy what is held here into the flats of a unit, by its number."""


@dataclass(slots=True)
class _Coming:
    receives: list[PackedReceive]
    asked: list[tuple[Work, Tensor]]
    own: list[DeviceCopy] = field(default_factory=list)
    waiting: Waiting | None = None
    """None: nothing comes from others."""


class UnitFetch:
    """The gathering of units between two votes."""

    def __init__(
        self,
        group: Group,
        traffic: UnitTraffic,
        key: Key,
        flats: RangeValues,
        put_own: PutOwn,
    ) -> None:
        self._group, self._traffic, self._key, self._flats, self._put_own = group, traffic, key, flats, put_own
        self._coming: dict[int, _Coming] = {}

    def begin(self, unit: Unit) -> None:
        """Raises `WorldChanged`."""
        unit.allocate()
        coming = self._coming[unit.number] = _Coming([], [])
        size, rank = self._group.size, self._group.rank
        for owner in ((rank + distance) % size for distance in range(1, size)):
            messages = self._traffic.messages(owner, rank, self._key[1])[unit.number]
            if not messages:
                continue
            coming.receives += [
                PackedReceive(self._group, owner, GATHERED_UNIT, self._flats, extents) for extents in messages
            ]
            coming.asked.append(ask(self._group, owner, self._key, unit.number))
        if coming.receives:
            works = [one.work for one in coming.receives] + [work for work, _ in coming.asked]
            coming.waiting = self._group.begin_wait(works)
        coming.own = self._put_own(unit.number)

    def finish(self, unit: Unit) -> None:
        """Its values are here. Raises `WorldChanged`."""
        coming = self._coming[unit.number]
        if coming.waiting is not None:
            coming.waiting.wait()
        for one in coming.receives:
            one.unpack()
        for copy in coming.own:
            copy.join()
        del self._coming[unit.number]
        unit.restore()

    def give_up(self) -> None:
        """Nothing is on its way from this worker's own memory any more: what was begun may be freed."""
        for coming in self._coming.values():
            for copy in coming.own:
                copy.join()


class FirstValuesFetch:
    """The same before there is a world, where first values are made when they are asked for: in a warm-up."""

    def __init__(
        self,
        originals: Originals,
        flats: Flats,  # per bucket (elements,)
    ) -> None:
        self._originals, self._flats = originals, flats

    def begin(self, unit: Unit) -> None:
        """Finds memory."""
        unit.allocate()

    def give_up(self) -> None:
        """Nothing is ever on its way."""

    @torch.no_grad()
    def finish(self, unit: Unit) -> None:
        """Its values are here."""
        for bucket in unit.buckets:
            self._originals.fill(bucket, self._flats[bucket])
        self._originals.forget()
        unit.restore()
