"""Units whose owners all run on this host: their memory is mapped, and what comes is their word that it can be read.

Once a world each owner says where it keeps its parameters (`see_owners`). From then on whoever needs a unit looks at
the memory's own head, and asks only those who have not come so far. What is read is good for as long as its owners
stand there: they do until everybody has voted, unless the world changes without this worker, which is found out by
`check` after the reading.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shoal.blocks.mapped_flats import MappedFlats
from shoal.blocks.shared_weights import Key, SeenWeights
from shoal.blocks.unit_flats import Unit
from shoal.exchange.traffic import GATHERED_UNIT
from shoal.exchange.unit_server import WHERE, ask
from shoal.group.group import Group, Work, WorldChanged
from shoal.unnamed_memory import ADDRESS, MemoryAddress

Owners = Mapping[int, SeenWeights]
"""By rank; this worker's own too, where it owns something."""


class _Asked:
    """A request for an owner's address, which comes when that has come so far."""

    def __init__(self, group: Group, owner: int, key: Key) -> None:
        """Raises `WorldChanged`."""
        self.address = torch.zeros(ADDRESS.size, dtype=torch.uint8)
        received = group.receive(self.address, owner, GATHERED_UNIT)
        sent, self._message = ask(group, owner, key, WHERE)
        self.works: list[Work] = [received, sent]


def address_message(address: MemoryAddress | None) -> Tensor:  # (bytes of an address,) uint8
    """The answer to `WHERE`. None: it is not to be seen."""
    content = address.to_bytes() if address is not None else bytes(ADDRESS.size)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def see_owners(group: Group, key: Key, own: MemoryAddress, ranks: Collection[int]) -> dict[int, SeenWeights] | None:
    """The memory of all of these; None where this process cannot see some of it. Raises `WorldChanged`."""
    asked = {rank: _Asked(group, rank, key) for rank in ranks if rank != group.rank}
    group.wait([work for one in asked.values() for work in one.works])
    addresses = {group.rank: own} if group.rank in ranks else {}
    with contextlib.suppress(OSError, struct.error):
        for rank, one in asked.items():
            addresses[rank] = MemoryAddress.from_bytes(bytes(one.address.tolist()))
        if all(address.is_seen_from(own) for address in addresses.values()):
            return {rank: SeenWeights(address) for rank, address in addresses.items()}
    return None


class SeenUnits:
    """The units of one world between two votes."""

    def __init__(self, group: Group, owners: Owners, key: Key, mapped: MappedFlats) -> None:
        self._group, self._owners, self._key, self._mapped = group, owners, key, mapped
        self._asked: list[_Asked] | None = None
        """None: nobody needed to be asked yet."""

    def begin(self, unit: Unit) -> None:
        """Raises `WorldChanged`."""
        unit.show(self._mapped)
        if self._asked is None:
            others = [rank for rank, one in self._owners.items() if rank != self._group.rank]
            late = [rank for rank in others if not self._owners[rank].stand_at(self._key)]
            self._asked = [_Asked(self._group, rank, self._key) for rank in late]

    def finish(self, unit: Unit) -> None:
        """Its values are here. Raises `WorldChanged`."""
        if self._asked:
            self._group.wait([work for one in self._asked for work in one.works])
            self._asked = []
        self._mapped.follow(unit.buckets)
        self.check()
        if unit.has_kept_views:
            self.keep(unit)
        unit.restore()

    def keep(self, unit: Unit) -> None:
        """Its values stay as they are. Raises `WorldChanged`."""
        self._mapped.keep(unit.buckets)
        self.check()

    def check(self) -> None:
        """All that was read until now was as of this vote. Raises `WorldChanged`."""
        for rank, one in self._owners.items():
            if not one.stand_at(self._key):
                raise WorldChanged(f"rank {rank} has gone on while parameters were read as of {self._key}")

    def give_up(self) -> None:
        """Nothing is on its way from this worker's own memory."""
