"""The canonical reduction: every block's mean gradient at its owner, then at its mirrors, with the same bits anywhere.

Bucket by bucket, in one fixed order: what a peer owns of this worker's subtree sums goes to it as one message; the
owner finishes the one fixed tree over lanes, divides by their number and sends the result to whoever replays the
block. The reduced gradient lies in place, in the live copy: owners' and mirrors' ranges of it are the step's pending
gradient until the next lane begins. A few buckets are in flight at once, which bounds the buffers. With one aligned
run of lanes per worker this is an all-to-all of the size of a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.runs import Span
from torch import Tensor

from shoal.blocks.lane_sums import LaneSums
from shoal.core.tree import fold
from shoal.exchange.finite import culprit, describe_gradient, is_finite
from shoal.exchange.packing import PackedReceive, pack, size_of
from shoal.exchange.traffic import MIRRORED, PARTIALS, Traffic
from shoal.group.group import Group, Work, WorldChanged

AHEAD = 2
"""Buckets for which receives are posted beyond the one that is being finished."""


@dataclass(slots=True)
class _InFlight:
    """One bucket's messages."""

    sends: dict[int, Work] = field(default_factory=dict)
    packed: list[Tensor] = field(default_factory=list)  # each (own subtrees × elements that the peer owns,)
    arrivals: dict[int, tuple[Work, Tensor]] = field(default_factory=dict)  # (its subtrees × elements owned here,)


class CanonicalReduction:
    """The reduction of one step: made before its last backward, which calls `on_filled`; then `finish`.

    `traffic` and `group` are the world's. Raises `WorldChanged` from the constructor and `finish`.
    """

    def __init__(self, group: Group, traffic: Traffic, sums: LaneSums, boundaries: int) -> None:
        self._group, self._traffic, self._sums, self._boundaries = group, traffic, sums, boundaries
        self._rank = traffic.rank
        self._flight = [_InFlight() for _ in traffic.layout.buckets]
        self._spans = [(span, rank) for rank in range(group.size) for span in traffic.lane_spans[rank]]
        mine = [index for index, (_, rank) in enumerate(self._spans) if rank == self._rank]
        self._fold = fold([span for span, _ in self._spans], traffic.plan.lanes, mine)
        self._root = self._fold[-1][0] if self._fold else 0
        self._sent = 0
        self._posted = 0
        self._mirror_sends: list[list[tuple[Work, Tensor]]] = []
        self._mirror_arrivals: list[list[PackedReceive]] = []
        self._broken = False
        self.bad_gradient = ""
        """The first parameter in this worker's blocks whose gradient is not finite, and where that comes from."""
        self._post_up_to(AHEAD)

    def on_filled(self, bucket: int) -> None:
        """The last backward has filled this bucket: its sums leave for their owners. Never raises: `finish` will."""
        self._sums.merge(bucket)
        if not self._broken:
            try:
                self._send(bucket)
            except WorldChanged:
                self._broken = True

    def _send(self, bucket: int) -> None:
        self._sent += 1
        if not self._traffic.lane_spans[self._rank]:
            return
        flight = self._flight[bucket]
        for peer in self._traffic.others:
            ranges = self._traffic.owned[peer][bucket]
            if ranges:
                message = pack(self._sums.partials(bucket), ranges)
                flight.packed.append(message)
                flight.sends[peer] = self._group.send(message, peer, PARTIALS)

    def _post_up_to(self, bucket: int) -> None:
        while self._posted < min(len(self._flight), bucket):
            self._post(self._posted)
            self._posted += 1

    def _post(self, bucket: int) -> None:
        ranges = self._traffic.owned[self._rank][bucket]
        for peer in self._traffic.others if ranges else ():
            count = len(self._traffic.lane_spans[peer])
            if count:
                message = self._sums.live.flats[bucket].new_empty(count * size_of(ranges))
                work = self._group.receive(message, peer, PARTIALS)
                self._flight[bucket].arrivals[peer] = (work, message)

    def finish(self, on_reduced: Callable[[], None]) -> None:
        """Everything that is left, until every owned and mirrored range holds its reduced gradient.

        `on_reduced` is called for each bucket before it is mirrored. Raises `WorldChanged`; the sums are void then.
        """
        if self._broken:
            raise WorldChanged("the group broke while the last backward ran")
        buckets, progress = len(self._flight), self._group.progress
        for bucket in range(buckets):
            self._post_up_to(bucket + 1 + AHEAD)
            while self._sent < min(buckets, bucket + 1 + AHEAD):
                self._send(self._sent)
            progress.reach(StepPhase.REDUCTION, 2 * bucket)
            self._reduce(bucket)
            on_reduced()
            progress.reach(StepPhase.REDUCTION, 2 * bucket + 1)
            self._mirror(bucket)
            self._flight[bucket].packed.clear()
            if len(self._mirror_arrivals) > AHEAD:
                self._settle(1)
        progress.reach(StepPhase.REDUCTION, 2 * buckets)
        self._settle(len(self._mirror_arrivals))

    def _settle(self, buckets: int) -> None:
        for _ in range(buckets):
            for arrival in self._mirror_arrivals.pop(0):
                arrival.wait()
            for work, _ in self._mirror_sends.pop(0):
                work.wait()

    def _reduce(self, bucket: int) -> None:
        flight, at = self._flight[bucket], 0
        for work, _ in flight.arrivals.values():
            work.wait()
        ranges = self._traffic.owned[self._rank][bucket]
        length = size_of(ranges)
        live = self._sums.live.flats[bucket]
        for start, stop in ranges:
            parts = self._parts(bucket, (start, stop), at, length)
            # Whoever holds which subtree, the same pairs are added in the order of the one tree over lanes, so the
            # sum has the same bits in every world. In place: a message's memory is this reduction's own.
            for into, other in self._fold:
                parts[into].add_(parts[other])
            root = parts[self._root]
            mean = torch.div(root, self._traffic.plan.lanes, out=live[start:stop])
            if not self.bad_gradient and not is_finite(mean):
                span, _ = self._spans[culprit(parts, self._fold, self._root)]
                self.bad_gradient = describe_gradient(self._traffic.layout.buckets[bucket], start, mean, span)
            at += stop - start
        flight.arrivals.clear()

    def _parts(self, bucket: int, owned: Span, at: int, length: int) -> list[Tensor]:  # each (elements of `owned`,)
        """The partial sums of one owned range, in the order of `_spans`. `at`: where it begins in a subtree's part of a
        message, which is `length` long.
        """
        own = iter(self._sums.partials(bucket))
        seen = dict.fromkeys(range(self._group.size), 0)
        parts = []
        for _, rank in self._spans:
            if rank == self._rank:
                parts.append(next(own)[slice(*owned)])
            else:
                _, message = self._flight[bucket].arrivals[rank]
                first = seen[rank] * length + at
                parts.append(message[first : first + owned[1] - owned[0]])
                seen[rank] += 1
        return parts

    def _mirror(self, bucket: int) -> None:
        """Posts the reduced ranges to their mirrors, and the receives of those that this worker mirrors."""
        live, sends = self._sums.live.flats[bucket], self._flight[bucket].sends
        self._mirror_sends.append([])
        self._mirror_arrivals.append([])
        for peer in self._traffic.others:
            ranges = self._traffic.mirrored(self._boundaries, self._rank, peer)[bucket]
            if ranges:
                message = pack([live], ranges)
                self._mirror_sends[-1].append((self._group.send(message, peer, MIRRORED), message))
        for peer in self._traffic.others:
            if peer in sends:
                sends[peer].wait()  # what is mirrored lands where the sum lay that went to the owner
            ranges = self._traffic.mirrored(self._boundaries, peer, self._rank)[bucket]
            if ranges:
                self._mirror_arrivals[-1].append(PackedReceive(self._group, peer, MIRRORED, live, ranges))
