"""Shaping: between reduction and vote, tensors that are updated whole are brought to their homes, and updates back.

The owner of a tensor's anchor block is its home. Owners send the tensor's parts there; the home computes, once; what it
has made goes to all who update a block of the tensor at this vote, who keep it beside the gradient until they commit.
Bucket by bucket, one message between two members for each column of what travels. A home has no state, so a death
here is one before the vote: the step runs again with other homes, and the same bits. Nothing is written.

A group that has no turn (`engine.turn`) sends nothing. Where there may be such, members agree on turns before, by one
small all-gather: those whose scripts differ would wait for each other, and the vote is to say so.

Made once for a world; a step without such tensors does not come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.runs import Runs, Span
from torch import Tensor
from torch.nn.functional import pad

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

AFTER_BUFFERS = 1
"""Its positions in the phase of buffers begin here."""
Spans = Sequence[Sequence[Sequence[Span]]]
"""Element ranges by rank and bucket."""


@dataclass(slots=True)
class _Receive:
    """From one peer, by column; `slots` are the tensors, as they follow each other in it, `elements` how many of each,
    and `sizes` for how many of these each column has a value.
    """

    slots: list[Slot]
    elements: list[int]
    sizes: list[list[int]]
    columns: list[Tensor]
    works: list[Work]


@dataclass(slots=True)
class _InFlight:
    """One bucket's messages. `own`: by tensor of which this member is the home, what it has of it itself."""

    bucket: Bucket
    homes: dict[Slot, int]
    own: dict[Slot, list[Tensor]] = field(default_factory=dict)
    parts: dict[int, _Receive] = field(default_factory=dict)
    returned: list[_Receive] = field(default_factory=list)
    sends: list[Posted] = field(default_factory=list)


class Shaping:
    """Of one member in one world."""

    def __init__(self, group: Group, traffic: Traffic, held: HeldBlocks) -> None:
        self.traffic = traffic
        self._group, self._held, self._whole = group, held, held.optimizer_step.whole
        self._layout = layout = traffic.layout
        places = self._whole.places
        costs = [self._whole.update_of(bucket.group).cost(slot.parameter.shape) for bucket, slot in places]
        self._buckets: dict[int, dict[Slot, int]] = {}
        """By bucket, the homes of its tensors."""
        for (bucket, slot), anchor in zip(places, anchors(layout, places, costs), strict=True):
            self._buckets.setdefault(bucket.index, {})[slot] = _owner_of(anchor, traffic.owned)
        self._owned: Spans = [layout.cut(runs) for runs in traffic.owned]
        names = names_by_group(held.segments.user)
        self.takes_turns = any(names[bucket.group] for bucket, _ in places)
        """Whether there may be groups without a turn."""
        self._wanted: Spans = ()
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
        self._wanted = [self._layout.cut(runs) for runs in self.traffic.replays(boundaries)]
        turns, flights = self._turns(), list[_InFlight]()
        for number, homes in self._buckets.items():
            if not turns[self._layout.buckets[number].group]:
                continue
            flights.append(flight := _InFlight(self._layout.buckets[number], homes))
            self._send_parts(flight, gradients, scale, is_new)
            if len(flights) > 1:
                self._make(len(flights) - 2, flights[-2], is_new)
        if flights:
            self._make(len(flights) - 1, flights[-1], is_new)
        self._group.progress.reach(StepPhase.BUFFERS, AFTER_BUFFERS + len(flights))
        for flight in flights:
            for receive in flight.returned:
                self._group.wait(receive.works)
                for slot, columns in zip(receive.slots, _by_slot(receive), strict=True):
                    self._put(flight.bucket, slot, columns)
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

    # ---- to the home

    def _send_parts(
        self,
        flight: _InFlight,
        gradients: RangeValues,  # reduced, of what this member owns
        scale: float,
        is_new: Callable[[Slot], bool],
    ) -> None:
        """The next bucket's, and its receives are posted."""
        rank, bucket = self._group.rank, flight.bucket
        dtypes = self._whole.update_of(bucket.group).columns(bucket.wide_dtype)
        for peer in self.traffic.others:
            slots = [slot for slot, home in flight.homes.items() if home == rank]
            if found := self._receive(peer, PARTS, bucket, dtypes.sent, slots, self._owned[peer][bucket.index]):
                flight.parts[peer] = found
        leaving: dict[int, list[list[Tensor]]] = {}
        for slot, home in flight.homes.items():
            spans = _overlap(slot, self._owned[rank][bucket.index])
            runs = [run for span in spans for run in self._held.runs_in(bucket.index, *span, gradients)]
            if runs:
                group = self._held.segments.user.param_groups[bucket.group]
                columns = self._whole.part((bucket, slot), runs, group, scale, is_new(slot))
                columns = [column.to(self._layout.device) for column in columns]
                if home == rank:
                    flight.own[slot] = columns
                else:
                    leaving.setdefault(home, []).append(self._used(bucket, slot, spans, columns))
        self._send(flight, PARTS, leaving)

    def _receive(
        self, peer: int, tag: int, bucket: Bucket, dtypes: Sequence[torch.dtype], slots: Sequence[Slot],
        spans: Sequence[Span],
    ) -> _Receive | None:  # fmt: skip
        """What comes from a peer of these tensors, within `spans`; None: nothing."""
        there = [(slot, found) for slot in slots if (found := _overlap(slot, spans))]
        if not there:
            return None
        sizes = [self._sizes(bucket, slot, found, len(dtypes)) for slot, found in there]
        columns = [
            torch.empty(sum(of_column), dtype=dtype, device=self._layout.device)
            for of_column, dtype in zip(zip(*sizes, strict=True), dtypes, strict=True)
        ]
        works = [self._group.receive(column, peer, tag) for column in columns if column.numel()]
        elements = [sum(stop - start for start, stop in found) for _, found in there]
        return _Receive([slot for slot, _ in there], elements, sizes, columns, works)

    def _sizes(self, bucket: Bucket, slot: Slot, spans: Sequence[Span], columns: int) -> list[int]:
        """Of how many elements of these spans of a tensor each column has a value: of odd state the first ones."""
        odd = self._whole.update_of(bucket.group).odd(slot.parameter.shape).values()
        ends = [slot.parameter.elements] * (columns - len(odd)) + [*odd]
        return [sum(max(0, min(stop, slot.start + end) - start) for start, stop in spans) for end in ends]

    def _used(
        self,
        bucket: Bucket,
        slot: Slot,
        spans: Sequence[Span],
        columns: Sequence[Tensor],  # each (elements of the spans,)
    ) -> list[Tensor]:  # each (elements,)
        """What of these columns has a value."""
        sizes = self._sizes(bucket, slot, spans, len(columns))
        return [column[:size] for column, size in zip(columns, sizes, strict=True)]

    def _send(
        self,
        flight: _InFlight,
        tag: int,
        leaving: dict[int, list[list[Tensor]]],  # by peer, tensor and column (elements,)
    ) -> None:
        """One message to each peer for each column."""
        for peer, of_tensors in leaving.items():
            for parts in zip(*of_tensors, strict=True):
                message = parts[0] if len(parts) == 1 else torch.cat(list(parts))
                if message.numel():
                    flight.sends.append((self._group.send(message, peer, tag), message))

    # ---- at the home, and back

    def _make(self, number: int, flight: _InFlight, is_new: Callable[[Slot], bool]) -> None:
        """All parts of a bucket are waited for, and what is made of them leaves."""
        rank, bucket = self._group.rank, flight.bucket
        self._group.progress.reach(StepPhase.BUFFERS, AFTER_BUFFERS + number)
        update = self._whole.update_of(bucket.group)
        dtypes = update.columns(bucket.wide_dtype)
        for home in self.traffic.others:
            slots = [slot for slot, at in flight.homes.items() if at == home]
            spans = self._wanted[rank][bucket.index]
            if found := self._receive(home, RETURNED, bucket, dtypes.returned, slots, spans):
                flight.returned.append(found)
        self._group.wait([work for one in flight.parts.values() for work in one.works])
        parts = {peer: dict(zip(one.slots, _by_slot(one), strict=True)) for peer, one in flight.parts.items()}
        leaving: dict[int, list[list[Tensor]]] = {}
        for slot in [slot for slot, home in flight.homes.items() if home == rank]:
            own = {rank: flight.own.pop(slot)} if slot in flight.own else {}
            there = own | {peer: of_peer.pop(slot) for peer, of_peer in parts.items() if slot in of_peer}
            sent = self._joined(bucket, slot, there, dtypes.sent)
            group = self._held.segments.user.param_groups[bucket.group]
            made = update.whole(sent, slot.parameter.shape, group, is_new(slot))
            self._made.append((slot, made[0], made[0].sum()))
            kept = self._cut(made, slot, self._wanted[rank][bucket.index])
            is_whole = all(one.numel() == slot.parameter.elements for one in kept)
            self._put(bucket, slot, kept if is_whole else [one.clone() for one in kept])  # else the rest stays too
            for peer in self.traffic.others:
                spans = _overlap(slot, self._wanted[peer][bucket.index])
                if spans:
                    used = self._used(bucket, slot, spans, self._cut(made, slot, spans))
                    leaving.setdefault(peer, []).append(used)
        flight.parts.clear()
        self._send(flight, RETURNED, leaving)

    def _joined(
        self,
        bucket: Bucket,
        slot: Slot,
        parts: dict[int, list[Tensor]],  # by rank and column (elements,)
        dtypes: Sequence[torch.dtype],
    ) -> list[Tensor]:  # by column (elements of the tensor,)
        """A whole tensor of what its owners have sent."""
        device = self._layout.device
        whole = [torch.empty(slot.parameter.elements, dtype=dtype, device=device) for dtype in dtypes]
        for rank, columns in parts.items():
            at = 0
            for start, stop in _overlap(slot, self._owned[rank][bucket.index]):
                for column, part in zip(whole, columns, strict=True):
                    column[start - slot.start : stop - slot.start] = part[at : at + stop - start]
                at += stop - start
        return whole

    @staticmethod
    def _cut(
        made: Sequence[Tensor],  # by column (elements of the tensor,)
        slot: Slot,
        spans: Sequence[Span],
    ) -> list[Tensor]:  # by column (elements,), views where they are one span; empty where there are none
        here = [(start - slot.start, stop - slot.start) for start, stop in _overlap(slot, spans)]
        if not here:
            return []
        parts = [[column[start:stop] for start, stop in here] for column in made]
        return [of_column[0] if len(of_column) == 1 else torch.cat(of_column) for of_column in parts]

    def _put(
        self,
        bucket: Bucket,
        slot: Slot,
        columns: Sequence[Tensor],  # by column (elements,), as they follow each other in what is wanted here
    ) -> None:
        at = 0
        for start, stop in _overlap(slot, self._wanted[self._group.rank][bucket.index]):
            self._whole.put(slot, start, [column[at : at + stop - start] for column in columns])
            at += stop - start


def _owner_of(block: int, owned: Iterable[Runs]) -> int:
    """A rank."""
    return next(rank for rank, runs in enumerate(owned) if block in runs)


def _overlap(slot: Slot, spans: Sequence[Span]) -> list[Span]:
    """What of a tensor lies in such spans of its bucket."""
    first, last = slot.start, slot.start + slot.parameter.elements
    return [(max(first, start), min(last, stop)) for start, stop in spans if start < last and stop > first]


def _by_slot(receive: _Receive) -> list[list[Tensor]]:  # by tensor and column (elements,)
    found, at = list[list[Tensor]](), [0] * len(receive.columns)
    for elements, sizes in zip(receive.elements, receive.sizes, strict=True):
        parts = [column[first : first + size] for column, first, size in zip(receive.columns, at, sizes, strict=True)]
        found.append([part if part.numel() == elements else pad(part, (0, elements - part.numel())) for part in parts])
        at = [first + size for first, size in zip(at, sizes, strict=True)]
    return found
