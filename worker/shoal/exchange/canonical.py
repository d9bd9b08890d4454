"""The canonical reduction (stages 0 and 1): each block's mean gradient at its owner, then at its mirrors, bit by bit.

Piece by piece, in one fixed order: what a peer owns of this worker's subtree sums goes to it as one message, or first
to the member that adds up what their host has for that peer (core/tree.py); the owner finishes the one fixed tree over
lanes, divides by their number and sends the result to whoever replays the block. The reduced gradient lies in place, in
the live copy: owners' and mirrors' ranges of it are the step's pending gradient until the next lane begins. The bytes
in flight are bounded, and with them the buffers. With one aligned run of lanes per worker this is an all-to-all of the
size of a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from shoal_protos.activity import StepPhase
from torch import Tensor

from shoal.blocks.lane_sums import LaneSums
from shoal.core.tree import are_leaves
from shoal.exchange.finite import FiniteWatch
from shoal.exchange.packing import PackedReceive, Posted, ranges, receive_sums, send_packed, send_sums
from shoal.exchange.pieces import Extent, Extents, cached, elements_in
from shoal.exchange.traffic import GATHERED, MIRRORED, PARTIALS, Traffic, sums_dtype
from shoal.exchange.tree_sum import TreeSum
from shoal.group.group import Group, Waiting, Work, WorldChanged

Arrivals = dict[tuple[int, Extents], Tensor]
"""By rank and extents, (the subtrees that come from the rank, elements in the extents)."""


@dataclass(slots=True)
class _InFlight:
    """One piece's messages."""

    sends: list[Posted] = field(default_factory=list)
    gathering: list[Work] = field(default_factory=list)
    gathered: Arrivals = field(default_factory=dict)
    receives: list[Work] = field(default_factory=list)
    arrivals: Arrivals = field(default_factory=dict)
    mirror_sends: list[Posted] = field(default_factory=list)
    mirror_arrivals: list[PackedReceive] = field(default_factory=list)


class CanonicalReduction:
    """The reduction of one step: made before its last backward, which calls `on_filled`; then `finish`.

    `traffic` and `group` are the world's; `on_reduced` is called for each piece before it is mirrored;
    `loss_scale`: what the lanes' losses were multiplied by. Raises `WorldChanged` from the constructor and `finish`.
    """

    def __init__(
        self,
        group: Group,
        traffic: Traffic,
        sums: LaneSums,
        boundaries: int,
        on_reduced: Callable[[], None],
        loss_scale: float = 1.0,
    ) -> None:
        self._group, self._traffic, self._sums, self._on_reduced = group, traffic, sums, on_reduced
        self._loss_scale = loss_scale
        self._pieces, self._windows = traffic.pieces, traffic.windows
        self._partials, self._mirrored = traffic.partials, traffic.mirrored(boundaries)
        self._flight = [_InFlight() for _ in self._pieces]
        self._filled = self._sent = self._posted = self._reduced = self._settled = 0
        """How many of the first pieces have come so far."""
        self._joined = 0 if traffic.host_sums.adds_for(traffic.rank) else len(self._pieces)
        """The first pieces that this worker has added up for owners elsewhere."""
        self._gathering: Waiting | None = None
        self._settling: list[_InFlight] = []
        self._leaving = range(0)
        """The pieces whose sums have left when the present wait is over."""
        self._waiting: Waiting | None = None
        self._broken = False
        self._watch = FiniteWatch(at_once=traffic.layout.device.type == "cpu")
        self._go_on()

    def find_bad_gradient(self) -> str:
        """The first parameter in this worker's blocks whose gradient is not finite, and where that comes from. After
        `finish`; a device is waited for.
        """
        return self._watch.find_bad_gradient()

    def on_filled(self, bucket: int) -> None:
        """The last backward has filled this bucket: its sums leave for their owners, and what has come of earlier ones
        is reduced. Never waits, and never raises: `finish` will.
        """
        self._sums.merge(bucket)
        while self._filled < len(self._pieces) and self._pieces[self._filled].last_bucket <= bucket:
            self._filled += 1
        if self._broken:
            return
        try:
            self._send()
            while self._joined < min(self._filled, self._posted) and self._gather().is_over:
                self._join_next()
            while self._reduced < min(self._filled, self._joined) and self._wait().is_over:
                self._reduce_next()
        except WorldChanged:
            self._broken = True

    def finish(self) -> None:
        """Everything that is left, until every owned and mirrored range holds its reduced gradient.

        Raises `WorldChanged`; the sums are void then.
        """
        if self._broken:
            raise WorldChanged("the group broke while the last backward ran")
        pieces, progress = len(self._pieces), self._group.progress
        self._filled = pieces
        self._send()
        progress.reach(StepPhase.REDUCTION, 0)
        self._join_up_to(1)
        while self._reduced < pieces:
            progress.reach(StepPhase.REDUCTION, self._reduced + 1)
            self._join_up_to(min(self._reduced + 2, pieces))
            self._reduce_next()
        progress.reach(StepPhase.REDUCTION, pieces + 1)
        self._end_wait()

    def _join_up_to(self, stop: int) -> None:
        """A piece ahead of what is reduced: owners elsewhere wait for it."""
        while self._joined < stop:
            self._join_next()

    def _gather(self) -> Waiting:
        """Begins, once, to wait for what is to be added up next."""
        if self._gathering is None:
            self._gathering = self._group.begin_wait(self._flight[self._joined].gathering)
        return self._gathering

    def _join_next(self) -> None:
        """Adds up what this host has of the next piece for owners elsewhere, and sends it."""
        self._gather().wait()
        self._gathering = None
        flight, tree_sum = self._flight[self._joined], self._traffic.joint_sum
        for owner, extents in self._traffic.joint[self._joined]:
            added = [tree_sum.add_up(parts) for _, parts in self._parts(tree_sum, flight.gathered, extents, extents)]
            dtype = sums_dtype(self._traffic, self._joined)
            flight.sends += send_sums(self._group, owner, PARTIALS, list(zip(*added, strict=True)), dtype)
        flight.gathered.clear()
        flight.gathering.clear()
        self._joined += 1

    def _reduce_next(self) -> None:
        """The next piece, as soon as all that it needs is here."""
        self._end_wait()
        self._reduce(self._reduced)
        self._on_reduced()
        self._mirror(self._reduced)
        self._reduced += 1
        self._go_on()

    def _go_on(self) -> None:
        """Posts what the window of the next piece allows, and begins to wait for that piece; for the last one only
        with its own sums on their way: then one wait does for both.
        """
        self._post()
        self._send()
        if self._reduced < len(self._pieces) - 1:
            self._wait()

    def _window(self) -> int:
        """So many pieces may be posted."""
        return self._windows[self._reduced] if self._reduced < len(self._pieces) else len(self._pieces)

    def _send(self) -> None:
        """What is filled, within the window: so far owners have posted receives, as a rule."""
        while self._sent < min(self._filled, self._window()):
            flight, piece = self._flight[self._sent], self._sent
            dtype = sums_dtype(self._traffic, piece, are_leaves(self._traffic.lane_spans[self._traffic.rank]))
            self._sent += 1
            for tag, flow in ((GATHERED, self._traffic.gathered), (PARTIALS, self._partials)):
                for peer, extents in flow.sends[piece]:
                    sums = [ranges(sums, extents) for sums in self._sums.finished]
                    flight.sends += send_sums(self._group, peer, tag, sums, dtype)

    def _post(self) -> None:
        traffic = self._traffic
        while self._posted < self._window():
            flight, piece = self._flight[self._posted], self._posted
            self._posted += 1
            for peer, extents in traffic.gathered.receives[piece]:
                works, flight.gathered[peer, extents] = self._receive(piece, peer, GATHERED, traffic.joint_sum, extents)
                flight.gathering += works
            owned_sum = traffic.owned_sums[self._pieces[piece].division]
            for peer, extents in self._partials.receives[piece]:
                works, flight.arrivals[peer, extents] = self._receive(piece, peer, PARTIALS, owned_sum, extents)
                flight.receives += works

    def _receive(
        self, piece: int, peer: int, tag: int, tree_sum: TreeSum, extents: Extents
    ) -> tuple[list[Work], Tensor]:  # (the peer's subtrees, elements in the extents)
        dtype = sums_dtype(self._traffic, piece, peer in tree_sum.leaves_from)
        shape = tree_sum.subtrees_from[peer], elements_in(extents)
        sums = torch.empty(shape, dtype=dtype, device=self._traffic.layout.device)
        return receive_sums(self._group, peer, tag, sums), sums

    def _wait(self) -> Waiting:
        """Begins, once, to wait in one go, as each wait has its price: for what the next piece needs, and for what
        earlier ones have had in flight for long enough: the sums of the piece before, and what is mirrored of those
        whose window has ended. With the last piece for all sums, after it for all that is mirrored.
        """
        if self._waiting is None:
            piece, pieces = self._reduced, len(self._pieces)
            works = [*self._flight[piece].receives] if piece < pieces else []
            first = max(0, piece - 1) if piece < pieces else pieces
            self._leaving = range(first, piece if piece < pieces - 1 else pieces)
            works += [work for one in self._leaving for work, _ in self._flight[one].sends]
            while self._settled < pieces and (piece == pieces or self._has_had_its_time(self._settled, piece)):
                self._settling.append(self._flight[self._settled])
                self._settled += 1
            works += [one.work for flight in self._settling for one in flight.mirror_arrivals]
            works += [work for flight in self._settling for work, _ in flight.mirror_sends]
            self._waiting = self._group.begin_wait(works)
        return self._waiting

    def _has_had_its_time(self, earlier: int, piece: int) -> bool:
        """What is mirrored of an earlier piece, when this one is waited for."""
        return earlier < piece - 1 and self._windows[earlier] < piece

    def _end_wait(self) -> None:
        self._wait().wait()
        self._waiting = None
        for flight in self._settling:
            for one in flight.mirror_arrivals:
                one.unpack()
            flight.mirror_arrivals.clear()
            flight.mirror_sends.clear()
        self._settling.clear()
        for piece in self._leaving:
            self._receive_mirrored(piece)

    def _reduce(self, piece: int) -> None:
        flight, tree_sum = self._flight[piece], self._traffic.owned_sums[self._pieces[piece].division]
        for extents in self._traffic.own_messages[piece]:
            in_cache = cached(extents, self._watch.at_once)
            for (bucket, start, stop), parts in self._parts(tree_sum, flight.arrivals, extents, in_cache):
                (root,) = tree_sum.add_up(parts)
                place = self._sums.last.range(bucket, start, stop)
                mean = torch.add(root, 0.0, out=place).div_(self._traffic.leaves)
                of, culprit = self._traffic.layout.buckets[bucket], tree_sum.culprit(parts, self._watch.at_once)
                self._watch.look(of, start, mean, culprit)
                if self._loss_scale != 1.0:
                    mean.div_(self._loss_scale)
        flight.arrivals.clear()
        flight.receives.clear()

    def _parts(
        self, tree_sum: TreeSum, arrived: Arrivals, extents: Extents, in_parts: Iterable[Extent]
    ) -> Iterator[tuple[Extent, list[Tensor]]]:  # each (elements of the part,)
        """The partial sums of the extents of one message. `in_parts`: the same elements, as they are to be added up."""
        wide = self._sums.live.flats[extents[0].bucket].dtype
        messages = {peer: arrived[peer, extents].to(wide).unbind() for peer in tree_sum.subtrees_from}
        at = 0
        for part in in_parts:
            yield part, tree_sum.parts(self._sums.finished, messages, part, at)
            at += part.stop - part.start

    def _mirror(self, piece: int) -> None:
        """Posts the reduced ranges to their mirrors."""
        reduced = self._sums.last
        for peer, extents in self._mirrored.sends[piece]:
            self._flight[piece].mirror_sends.append(send_packed(self._group, peer, MIRRORED, reduced, extents))

    def _receive_mirrored(self, piece: int) -> None:
        """Posts the receives of what this worker mirrors: it lands where the sum lay that went to its owner, so that
        must have left. It has, as a rule, when the next piece is reduced.
        """
        flight = self._flight[piece]
        flight.sends.clear()
        for peer, extents in self._mirrored.receives[piece]:
            flight.mirror_arrivals.append(PackedReceive(self._group, peer, MIRRORED, self._sums.last, extents))
