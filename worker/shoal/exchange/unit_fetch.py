"""Gathering of units between two votes: a member's requests, its answers to others, and units that are seen in memory.

`UnitFetch` asks the owners for the blocks that this member does not hold, and puts in those that it does. `begin`
posts, and a thread of the group waits, so that what comes is copied beside the training thread's work; `finish` waits
for that. Several units can be on their way, and the answers of one owner keep the order of the requests.
Where messages have one order, and a step is like the one before, owners send without being asked (group/ordered.py).

`UnitServer` takes requests on threads of the group (`Group.serve`), where it never waits. A request names a world, its
last vote and a unit, or asks for the address of the memory. Between two votes no shard changes, because the asker has
not voted; so a request that is ahead of this member is kept until this member has come so far.

`SeenUnits` is for units whose owners all run on this host. Once a world each owner says where it keeps its parameters
(`see_owners`); then a member looks at the memory's own head, and asks only the owners that have not come so far. What
is read is good while its owners stand there: until all members have voted, unless the world changes without this
worker, which `check` finds out after the reading.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from shoal_protos.errors import ShoalError
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.blocks.originals import Originals
from shoal.blocks.shared_weights import NO_KEY, Key, MappedFlats, SeenWeights
from shoal.blocks.unit_flats import Unit
from shoal.blocks.values import RangeValues
from shoal.exchange.packing import PackedReceive
from shoal.exchange.pieces import Extents
from shoal.exchange.traffic import ASKED, GATHERED_UNIT, LATE_UNIT, UnitTraffic
from shoal.group.group import Answers, Gather, Group, Waiting, Work, WorldChanged
from shoal.process.device import DeviceCopy
from shoal.process.unnamed_memory import ADDRESS, MemoryAddress

ANSWERED = {Gather.ASKED: GATHERED_UNIT, Gather.UNASKED: GATHERED_UNIT, Gather.LATE: LATE_UNIT}
"""The tags of what owners send."""

PutOwn = Callable[[int], list[DeviceCopy]]
"""Begins to copy what is held here into the flats of a unit, by its number."""


log = get_logger("shoal")


@dataclass(slots=True)
class _Coming:
    messages: Sequence[tuple[int, Sequence[Extents]]]
    """By owner."""
    receives: list[PackedReceive] = field(default_factory=list)
    asked: list[tuple[Work, Tensor]] = field(default_factory=list)
    own: list[DeviceCopy] = field(default_factory=list)
    waiting: Waiting | None = None
    """None: nothing comes from others."""


class Gathered(Protocol):
    """A unit, as far as a fetch goes."""

    @property
    def number(self) -> int:
        """Its place among all."""

    def allocate(self) -> None:
        """Memory for what comes."""

    def restore(self) -> None:
        """All values have come."""


class UnitFetch:
    """The gathering of units between two votes."""

    first = 0
    """What the first unit is asked for as."""

    def __init__(
        self,
        group: Group,
        traffic: UnitTraffic,
        key: Key,
        flats: RangeValues,
        put_own: PutOwn,
        is_in_lane: Callable[[], bool],
    ) -> None:
        self._group, self._traffic, self._key, self._flats, self._put_own = group, traffic, key, flats, put_own
        self._is_in_lane = is_in_lane
        self._coming: dict[int, _Coming] = {}

    def begin(self, unit: Gathered) -> None:
        """Raises `WorldChanged`."""
        unit.allocate()
        size, rank = self._group.size, self._group.rank
        owners = ((rank + distance) % size for distance in range(1, size))
        found = ((owner, self._traffic.messages(owner, rank, self._key[1])[unit.number]) for owner in owners)
        coming = self._coming[unit.number] = _Coming([(owner, some) for owner, some in found if some])
        if coming.messages:
            self._receive(coming, unit.number, self._begin_gather(unit.number))
        coming.own = self._put_own(unit.number)

    def _begin_gather(self, unit: int) -> Gather:
        return self._group.order.begin_gather(self.first + unit, self._is_in_lane())

    def _receive(self, coming: _Coming, unit: int, way: Gather) -> None:
        coming.receives.clear()
        for owner, some in coming.messages:
            coming.receives += [PackedReceive(self._group, owner, ANSWERED[way], self._flats, one) for one in some]
            if way is not Gather.UNASKED:
                coming.asked.append(ask(self._group, owner, self._key, self.first + unit))
        works = [one.work for one in coming.receives] + [work for work, _ in coming.asked]
        coming.waiting = self._group.begin_wait(works)

    def finish(self, unit: Gathered) -> None:
        """Its values are here. Raises `WorldChanged`."""
        coming = self._coming[unit.number]
        if coming.waiting is not None:
            if self._group.order.let_go(self.first + unit.number, [one.work for one in coming.receives]):
                self._receive(coming, unit.number, Gather.LATE)
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


def answers_of(
    traffic: UnitTraffic, boundaries: int, values: RangeValues, lock: threading.Lock
) -> Callable[[int, int], list[Tensor]]:  # each (elements,)
    """What this member sends to a rank that asks for a unit, by its number: `values` of blocks that it owns."""

    def answer(peer: int, unit: int) -> list[Tensor]:  # each (elements,)
        messages = traffic.messages(traffic.rank, peer, boundaries)[unit]
        with lock:
            parts = [[values.range(*extent) for extent in extents] for extents in messages]
        return [one[0] if len(one) == 1 else torch.cat(one) for one in parts]

    return answer


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


WHERE = -1
"""In the place of a unit: where the one who is asked keeps all that it has, when it has come so far."""


def ask(group: Group, owner: int, key: Key, unit: int) -> tuple[Work, Tensor]:  # the message: (numbers,) int64
    """Posts a request."""
    message = torch.tensor([*key, unit], dtype=torch.int64, device="cpu")
    return group.send(message, owner, ASKED), message


class UnitServer:
    """One member's answers in one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._key: Key = NO_KEY
        self._answers: Answers = _nothing
        self._early: list[tuple[Key, int, int]] = []
        """Requests of members that are ahead of this one: key, peer, unit."""
        self._sent: list[Work] = []
        """Each keeps what it needs of its message: one packed on a device leaves it when it is copied."""
        self.failure: ShoalError | None = None
        """Why something could not be read that this member was asked for: the group has ended by it."""
        group.serve(ASKED, 3, self.on_request)

    def open(self, key: Key, answers: Answers) -> None:
        """This member stands there: `answers` until the next time. What it was asked for meanwhile is sent."""
        with self._lock:
            sent, self._sent = self._sent, []
            self._key, self._answers = key, answers
            self.group.order.answer_with(answers)
            early, self._early = self._early, []
            for of, peer, unit in early:
                self._take(of, peer, unit)
        self.group.wait(sent)  # who was asked in the vote before has been heard since

    def on_request(
        self,
        peer: int,
        message: Tensor,  # (numbers,) int64
    ) -> None:
        """On a thread of the group. Raises `WorldChanged` where it is closed, or has to be."""
        generation, boundaries, unit = message.tolist()
        try:
            with self._lock:
                self._take((generation, boundaries), peer, unit)
        except ShoalError as failure:
            self.failure = failure
            self.group.abort()
            raise WorldChanged(f"rank {peer} cannot be answered: {failure}") from failure

    def _take(self, key: Key, peer: int, unit: int) -> None:
        if key > self._key:
            self._early.append((key, peer, unit))
        elif key == self._key:
            tag = ANSWERED[self.group.order.on_asked(peer, unit)]
            self._sent += [self.group.send(one, peer, tag) for one in self._answers(peer, unit)]
        else:
            log.error("late_request", rank=peer, asked=key, stands_at=self._key, unit=unit)
            raise WorldChanged(f"rank {peer} asks for unit {unit} as of {key}, which is over")


def server_in(group: Group, before: UnitServer | None) -> UnitServer:
    """That of a group: the one before, where it is of the same. Raises what that could not read, as this worker owns
    blocks that it cannot give to others.
    """
    if before is not None and before.failure is not None:
        raise before.failure
    return before if before is not None and before.group is group else UnitServer(group)


def _nothing(peer: int, unit: int) -> Sequence[Tensor]:  # each (elements,)
    raise AssertionError(f"rank {peer} is answered for unit {unit} before the world has begun")


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
