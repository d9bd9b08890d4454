"""Shaping: between reduction and vote, tensors that are updated whole are brought to their homes, and updates back.

The owner of a tensor's anchor block is its home. Owners send the tensor's parts there; the home computes, once; what it
has made goes to all who update a block of the tensor at this vote, who keep it beside the gradient until they commit.
Bucket by bucket, one message between two members for each column of what travels. A part is made where it belongs: in
the whole tensor at its home, or in the message that leaves. A home has no state, so a death here is one before the
vote: the step runs again with other homes, and the same bits. Nothing is written.

A group that has no turn (`engine.turn`) sends nothing. Where there may be such, members agree on turns before, by one
small all-gather: those whose scripts differ would wait for each other, and the vote is to say so.

Made once for a world; a step without such tensors does not come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.runs import Runs, Span
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.values import RangeValues
from shoal.core.anchors import anchors
from shoal.core.layout import Bucket, Slot
from shoal.exchange.finite import MOST_NAME
from shoal.exchange.packing import Posted
from shoal.exchange.traffic import PARTS, RETURNED, Traffic
from shoal.group.group import Group, Work
from shoal.optim.hyper import has_turn
from shoal.optim.several import names_by_group
from shoal.optim.whole import Columns

AFTER_BUFFERS = 1
"""Its positions in the phase of buffers begin here."""
Spans = Sequence[Sequence[Sequence[Span]]]
"""Element ranges by rank and bucket."""


class _Values(NamedTuple):
    """Values `[start, stop)` of a column of a tensor. `tensor`: its number in the bucket."""

    tensor: int
    start: int
    stop: int


Shares = tuple[tuple[_Values, ...], ...]
"""What goes from one member to another: by column, of the same spans. The first column has a value for each element,
those of odd state for a tensor's first ones.
"""


@dataclass(frozen=True, slots=True)
class _Ways:
    """Of one bucket: what goes where, by rank; what would go to the member itself stays. `owned`: its element ranges;
    `here`: the tensors whose home it is, by number, with how many values each column has that is sent.
    """

    bucket: Bucket
    dtypes: Columns
    owned: Sequence[Span]
    here: Mapping[int, Sequence[int]]
    parts_to: Mapping[int, Shares]
    parts_from: Mapping[int, Shares]
    made_to: Mapping[int, Shares]
    made_from: Mapping[int, Shares]


class _Arrival(NamedTuple):
    """A message, and where its values belong: the one place is the message itself, several are filled from it."""

    work: Work
    message: Tensor  # (values,)
    places: list[Tensor]  # each (values,)


@dataclass(slots=True)
class _InFlight:
    """One bucket's messages. `wholes`: of tensors whose home this member is, by number and column."""

    ways: _Ways
    wholes: dict[int, list[Tensor]] = field(default_factory=dict)
    parts: list[_Arrival] = field(default_factory=list)
    returned: list[tuple[Shares, list[Tensor]]] = field(default_factory=list)
    """With the messages, by column."""
    returning: list[Work] = field(default_factory=list)
    sends: list[Posted] = field(default_factory=list)


class Shaping:
    """Of one member in one world."""

    def __init__(self, group: Group, traffic: Traffic, held: HeldBlocks) -> None:
        self.traffic = traffic
        self._group, self._held, self._whole = group, held, held.optimizer_step.whole
        self._layout = layout = traffic.layout
        places = self._whole.places
        costs = [self._whole.update_of(bucket.group).cost(slot.parameter.shape) for bucket, slot in places]
        self._homes: dict[int, list[int]] = {}
        """By bucket, those of its tensors."""
        for (bucket, _), anchor in zip(places, anchors(layout, places, costs), strict=True):
            self._homes.setdefault(bucket.index, []).append(_owner_of(anchor, traffic.owned))
        self._owned: Spans = [layout.cut(runs) for runs in traffic.owned]
        names = names_by_group(held.segments.user)
        self.takes_turns = any(of_group for group, of_group in enumerate(names) if self._whole.has(group))
        """Whether there may be groups without a turn."""
        self._ways = lru_cache(maxsize=1)(self._ways_at)
        self._made: list[tuple[Slot, Tensor, Tensor]] = []
        """What this home has made for the step at hand: of a tensor the first column, and its sum."""

    def run(
        self,
        gradients: RangeValues,  # reduced, of what this member owns
        scale: float,
        boundaries: int,
        is_new: Callable[[Slot], bool],
    ) -> None:
        """Returns when all that the commit needs is here. `scale`: what gradients are times; `boundaries`: votes that
        have passed in this world; `is_new`: whether no update of a tensor was made yet. Raises `WorldChanged`.
        """
        self._whole.forget()
        self._made.clear()
        turns, flights = self._turns(), list[_InFlight]()
        for ways in self._ways(min(boundaries, self.traffic.plan.boundaries)):
            if not turns[ways.bucket.group]:
                continue
            flights.append(flight := _InFlight(ways))
            self._send_parts(flight, gradients, scale, is_new)
            if len(flights) > 1:
                self._make(len(flights) - 2, flights[-2], is_new)
        if flights:
            self._make(len(flights) - 1, flights[-1], is_new)
        self._group.progress.reach(StepPhase.BUFFERS, AFTER_BUFFERS + len(flights))
        for flight in flights:
            self._group.wait(flight.returning)
            for shares, messages in flight.returned:
                self._put(flight.ways.bucket, shares, [*map(_split, messages, shares)])
        self._group.wait([work for flight in flights for work, _ in flight.sends])

    def _turns(self) -> list[bool]:
        """By group, as all members have them; nobody's turn where they differ. Raises `WorldChanged`."""
        turns = [has_turn(group) for group in self._held.segments.user.param_groups]
        if not self.takes_turns:
            return turns
        rows = self._group.all_gather(torch.tensor(turns, dtype=torch.uint8, device="cpu"))
        return turns if bool((rows == rows[0]).all()) else [False] * len(turns)

    def find_bad(self) -> str:
        """The first tensor whose update, made here, is not finite; empty where all are. After `run`; a device is waited
        for.
        """
        totals = torch.stack([total.double() for _, _, total in self._made]).tolist() if self._made else []
        for (slot, column, _), total in zip(self._made, totals, strict=True):
            if not math.isfinite(total) and not bool(torch.isfinite(column).all()):
                return f'the update of parameter "{slot.parameter.name[:MOST_NAME]}" is not finite'
        return ""

    # ---- what goes where

    def _ways_at(self, boundaries: int) -> list[_Ways]:
        """By bucket. `boundaries`: votes that have passed in this world."""
        wanted: Spans = [self._layout.cut(runs) for runs in self.traffic.replays(boundaries)]
        return [self._ways_of(self._layout.buckets[number], wanted) for number in self._homes]

    def _ways_of(self, bucket: Bucket, wanted: Spans) -> _Ways:
        update, homes = self._whole.update_of(bucket.group), self._homes[bucket.index]
        dtypes = update.columns(bucket.wide_dtype)
        odd = [[*update.odd(slot.parameter.shape).values()] for slot in bucket.slots]
        sent, returned = (
            [
                [slot.parameter.elements] * (len(of) - len(few)) + few
                for slot, few in zip(bucket.slots, odd, strict=True)
            ]
            for of in dtypes
        )

        def shares(home: int, spans: Sequence[Span], ends: Sequence[Sequence[int]]) -> Shares:
            """What lies in these spans of tensors of that home. `ends`: by tensor, how many values columns have."""
            found = [
                [_Values(number, min(start, end), min(stop, end)) for end in ends[number]]
                for number, slot in enumerate(bucket.slots)
                if homes[number] == home
                for start, stop in _overlap(slot, spans)
            ]
            return tuple(zip(*found, strict=True))

        rank, others, at, owned = self._group.rank, self.traffic.others, bucket.index, self._owned
        ways = (
            {home: shares(home, owned[rank][at], sent) for home in (rank, *others)},
            {peer: shares(rank, owned[peer][at], sent) for peer in others},
            {peer: shares(rank, wanted[peer][at], returned) for peer in (rank, *others)},
            {home: shares(home, wanted[rank][at], returned) for home in others},
        )
        here = {number: sent[number] for number, home in enumerate(homes) if home == rank}
        return _Ways(
            bucket, dtypes, owned[rank][at], here, *({peer: one for peer, one in way.items() if one} for way in ways)
        )

    # ---- to the home

    def _send_parts(
        self,
        flight: _InFlight,
        gradients: RangeValues,  # reduced, of what this member owns
        scale: float,
        is_new: Callable[[Slot], bool],
    ) -> None:
        """The next bucket's, and its receives are posted."""
        ways, bucket = flight.ways, flight.ways.bucket
        flight.wholes = {number: self._memory(sizes, ways.dtypes.sent) for number, sizes in ways.here.items()}
        for peer, shares in ways.parts_from.items():
            for column in _places(flight.wholes, shares):
                places = [place for place in column if place.numel()]
                if places:
                    size = sum(map(torch.numel, places))
                    message = places[0] if len(places) == 1 else places[0].new_empty(size)
                    flight.parts.append(_Arrival(self._group.receive(message, peer, PARTS), message, places))
        group = self._held.segments.user.param_groups[bucket.group]
        runs = [run for span in ways.owned for run in self._held.runs_in(bucket.index, *span, gradients)]
        for home, shares in ways.parts_to.items():
            messages = [] if home == self._group.rank else self._messages(shares, ways.dtypes.sent)
            places_by_column = [*map(_split, messages, shares)] if messages else _places(flight.wholes, shares)
            for (number, start, stop), *places in zip(shares[0], *places_by_column, strict=True):
                slot = bucket.slots[number]
                first, last = slot.start + start, slot.start + stop
                of_share = [run for run in runs if run.start < last and run.stop > first]
                self._whole.part((bucket, slot), of_share, group, scale, is_new(slot), places)
            self._send(flight, home, PARTS, messages)

    def _memory(self, sizes: Iterable[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:  # by column (values,)
        device = self._layout.device
        return [torch.empty(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes, strict=True)]

    def _messages(self, shares: Shares, dtypes: Sequence[torch.dtype]) -> list[Tensor]:  # by column (values,)
        return self._memory([sum(map(_length, column)) for column in shares], dtypes)

    def _send(
        self,
        flight: _InFlight,
        peer: int,
        tag: int,
        messages: Iterable[Tensor],  # by column (values,)
    ) -> None:
        flight.sends += [(self._group.send(one, peer, tag), one) for one in messages if one.numel()]

    # ---- at the home, and back

    def _make(self, number: int, flight: _InFlight, is_new: Callable[[Slot], bool]) -> None:
        """All parts of a bucket are waited for, and what is made of them leaves."""
        ways, bucket = flight.ways, flight.ways.bucket
        self._group.progress.reach(StepPhase.BUFFERS, AFTER_BUFFERS + number)
        for home, shares in ways.made_from.items():
            messages = self._messages(shares, ways.dtypes.returned)
            flight.returning += [self._group.receive(one, home, RETURNED) for one in messages if one.numel()]
            flight.returned.append((shares, messages))
        self._group.wait([one.work for one in flight.parts])
        for _, message, places in flight.parts:
            if len(places) > 1:
                torch._foreach_copy_(places, message.split([*map(torch.numel, places)]))
        flight.parts.clear()
        update, group = self._whole.update_of(bucket.group), self._held.segments.user.param_groups[bucket.group]
        made = dict[int, list[Tensor]]()
        for place in ways.here:
            slot = bucket.slots[place]
            made[place] = update.whole(flight.wholes.pop(place), slot.parameter.shape, group, is_new(slot))
            self._made.append((slot, made[place][0], made[place][0].sum()))
        for peer, shares in ways.made_to.items():
            columns = _places(made, shares)
            if peer == self._group.rank:
                self._put(bucket, shares, [[_alone(part) for part in column] for column in columns])
            else:
                self._send(flight, peer, RETURNED, [one[0] if len(one) == 1 else torch.cat(one) for one in columns])

    def _put(
        self,
        bucket: Bucket,
        shares: Shares,
        columns: Sequence[Sequence[Tensor]],  # of each share (values,)
    ) -> None:
        for (number, start, _), *parts in zip(shares[0], *columns, strict=True):
            slot = bucket.slots[number]
            self._whole.put((bucket, slot), slot.start + start, parts)


def _owner_of(block: int, owned: Iterable[Runs]) -> int:
    """A rank."""
    return next(rank for rank, runs in enumerate(owned) if block in runs)


def _overlap(slot: Slot, spans: Sequence[Span]) -> list[Span]:
    """What of a tensor lies in such spans of its bucket: elements of the tensor."""
    most = slot.parameter.elements
    cut = ((max(0, start - slot.start), min(most, stop - slot.start)) for start, stop in spans)
    return [(start, stop) for start, stop in cut if start < stop]


def _length(values: _Values) -> int:
    return values.stop - values.start


def _split(
    message: Tensor,  # (values,)
    column: Sequence[_Values],
) -> list[Tensor]:  # of each share (values,)
    return [*message.split([*map(_length, column)])]


def _places(
    tensors: Mapping[int, Sequence[Tensor]],  # by number and column (values,)
    shares: Shares,
) -> list[list[Tensor]]:  # by column, of each share (values,)
    """Views of these values."""
    return [[tensors[number][at][start:stop] for number, start, stop in column] for at, column in enumerate(shares)]


def _alone(
    part: Tensor,  # (values,), a view
) -> Tensor:  # (values,)
    """Itself, if it is all of its tensor; else a copy, or all the rest would stay too."""
    return part if part.nbytes == part.untyped_storage().nbytes() else part.clone()
