"""The traffic of a world: who sends which elements to whom, derived once from its plan and the layout.

`Traffic` goes by piece (pieces.py), its peers in the order in which a member turns to them: each begins with the one
after itself, so that no two begin with the same. `RoundsTraffic` is that of gradients that are added up on shards:
every lane's to the owners, round by round. `UnitTraffic` is what travels when a unit is gathered: from each owner, the
blocks of the unit that the asker does not hold itself; both sides come to the same messages. Pure bookkeeping: no
tensor, no group.

Where a cell has several coordinates, gradients and state stay at one: a block's partial sums come from those members at
its home who train, since a gradient that is common to a cell has the same bits in all of it. Only updated parameters
that are common go to other coordinates. Where a cell divides samples or their tokens, partial sums come from the
coordinates of all portions besides: each contributes a gradient of its own. An expert's gradient comes together within
the layer, and only contexts contribute to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs, Span

from shoal.core.cell_part import Division
from shoal.core.layout import Layout, Stretch
from shoal.core.tree import NO_LANE, HostSums, Round, ShardTree, first_rounds, rounds, shard_tree, subtrees
from shoal.exchange.pieces import (
    Backwards,
    CellSums,
    ExchangePiece,
    Extent,
    Extents,
    PieceOrder,
    cut_into_pieces,
    in_messages,
    narrow_windows,
    piece_limits,
    split,
    windows,
)
from shoal.exchange.tree_sum import TreeSum
from shoal.group.learnt_order import Bulk

(
    FIRST_MESSAGE, PARTIALS, MIRRORED, HANDED, FILLED, BUFFERS, DIGESTS, STARTED, HYPER, GATHERED, ASKED, GATHERED_UNIT,
    CALLED, EVALUATED, AWAITED, LATE_UNIT, PARTS, RETURNED, MIRRORED_BY_HOST,
) = range(19)  # fmt: skip
"""Tags. Messages of one tag between two members keep their order, so a tag need not name piece or step."""

LaneSpans = tuple[tuple[Span, ...], ...]
"""Whole subtrees of lanes, by rank."""

BULK = Bulk(frozenset((PARTIALS, MIRRORED, HANDED, GATHERED, GATHERED_UNIT, PARTS, RETURNED)), answers=GATHERED_UNIT)
"""Tags of messages between the devices of workers that compute on devices; others may begin or end on the host."""

Messages = tuple[tuple[int, Extents], ...]
"""Message by message, the peer and what goes to it, or comes from it: several to a peer follow each other."""


@dataclass(frozen=True, slots=True)
class PieceTraffic:
    """What a member sends and receives, by piece."""

    sends: tuple[Messages, ...]
    receives: tuple[Messages, ...]
    coming: frozenset[int] = frozenset()
    """The buckets of which it receives something, where that is asked for."""


class Coordinates:
    """The members of a world by their coordinate in a cell, as one of them sees it. State stays at a coordinate: a
    member exchanges it with its `mates`, and gradients with its `contributors`. Where a cell is one process all members
    are both.
    """

    def __init__(self, plan: Plan, layout: Layout, trained: Callable[[Runs], Runs], by_rounds: bool) -> None:
        """`layout`: of this member's part of the model. `trained`: see `Layout.trained_runs`. `by_rounds`: see
        `Traffic`.
        """
        self._plan, self._own, self._part, self._by_rounds = plan, layout.part.coordinate, layout.part, by_rounds
        self._of = [member.coordinate for member in plan.members]
        self.mates = tuple(self._at(self._own))
        """The ranks at this member's coordinate, its own among them."""
        self.of_stage = tuple(self._at(*self._part.mates))
        """The ranks that have the same stage of a pipeline; without one, all."""
        stages = [one // self._part.of_stage for one in self._of]
        self.first_of_stage = [stages.index(stage) for stage in stages]
        """By rank, the lowest one that has the same stage."""
        self.contributors = tuple(self._at(*self._part.contributors))
        """The ranks that have the parameters of this member, but for experts."""
        self._host_sums_at = lru_cache(maxsize=None)(self._add_at)
        self.portions = self._part.portions
        """Of how many gradients a lane's is the mean."""
        last_stage = replace(self._part, coordinate=self._part.coordinates - 1)
        self.reporter = last_stage.mates[0]
        """The coordinate whose members speak for their cells; of numbers that are of tokens, those of all that
        train a portion of a lane do. Of a pipeline it has the last stage, which makes the loss.
        """
        self._telling = replace(self._part, coordinate=self.reporter).contributors
        self._models = tuple(trained(layout.model_at(one)) for one in self._of) if plan.homes else ()
        """By rank, the blocks whose parameters it has; empty where all have all."""
        self.lane_spans = self._spans_at(self._own)
        """What lanes each rank sends the gradients of; none for ranks at other coordinates."""
        self.told_spans = self._spans_at(*self._telling)
        """What lanes each rank tells of in the vote."""
        self.told_by_portion = [self._at(one) for one in self._telling]
        """By the portion of a lane that they train, the ranks that do."""
        self.speakers = [rank for rank, spans in enumerate(self.told_spans) if spans]
        """The ranks that do where steps run."""

    def _at(self, *coordinates: int) -> list[int]:
        return [rank for rank, one in enumerate(self._of) if one in coordinates]

    def _spans_at(self, *coordinates: int) -> LaneSpans:
        lanes = (self._plan.lanes_of(rank) if one in coordinates else () for rank, one in enumerate(self._of))
        return tuple(tuple(subtrees(Runs.of(mine), self._plan.lanes)) for mine in lanes)

    @property
    def speaks(self) -> bool:
        """Whether this member speaks for its cell."""
        return self._own == self.reporter

    @property
    def tells(self) -> bool:
        """Whether this member tells the numbers of its lanes."""
        return self._own in self._telling

    def in_model(self, rank: int, blocks: Runs) -> Runs:
        """Those of a set of blocks whose parameters a member has."""
        return blocks & self._models[rank] if self._models else blocks

    def holders(self, division: Division) -> list[int]:
        """The ranks that have the parameters of this member that are so divided."""
        return self._at(*self._part.holders(division))

    def by_contributor(self, division: Division) -> list[list[int]]:
        """By coordinate, those that have gradients of these parameters."""
        return [self._at(one) for one in self._part.contributors_to(division)]

    def host_sums(self, owners: tuple[int, ...]) -> HostSums:
        """Who adds up what at this coordinate before it leaves a host. `owners`: the ranks that own blocks."""
        return self._host_sums_at(self._own, owners)

    def sums_of_contributors(self, owners: tuple[int, ...], division: Division) -> list[HostSums]:
        """The same at each coordinate that contributes to the gradients of these parameters, in their order."""
        return [self._host_sums_at(one, owners) for one in self._part.contributors_to(division)]

    def all_host_sums(self, owners: tuple[int, ...]) -> list[tuple[Sequence[HostSums], Collection[int]]]:
        """Those of every part of this member's stage, with the ranks that have it."""
        parts = [replace(self._part, coordinate=one).contributors for one in self._part.mates[: self._part.parts]]
        return [([self._host_sums_at(one, owners) for one in of_part], self._at(*of_part)) for of_part in parts]

    def _add_at(self, coordinate: int, owners: tuple[int, ...]) -> HostSums:
        contributors = replace(self._part, coordinate=coordinate).contributors
        here = [rank for rank in self._at(*contributors) if rank in owners]
        if self._by_rounds:
            size = self._plan.world_size
            one_lane_each = [[(rank, rank + 1)] * (one == coordinate) for rank, one in enumerate(self._of)]
            return HostSums(one_lane_each, (), here, size)  # of a round, whichever lanes are in it
        return HostSums(self._spans_at(coordinate), self._plan.hosts, here, self._plan.lanes)


class Traffic:
    """The traffic of one member of a world."""

    def __init__(
        self, plan: Plan, rank: int, layout: Layout, leaves_are_narrow: bool = False, by_rounds: bool = False,
        hands_out: bool = True,
    ) -> None:  # fmt: skip
        """`layout`: of all blocks of the plan. Frozen ones are in no traffic here; all else goes by the numbers without
        them (`Layout.trained_runs`).

        `leaves_are_narrow`: a lane's gradient has the precision of the parameters, as it is no sum.

        `by_rounds`: every lane's gradient goes to the owners at once (`RoundsTraffic`). `hands_out`: all members
        have all parameters.
        """
        self.plan, self.rank, self.layout, self.leaves_are_narrow = plan, rank, layout.trained, leaves_are_narrow
        self._trained = layout.trained_runs
        self.coordinates = coordinates = Coordinates(plan, layout, self._trained, by_rounds)
        self._of_owners = tuple(self._trained(plan.owned_by(peer)) for peer in plan.ranks)
        self.owned = tuple(coordinates.in_model(rank, owned) for owned in self._of_owners)
        """By rank, what it owns of this member's model."""
        self.lane_spans = coordinates.lane_spans
        """Whole subtrees of lanes whose sums each rank sends."""
        self._by_rounds = by_rounds
        self.others = tuple((rank + distance) % plan.world_size for distance in range(1, plan.world_size))
        self.other_mates = _those_in(self.others, coordinates.mates)
        self.sent_to = _those_in(self.others, coordinates.contributors)
        """Whom gradients are sent to, and come from."""
        self._replays = lru_cache(maxsize=4)(
            lambda boundaries: tuple(self._trained(plan.replays(r, boundaries)) for r in range(plan.world_size))
        )
        self._held = lru_cache(maxsize=2)(lambda boundaries: plan.replays(rank, boundaries))
        self._mirrored = lru_cache(maxsize=2)(
            lambda boundaries: self._flow(lambda owner, mirror: self._owned(owner) & self.replays(boundaries)[mirror])
        )
        self._arriving = lru_cache(maxsize=2)(
            lambda boundaries: tuple(
                extent
                for messages in self._mirrored(boundaries).receives
                for _, extents in messages
                for extent in extents
            )
        )
        self._handed = lru_cache(maxsize=2)(
            lambda boundaries: self._flow(
                lambda owner, peer: (
                    coordinates.in_model(peer, self._owned(owner)) - self.replays(boundaries)[peer]
                    if hands_out
                    else NO_BLOCKS
                )
            )
        )

    def _owned(self, rank: int) -> Runs:
        return self.owned[rank]

    @property
    def _is_on_one_host(self) -> bool:
        return len({member.address.rpartition(":")[0] for member in self.plan.members}) == 1

    @cached_property
    def norm_spans(self) -> tuple[tuple[Span, ...], ...]:
        """Whole subtrees of blocks that each rank owns, whose sums of squares it votes."""
        return tuple(tuple(subtrees(owned, self.layout.blocks)) for owned in self._of_owners)

    @cached_property
    def host_sums(self) -> HostSums:
        """Who adds up what before it leaves a host."""
        return self.coordinates.host_sums(self._owners)

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        return tuple(rank for rank, owned in enumerate(self._of_owners) if owned)

    @cached_property
    def owned_sums(self) -> Mapping[Division, TreeSum]:
        """How this member finishes the tree for what it owns of each division."""
        found = dict[Division, TreeSum]()
        for division in {piece.division for piece in self.pieces}:
            contributors = self.coordinates.sums_of_contributors(self._owners, division)
            sources = [sums.sources(self.rank) for sums in contributors]
            found[division] = TreeSum(sources, self.rank, self.plan.lanes)
        return found

    @property
    def leaves(self) -> int:
        """Of how many gradients a step's is the mean."""
        return self.plan.lanes * self.coordinates.portions

    @cached_property
    def joint_sum(self) -> TreeSum:
        """How it adds up what its host has for owners elsewhere."""
        return TreeSum([self.host_sums.gathered(self.rank)], self.rank, self.plan.lanes)

    @cached_property
    def pieces(self) -> tuple[ExchangePiece, ...]:
        """What is exchanged at one time; the same on all members."""
        others = [_cut_at(self.layout.at(one), self._of_owners) for one in self.layout.part.unlike]
        limits = piece_limits(self.plan.world_size, self._is_on_one_host, self._by_rounds)
        sums = CellSums(self.coordinates.all_host_sums(self._owners)) if self.plan.homes else self.host_sums
        return cut_into_pieces(self.layout, _cut_at(self.layout, self._of_owners), sums, limits, others)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """For each piece, before which one messages are posted while it is waited for."""
        return windows(self.pieces)

    @cached_property
    def backwards(self) -> Backwards:
        """The pieces from the last to the first."""
        return Backwards.of(self.pieces)

    @cached_property
    def partials(self) -> PieceTraffic:
        """The partial sums that this member sends to owners at once, and all that come in: of those the extents are its
        own, once for each subtree of the peer.
        """
        trains = bool(self.lane_spans[self.rank])
        sent_to = [peer for peer in self.sent_to if trains and self.host_sums.adder(self.rank, peer) is None]
        sends = ({peer: self.messages_for(peer, piece) for peer in sent_to} for piece in range(len(self.pieces)))
        receives = (
            {peer: mine for peer in self.others if peer in self.owned_sums[piece.division].subtrees_from}
            for piece, mine in zip(self.pieces, self.own_messages, strict=True)
        )
        return PieceTraffic(tuple(map(_in_order, sends)), tuple(map(_in_order, receives)))

    @cached_property
    def gathered(self) -> PieceTraffic:
        """The partial sums that go to whoever adds them up for owners elsewhere, before they leave the host."""
        crew = self.host_sums.crew(self.rank)
        mates = [peer for peer in self.others if self.rank in crew and peer in crew]
        sends = ({peer: self._added_by(peer, piece) for peer in mates} for piece in range(len(self.pieces)))
        receives = (dict.fromkeys(mates, self._added_by(self.rank, piece)) for piece in range(len(self.pieces)))
        return PieceTraffic(tuple(map(_in_order, sends)), tuple(map(_in_order, receives)))

    @cached_property
    def joint(self) -> tuple[Messages, ...]:
        """By piece, what this member sends to owners elsewhere once it has added up what its host has for them."""
        owners = self.host_sums.adds_for(self.rank)
        messages = ({owner: self.messages_for(owner, piece) for owner in owners} for piece in range(len(self.pieces)))
        return tuple(map(_in_order, messages))

    @cached_property
    def own_messages(self) -> tuple[tuple[Extents, ...], ...]:
        """By piece, what this member owns of it, as the partial sums of it travel."""
        return tuple(self.messages_for(self.rank, piece) for piece in range(len(self.pieces)))

    def _added_by(self, rank: int, piece: int) -> tuple[Extents, ...]:
        owners = self.host_sums.adds_for(rank)
        return tuple(extents for owner in owners for extents in self.messages_for(owner, piece))

    def messages_for(self, owner: int, piece: int) -> tuple[Extents, ...]:
        """What an owner has of a piece, as partial sums of it travel."""
        return self._in_messages(piece, self.pieces[piece].owned[owner])

    def _in_messages(self, piece: int, extents: Extents) -> tuple[Extents, ...]:
        return in_messages(extents, self.layout.buckets[self.pieces[piece].last_bucket].dtype.itemsize)

    def held(self, boundaries: int) -> Runs:
        """Blocks that this rank has as of the vote that follows `boundaries` passed ones, frozen ones among them."""
        return self._held(min(boundaries, self.plan.boundaries))

    def replays(self, boundaries: int) -> tuple[Runs, ...]:
        """Blocks that each rank updates itself at the vote that follows `boundaries` passed ones."""
        return self._replays(min(boundaries, self.plan.boundaries))

    def mirrored(self, boundaries: int) -> PieceTraffic:
        """The reduced gradients that owners send to whoever replays their blocks."""
        return self._mirrored(min(boundaries, self.plan.boundaries))

    def arriving(self, boundaries: int) -> tuple[Extent, ...]:
        """Where in the last live copy such gradients come in, from the first `on_filled` on."""
        return self._arriving(min(boundaries, self.plan.boundaries))

    def handed(self, boundaries: int) -> PieceTraffic:
        """The updated parameters that owners hand out to whoever does not."""
        return self._handed(min(boundaries, self.plan.boundaries))

    def brought(self, stale: Sequence[Runs]) -> PieceTraffic:
        """What owners hand out where a world begins. `stale`: by rank, the blocks whose parameters are not right."""
        return self._flow(
            lambda owner, peer: self.coordinates.in_model(peer, self._owned(owner)) & self._trained(stale[peer])
        )

    def _flow(self, wanted: Callable[[int, int], Runs]) -> PieceTraffic:
        """`wanted(owner, peer)`: blocks of the owner's that go from one to the other."""
        sends = {peer: self._by_piece(self.rank, wanted(self.rank, peer)) for peer in self.others}
        receives = {peer: self._by_piece(peer, wanted(peer, self.rank)) for peer in self.others}
        arriving = self._messages(receives)
        coming = {extent.bucket for piece in arriving for _, extents in piece for extent in extents}
        return PieceTraffic(self._messages(sends), arriving, frozenset(coming))

    def _by_piece(self, owner: int, blocks: Runs) -> dict[int, Extents]:
        return split(self.pieces, owner, self.layout.cut(blocks)) if blocks else {}

    def _messages(self, by_peer: dict[int, dict[int, Extents]]) -> tuple[Messages, ...]:
        found: list[dict[int, tuple[Extents, ...]]] = [{} for _ in self.pieces]
        for peer, by_piece in by_peer.items():
            for piece, extents in by_piece.items():
                found[piece][peer] = self._in_messages(piece, extents)
        return tuple(map(_in_order, found))


def _cut_at(layout: Layout, owned: Sequence[Runs]) -> list[tuple[tuple[Span, ...], ...]]:
    """By rank, the element ranges that it owns of a part of the model."""
    return [layout.cut(blocks & layout.all_blocks) for blocks in owned]


def _those_in(peers: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    among = frozenset(ranks)
    return tuple(peer for peer in peers if peer in among)


def sums_dtype(traffic: Traffic, piece: int, are_leaves: bool = False) -> torch.dtype:
    """What partial sums of a piece travel in: never in less than they have. `are_leaves`: each is of a single lane."""
    bucket = traffic.layout.buckets[traffic.pieces[piece].last_bucket]
    return bucket.leaf_dtype if are_leaves and traffic.leaves_are_narrow else bucket.wide_dtype


def _in_order(by_peer: dict[int, tuple[Extents, ...]]) -> Messages:
    return tuple((peer, extents) for peer, messages in by_peer.items() for extents in messages)


@dataclass(frozen=True, slots=True)
class Contributor:
    """A coordinate whose members have gradients of the same parameters."""

    ranks: frozenset[int]
    tree: ShardTree
    """Of their lanes, all of the step."""


@dataclass(frozen=True, slots=True)
class RoundsTraffic:
    """One step's rounds, as one member sees them."""

    traffic: Traffic
    order: PieceOrder
    rounds: tuple[Round, ...]
    """Of all members."""
    contributors: Mapping[Division, tuple[Contributor, ...]]
    """To what this member owns of each division, in the order of coordinates."""
    sources: Mapping[Division, tuple[tuple[int, ...], ...]]
    """By round, the others among them with a lane in it."""
    lanes_here: int
    """This member's lanes: one in each of the first rounds."""
    sends: tuple[Messages, ...]
    """By piece, what of a lane's gradient goes to whom."""
    receives: tuple[tuple[Extents, ...], ...]
    """By piece, what comes from each member with a lane in the round."""
    windows: tuple[int, ...]
    """By a piece's place in the order, before which place messages are posted while it is waited for."""
    narrow_windows: tuple[int, ...]
    """The same where the next one is being filled here."""

    @classmethod
    def of(cls, traffic: Traffic, is_first: bool, order: PieceOrder) -> RoundsTraffic:
        """`is_first`: of the world's first step, in which lanes that were in flight come first."""
        plan = traffic.plan
        found = tuple(first_rounds(plan) if is_first else rounds(plan))
        sends = tuple(
            tuple((owner, extents) for owner in traffic.sent_to for extents in traffic.messages_for(owner, piece))
            for piece in range(len(traffic.pieces))
        )
        lanes_here = sum(lanes[traffic.rank] != NO_LANE for lanes in found)
        divisions = {piece.division for piece in traffic.pieces}
        contributors = {one: tuple(_contributors(traffic, found, one)) for one in divisions}
        sources = {one: tuple(_sources(traffic, found, of)) for one, of in contributors.items()}
        pieces = [traffic.pieces[piece] for piece in order.pieces]
        return cls(
            traffic, order, found, contributors, sources, lanes_here, sends, traffic.own_messages,
            windows(pieces), narrow_windows(pieces),
        )  # fmt: skip


def _contributors(traffic: Traffic, step: Sequence[Round], division: Division) -> Iterator[Contributor]:
    for ranks in map(frozenset, traffic.coordinates.by_contributor(division)):
        own = [tuple(lane if rank in ranks else NO_LANE for rank, lane in enumerate(lanes)) for lanes in step]
        yield Contributor(ranks, shard_tree(own, traffic.plan.lanes))


def _sources(traffic: Traffic, step: Sequence[Round], of: Sequence[Contributor]) -> Iterator[tuple[int, ...]]:
    among = [peer for peer in traffic.sent_to if any(peer in one.ranks for one in of)]
    return (tuple(peer for peer in among if lanes[peer] != NO_LANE) for lanes in step)


UnitMessages = tuple[tuple[Extents, ...], ...]
"""By unit, message by message."""


class UnitTraffic:
    """Of one world. `units`: the buckets of each. `of_another`: members that have another part of the model ask for all
    of this one.
    """

    def __init__(
        self, plan: Plan, rank: int, layout: Layout, units: Sequence[Sequence[int]], of_another: bool = False
    ) -> None:
        self.plan, self.rank, self._layout = plan, rank, layout
        models = [layout.all_blocks if of_another else layout.model_at(one.coordinate) for one in plan.members]
        self.asked = tuple(models)
        """By rank, the blocks that it asks for, from their owners."""
        self._unit_of = {bucket: number for number, buckets in enumerate(units) for bucket in buckets}
        self.units = len(units)
        self._between = lru_cache(maxsize=None)(self._messages)

    def messages(self, owner: int, asker: int, boundaries: int) -> UnitMessages:
        """What an owner sends to an asker."""
        return self._between(owner, asker, min(boundaries, self.plan.boundaries))

    def own(self, boundaries: int) -> list[list[Stretch]]:
        """By unit, what this member holds of it."""
        found: list[list[Stretch]] = [[] for _ in range(self.units)]
        for stretch in self._layout.stretches(self.plan.held_by(self.rank, boundaries)):
            found[self._unit_of[stretch.bucket]].append(stretch)
        return found

    def _messages(self, owner: int, asker: int, boundaries: int) -> UnitMessages:
        wanted = self.plan.owned_by(owner) & self.asked[asker] - self.plan.held_by(asker, boundaries)
        by_kind: list[dict[object, list[Extent]]] = [{} for _ in range(self.units)]
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
