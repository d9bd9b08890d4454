"""The reduction where gradients are sharded (stages 2 and 3): every lane's gradient goes to the owners as it is made.

Round by round (core/tree.py), in a round piece by piece, in an order that was agreed on (pieces.py): owners add
up what comes in on their shards, by the one tree over lanes, and keep what waits for its sibling; after the last round
they divide, and send the mean to whoever replays the block. So no gradient is whole anywhere but in its piece. What a
member has in flight is bounded: a backward that is ahead of it waits here. By the end of a lane's backward its round is
over on this member, so that nobody waits for what stands behind user code. The same bits as canonical.py, in every
world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from shoal_protos.activity import LANES_BEGIN, StepPhase
from torch import Tensor

from shoal.blocks.shard_sums import ShardSums
from shoal.core.tree import NO_LANE, RoundSum
from shoal.exchange.finite import FiniteWatch
from shoal.exchange.packing import PackedReceive, Posted, ranges, send_packed
from shoal.exchange.pieces import Extents, cached, elements_in
from shoal.exchange.traffic import MIRRORED, MIRRORED_BY_HOST, PARTIALS, Contributor, RoundsTraffic, sums_dtype
from shoal.group.group import USER_STEPS, Group, Waiting, Work, WorldChanged


@dataclass(slots=True)
class _InFlight:
    """The messages of one position: a place in the order of a round's pieces."""

    receives: list[Work] = field(default_factory=list)
    arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By rank and message, (elements in its extents,)."""
    sends: list[Posted] = field(default_factory=list)


Parts = dict[int, Tensor]
"""By number among a round's parts (core/tree.py), (elements in the extents of a message,)."""


class RoundReduction:
    """The reduction of one step: made before its first backward. For each lane here a backward that calls `on_filled`,
    and `end_lane`; then `finish`.

    `on_reduced` is called for each piece before it is mirrored; `loss_scale`: what the lanes' losses were multiplied
    by. Raises `WorldChanged` from the constructor, `end_lane` and `finish`.
    """

    def __init__(
        self,
        group: Group,
        rounds: RoundsTraffic,
        sums: ShardSums,
        boundaries: int,
        on_reduced: Callable[[], None],
        loss_scale: float = 1.0,
    ) -> None:
        self._group, self._rounds, self._sums = group, rounds, sums
        self._traffic = traffic = rounds.traffic
        self._on_reduced, self._loss_scale = on_reduced, loss_scale
        self._pieces, self._mirrored = len(traffic.pieces), traffic.mirrored(boundaries)
        self._order, self._until_filled = rounds.order, rounds.order.until
        self._positions = self._pieces * len(rounds.rounds)
        sums.keep(traffic.replays(boundaries)[traffic.rank], traffic.owned[traffic.rank])
        self._flight: dict[int, _InFlight] = {}
        self._parts = [
            [tuple[Parts, ...]({} for _ in rounds.contributors[piece.division]) for _ in each]
            for each, piece in zip(rounds.receives, traffic.pieces, strict=True)
        ]
        """By piece, message and contributor, the sums that wait for the next rounds."""
        self._last = {division: _last_additions(of) for division, of in rounds.contributors.items()}
        self._filled = self._sent = self._posted = self._settled = 0
        """How many of the first positions have come so far."""
        self._lane = self._complete = 0
        """Which of the lanes here is at hand, and how many of the first buckets in the order it has filled."""
        self._waiting: Waiting | None = None
        self._mirror_tag = MIRRORED_BY_HOST if sums.are_mirrored_by_host else MIRRORED
        self._mirror_sends: list[Work] = []
        self._mirror_receives: list[PackedReceive] = []
        self._broken = False
        self._watch = FiniteWatch(at_once=traffic.layout.device.type == "cpu")
        self._post()

    def find_bad_gradient(self) -> str:
        """The first parameter in this worker's blocks whose gradient is not finite. After `finish`; a device is waited
        for.
        """
        return self._watch.find_bad_gradient()

    # ---- a lane here

    def on_filled(self, bucket: int) -> None:
        """The backward at hand has filled this bucket and all before it in the order. Waits where too much is in
        flight; never raises: `end_lane` will.
        """
        complete = self._order.places[bucket] + 1
        begin, filled = self._lane * self._pieces, self._filled
        while filled < begin + self._pieces and self._until_filled[filled - begin] <= complete:
            filled += 1
        try:
            while not self._broken and self._settled < self._sent and filled > self._window():
                self._settle()  # what it took serves this bucket
        except WorldChanged:
            self._broken = True
        for one in self._order.buckets[self._complete : complete]:
            self._sums.live.complete(one)
        self._complete, self._filled = complete, filled
        if self._broken:
            return
        try:
            self._post()
            self._send()
            while self._sent < self._filled or (self._settled < self._sent and self._wait().is_over):
                self._settle()
        except WorldChanged:
            self._broken = True

    def end_lane(self) -> None:
        """The lane's backward is over, or it was skipped: what has no gradient has one of zeros. Then the round is over
        here.
        """
        if self._complete < len(self._order.buckets):
            self.on_filled(self._order.buckets[-1])
        self._check()
        self._lane, self._complete = self._lane + 1, 0
        self._settle_up_to(self._lane * self._pieces)
        self._group.progress.reach(StepPhase.LANES, LANES_BEGIN + self._settled * USER_STEPS)

    def _check(self) -> None:
        if self._broken:
            raise WorldChanged("the group broke while a backward ran")

    # ---- the step's end

    def finish(self) -> None:
        """Serves the rounds in which there is no lane here, then waits for what is mirrored."""
        self._check()
        self._filled = self._positions
        self._post()
        self._send()
        self._settle_up_to(self._positions)
        self._group.progress.reach(StepPhase.REDUCTION)
        mirrored = [one.work for one in self._mirror_receives] + self._mirror_sends
        self._group.wait(mirrored)
        for one in self._mirror_receives:
            one.unpack()

    # ---- positions

    def _until(self) -> int:
        """So many positions may be posted: a window of the round at hand. Where there is a lane here, memory is scarce,
        and what is not filled here is hardly filled elsewhere.
        """
        if self._settled // self._pieces >= self._rounds.lanes_here:
            return self._window()
        return min(self._filled, self._window())

    def _window(self) -> int:
        """So many at most while the next one is waited for."""
        if self._settled == self._positions:
            return self._positions
        number, place = divmod(self._settled, self._pieces)
        has_lane = number < self._rounds.lanes_here
        windows = self._rounds.narrow_windows if has_lane else self._rounds.windows
        return number * self._pieces + windows[place]

    def _at(self, position: int) -> tuple[int, int]:
        """A round, and a piece of it."""
        number, place = divmod(position, self._pieces)
        return number, self._order.pieces[place]

    def _post(self) -> None:
        while self._posted < self._until():
            number, piece = self._at(self._posted)
            flight = self._flight[self._posted] = _InFlight()
            dtype = sums_dtype(self._traffic, piece, are_leaves=True)
            for peer in self._rounds.sources[self._traffic.pieces[piece].division][number]:
                for message, extents in enumerate(self._rounds.receives[piece]):
                    arriving = torch.empty(elements_in(extents), dtype=dtype, device=self._traffic.layout.device)
                    flight.receives.append(self._group.receive(arriving, peer, PARTIALS))
                    flight.arrived[peer, message] = arriving
            if number == len(self._rounds.rounds) - 1:
                for peer, extents in self._mirrored.receives[piece]:
                    arrival = PackedReceive(self._group, peer, self._mirror_tag, self._sums.reduced, extents)
                    self._mirror_receives.append(arrival)
            self._posted += 1

    def _send(self) -> None:
        """What is filled, within the window: so far owners have posted receives, as a rule."""
        while self._sent < min(self._filled, self._posted):
            number, piece = self._at(self._sent)
            for peer, extents in self._rounds.sends[piece] if number < self._rounds.lanes_here else ():
                posted = send_packed(self._group, peer, PARTIALS, self._sums.live, extents)
                self._flight[self._sent].sends.append(posted)
            self._sent += 1

    def _wait(self) -> Waiting:
        """Begins, once, to wait for the first position that is not settled; its messages have been posted."""
        if self._waiting is None:
            flight = self._flight[self._settled]
            self._waiting = self._group.begin_wait(flight.receives + [work for work, _ in flight.sends])
        return self._waiting

    def _settle_up_to(self, stop: int) -> None:
        while self._settled < stop:
            self._settle()

    def _settle(self) -> None:
        """Waits for the next position, adds up what has come, and gives its memory back."""
        number, piece = self._at(self._settled)
        self._group.progress.reach(StepPhase.LANES, LANES_BEGIN + (self._settled + 1) * USER_STEPS - 1)
        self._wait().wait()
        self._waiting = None
        self._add_up(number, piece, self._flight.pop(self._settled).arrived)
        if number < self._rounds.lanes_here:
            self._release(self._settled % self._pieces)
        self._settled += 1
        self._post()
        self._send()

    def _release(self, place: int) -> None:
        """The buckets of which the piece at this place was the last."""
        until = self._until_filled
        if place + 1 < self._pieces and until[place + 1] == until[place]:
            return
        before = until[place - 1] if place else 0
        for bucket in self._order.buckets[min(before, until[place] - 1) : until[place]]:
            self._sums.live.release(bucket)

    # ---- sums

    def _add_up(
        self,
        number: int,
        piece: int,
        arrived: dict[tuple[int, int], Tensor],  # by rank and message, (elements in its extents,)
    ) -> None:
        rank, lanes, wide = self._traffic.rank, self._rounds.rounds[number], sums_dtype(self._traffic, piece)
        is_last = number == len(self._rounds.rounds) - 1
        division = self._traffic.pieces[piece].division
        sources, contributors = self._rounds.sources[division][number], self._rounds.contributors[division]
        for message, extents in enumerate(self._rounds.receives[piece]):
            here = {peer: arrived[peer, message].to(wide) for peer in sources}
            if lanes[rank] != NO_LANE:
                here[rank] = self._own(extents, wide, is_last)
            waiting = self._parts[piece][message]
            for one, parts in zip(contributors, waiting, strict=True):
                parts.update((peer, value) for peer, value in here.items() if peer in one.ranks)
            if is_last:
                self._add_last(waiting, self._last[division], extents)
                continue
            self._parts[piece][message] = tuple(
                _add_round(parts, one.tree.rounds[number]) for one, parts in zip(contributors, waiting, strict=True)
            )
        if is_last:
            self._on_reduced()
            self._mirror(piece)

    def _own(
        self,
        extents: Extents,
        wide: torch.dtype,
        is_last: bool,
    ) -> Tensor:  # (elements in the extents,) of `wide`
        """Of the lane here. In the last round it may be added to where it lies: nobody else is sent it."""
        mine = ranges(self._sums.live, extents)
        return mine[0].to(wide) if is_last and len(mine) == 1 else torch.cat(mine).to(wide)

    def _add_last(self, waiting: Sequence[Parts], last: LastAdditions, extents: Extents) -> None:
        """All lanes are there: leaves the mean where the update reads it, and forgets the parts. 0 is added to the sum,
        so it has the bits of one that began with zeros (−0.0 is +0.0), as where lanes are accumulated.
        """
        at, lanes, (additions, root) = 0, self._traffic.plan.lanes, last
        parts = {(which, number): value for which, own in enumerate(waiting) for number, value in own.items()}
        for bucket, start, stop in cached(extents, self._watch.at_once):
            end = at + stop - start
            for into, other in additions[:-1]:
                parts[into][at:end].add_(parts[other][at:end])
            mean = self._sums.reduced.range(bucket, start, stop)
            if additions:
                into, other = additions[-1]
                torch.add(parts[into][at:end], parts[other][at:end], out=mean).add_(0.0)
            else:
                torch.add(parts[root][at:end], 0.0, out=mean)
            mean.div_(self._traffic.leaves)
            at = end
            self._watch.look(self._traffic.layout.buckets[bucket], start, mean, lambda: (0, lanes))
            if self._loss_scale != 1.0:
                mean.div_(self._loss_scale)
        for own in waiting:
            own.clear()

    def _mirror(self, piece: int) -> None:
        """Posts the reduced ranges to their mirrors."""
        for peer, extents in self._mirrored.sends[piece]:
            work, _ = send_packed(self._group, peer, self._mirror_tag, self._sums.reduced, extents)
            self._mirror_sends.append(work)


def _add_round(parts: Parts, order: RoundSum) -> Parts:
    """What waits after a round of one contributor."""
    for into, other in order.additions:
        parts[into].add_(parts.pop(other))
    moved = dict(order.pushes)
    return {moved.get(part, part): value for part, value in parts.items()}


Key = tuple[int, int]
"""A contributor, by its place among them, and the number of one of its parts."""


LastAdditions = tuple[list[tuple[Key, Key]], Key]


def _last_additions(contributors: Sequence[Contributor]) -> LastAdditions:
    """Those of the last round, then of the roots in the order of contributors, and where the sum is."""
    additions = [
        ((at, into), (at, other))
        for at, one in enumerate(contributors)
        for order in one.tree.rounds[-1:]
        for into, other in order.additions
    ]
    first, *others = [(at, one.tree.root) for at, one in enumerate(contributors)]
    return additions + [(first, other) for other in others], first
