"""Pieces and traffic: every element goes where the plan says, once, and no member holds more than a piece at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting_group import Counted, CountingGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from planning import World
from rule import Edit, holds, rule
from shoal.blocks.flat import empty_flats
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.values import WholeValues
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable
from shoal.core.tree import HostSums
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.hand_out import HandOut
from shoal.exchange.pieces import (
    ALONE_BYTES,
    CACHED_ELEMENTS,
    ROW,
    Extent,
    Extents,
    PieceLimits,
    cached,
    cut_into_pieces,
    elements_in,
    in_messages,
    split,
    windows,
)
from shoal.exchange.traffic import MIRRORED, PARTIALS, PieceTraffic, Traffic
from shoal.exchange.unit_fetch import UnitFetch
from shoal.group.group import Work
from shoal_controller.core.planning.planner import Terms
from shoal_protos.plan import Plan
from shoal_protos.runs import Runs
from small_pieces import limits_of
from torch import Tensor

BLOCK = 4_096
MOST = 20 * BLOCK * 4
LIMITS = PieceLimits(MOST // 4, MOST)

layouts = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6).map(
    lambda buckets: lay_out(
        [
            Trainable(f"p{n}", (blocks, BLOCK), torch.float64 if wide else torch.float32, 0, n)
            for n, (blocks, wide) in enumerate(buckets)
        ]
    )
)


@st.composite
def owners(draw: st.DrawFn) -> tuple[Layout, list[Runs], list[int]]:
    """A layout, who owns which blocks, and how many partial sums each sends."""
    layout = draw(layouts)
    world = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, layout.blocks), max_size=6)))
    edges = [0, *cuts, layout.blocks]
    of = draw(st.lists(st.integers(0, world - 1), min_size=len(edges), max_size=len(edges)))
    runs = [Runs((edges[n], edges[n + 1]) for n in range(len(edges) - 1) if of[n] == rank) for rank in range(world)]
    return layout, runs, draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))


def sums_of(subtrees: list[int]) -> HostSums:
    """Each rank sends so many partial sums, none of which could be added to another."""
    lanes = iter(range(0, 100, 2))
    spans = [[(lane, lane + 1) for lane in islice(lanes, count)] for count in subtrees]
    return HostSums(spans, (), range(len(subtrees)), 100)


def covered(places: list[Extent]) -> Counter[tuple[int, int]]:
    """Blocks, as (bucket, position), with how often each is covered."""
    return Counter((bucket, at) for bucket, start, stop in places for at in range(start // BLOCK, stop // BLOCK))


@given(owners())
@settings(max_examples=examples(60))
def test_pieces_have_every_owned_element_once_and_in_order(
    given_: tuple[Layout, list[Runs], list[int]],
) -> None:
    layout, runs, subtrees = given_
    pieces = cut_into_pieces(layout, [layout.cut(owned) for owned in runs], sums_of(subtrees), LIMITS)
    for rank, owned in enumerate(runs):
        places = [place for piece in pieces for place in piece.owned[rank]]
        assert places == sorted(places)
        blocks = covered(places)
        assert set(blocks.values()) <= {1}
        assert blocks.keys() == {layout.places[block] for block in owned}
    for piece in pieces:
        assert max((p.bucket for places in piece.owned for p in places), default=0) <= piece.last_bucket


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 40 * ROW)), max_size=4))
@settings(max_examples=examples(60))
def test_a_processor_computes_in_parts_that_its_cache_has(
    given_: list[tuple[int, int, int]],
) -> None:
    extents = [Extent(bucket, start * ROW, start * ROW + size) for bucket, start, size in given_]
    parts = list(cached(extents, on_host=True))
    assert all(0 < stop - start <= CACHED_ELEMENTS for _, start, stop in parts)
    rest = iter(parts)
    for bucket, start, stop in extents:
        while start < stop:
            part = next(rest)
            assert (part.bucket, part.start) == (bucket, start) and part.stop <= stop
            start = part.stop
    assert next(rest, None) is None
    assert list(cached(extents, on_host=False)) == extents


@holds("An exchange goes by pieces")
@given(owners(), st.sampled_from([LIMITS, PieceLimits(MOST, MOST)]))
@settings(max_examples=examples(60))
def test_no_member_holds_more_for_a_piece_than_its_limit(
    given_: tuple[Layout, list[Runs], list[int]], limits: PieceLimits
) -> None:
    """But for the rounding to rows: one for each partial sum and owner."""
    layout, runs, subtrees = given_
    pieces = cut_into_pieces(layout, [layout.cut(owned) for owned in runs], sums_of(subtrees), limits)
    for piece in pieces:
        width = layout.buckets[piece.last_bucket].dtype.itemsize
        for rank, places in enumerate(piece.owned):
            received = elements_in(places) * (sum(subtrees) - subtrees[rank])
            packed = sum(
                subtrees[rank] * elements_in(theirs)
                for peer, theirs in enumerate(piece.owned)
                if peer != rank and (subtrees[rank] > 1 or len(theirs) > 1)
            )
            rows = sum(subtrees) * len(runs)
            assert (received + packed) * width <= MOST + rows * BLOCK * width
            assert received * width <= piece.bytes + rows * BLOCK * width


@given(owners())
@settings(max_examples=examples(60))
def test_a_bucket_is_cut_into_no_more_pieces_than_its_limit_asks_for(
    given_: tuple[Layout, list[Runs], list[int]],
) -> None:
    layout, runs, subtrees = given_
    pieces = cut_into_pieces(layout, [layout.cut(owned) for owned in runs], sums_of(subtrees), LIMITS)
    for of_bucket in (list(each) for _, each in groupby(pieces, lambda piece: piece.last_bucket)):
        whole = sum(piece.bytes for piece in of_bucket)
        assert len(of_bucket) == 1 or (len(of_bucket) - 1) * LIMITS.cut < whole, (
            "fewer pieces would have been within the limit"
        )
        assert max(piece.bytes for piece in of_bucket) <= LIMITS.cut
    for before, after in pairwise(pieces):
        are_alike = layout.buckets[before.last_bucket].dtype == layout.buckets[after.last_bucket].dtype
        are_apart = before.last_bucket != after.last_bucket and are_alike
        assert not are_apart or before.bytes + after.bytes > LIMITS.joined


@given(owners(), st.data())
@settings(max_examples=examples(60))
def test_a_split_is_what_is_wanted_of_each_piece(
    given_: tuple[Layout, list[Runs], list[int]], data: st.DataObject
) -> None:
    layout, runs, subtrees = given_
    pieces = cut_into_pieces(layout, [layout.cut(owned) for owned in runs], sums_of(subtrees), LIMITS)
    for rank, owned in enumerate(runs):
        wanted = Runs.of(data.draw(st.sets(st.sampled_from(list(owned))))) if owned else owned
        parts = split(pieces, rank, layout.cut(wanted))
        assert covered([place for places in parts.values() for place in places]) == Counter(
            layout.places[block] for block in wanted
        )
        for index, places in parts.items():
            assert covered(list(places)) <= covered(list(pieces[index].owned[rank]))


@given(owners())
@settings(max_examples=examples(60))
def test_a_large_extent_is_a_message_of_its_own_and_the_small_ones_of_a_piece_are_one_together(
    given_: tuple[Layout, list[Runs], list[int]],
) -> None:
    layout, runs, subtrees = given_
    for piece in cut_into_pieces(layout, [layout.cut(owned) for owned in runs], sums_of(subtrees), LIMITS):
        width = layout.buckets[piece.last_bucket].dtype.itemsize
        for extents in piece.owned:
            messages = in_messages(extents, width)
            assert sorted(one for message in messages for one in message) == list(extents)
            large = [one for one in extents if (one.stop - one.start) * width >= ALONE_BYTES]
            assert [message for message in messages if message[0] in large] == [(one,) for one in large]
            assert len(messages) == len(large) + (len(extents) > len(large))


# ---- traffic of real plans


TWO_HOSTS = dict(zip("abcde", "xyxyx", strict=True))


def plans(domains: Mapping[str, str] | None = None) -> list[Plan]:
    """Of a world's life: a start, fills, a promotion, a loss, a joiner."""
    terms = Terms(lanes=5, blocks=LAYOUT.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=7)
    world = World(terms, "abcd", domains)
    world.kill("b")
    world.join("e")
    world.fill()
    world.promote()
    return world.plans


LAYOUT = lay_out([Trainable(f"p{n}", (k, BLOCK), torch.float32, 0, n) for n, k in enumerate((3, 50, 1, 1, 12, 40))])


@pytest.mark.parametrize("domains", [None, TWO_HOSTS], ids=["apart", "two hosts"])
@pytest.mark.parametrize("number", range(4))
def test_what_one_sends_the_other_receives_in_the_same_order(number: int, domains: Mapping[str, str] | None) -> None:
    plan = plans(domains)[number]
    traffics = [Traffic(plan, rank, LAYOUT) for rank in range(plan.world_size)]
    assert len({traffic.pieces for traffic in traffics}) == 1
    for boundaries in range(plan.boundaries + 2):
        flows = [
            [traffic.gathered for traffic in traffics],
            [with_joint(traffic) for traffic in traffics],
            [traffic.mirrored(boundaries) for traffic in traffics],
            [traffic.handed(boundaries) for traffic in traffics],
        ]
        for of_ranks in flows:
            for piece in range(len(traffics[0].pieces)):
                sent, got = defaultdict(list), defaultdict(list)
                for rank, flow in enumerate(of_ranks):
                    for to, spans in flow.sends[piece]:
                        sent[rank, to].append(spans)
                    for source, spans in flow.receives[piece]:
                        got[source, rank].append(spans)
                assert sent == got


def with_joint(traffic: Traffic) -> PieceTraffic:
    """All partial sums that owners get."""
    sends = (direct + joint for direct, joint in zip(traffic.partials.sends, traffic.joint, strict=True))
    return PieceTraffic(tuple(sends), traffic.partials.receives)


@holds("Where the lanes of a host's workers")
@pytest.mark.parametrize("lanes", [4, 8, 6])
def test_a_host_sends_one_message_of_a_piece_to_an_owner_elsewhere(lanes: int) -> None:
    terms = Terms(lanes=lanes, blocks=LAYOUT.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=7)
    plan = World(terms, "abcd", TWO_HOSTS).plan
    traffics = [Traffic(plan, rank, LAYOUT) for rank in range(4)]
    for piece, exchanged in enumerate(traffics[0].pieces):
        for owner, host in enumerate(plan.hosts):
            senders = [rank for rank in range(4) if owner in dict(with_joint(traffics[rank]).sends[piece])]
            elsewhere = [rank for rank in senders if plan.hosts[rank] != host]
            assert len(elsewhere) == bool(exchanged.owned[owner])


@pytest.mark.parametrize("number", range(4))
def test_after_mirroring_and_hand_out_everybody_has_every_block(number: int) -> None:
    plan = plans()[number]
    for boundaries in range(plan.boundaries + 2):
        for rank in range(plan.world_size):
            traffic = Traffic(plan, rank, LAYOUT)
            replays = plan.replays(rank, boundaries)
            mirrored = blocks_of(received(traffic.mirrored(boundaries)))
            handed = blocks_of(received(traffic.handed(boundaries)))
            assert mirrored == replays - plan.shares[rank].owned
            assert handed == Runs(((0, plan.blocks),)) - replays - plan.shares[rank].owned


def received(flow: PieceTraffic) -> list[Extents]:
    return [places for messages in flow.receives for _, places in messages]


def blocks_of(messages: list[Extents]) -> Runs:
    blocks = covered([place for places in messages for place in places])
    assert set(blocks.values()) <= {1}
    return Runs.of(LAYOUT.numbers[bucket][position] for bucket, position in blocks)


def test_each_member_begins_with_the_peer_after_itself() -> None:
    plan = plans()[0]
    firsts = [Traffic(plan, rank, LAYOUT).partials.sends[-1][0][0] for rank in range(plan.world_size)]
    assert firsts == [1, 2, 3, 0]


def test_routes_are_computed_once_for_a_world_and_for_each_boundary_of_its_fills() -> None:
    plan = plans()[2]
    traffic = Traffic(plan, 0, LAYOUT)
    assert plan.boundaries > 1
    assert traffic.mirrored(0) is traffic.mirrored(0)
    assert traffic.arriving(0) is traffic.arriving(0)
    assert Counter(traffic.arriving(0)) == Counter(
        extent for messages in traffic.mirrored(0).receives for _, extents in messages for extent in extents
    )
    assert traffic.handed(plan.boundaries) is traffic.handed(plan.boundaries + 5)
    assert traffic.partials is traffic.partials


# ---- what is in flight


@pytest.mark.parametrize("quick", [True, False])
def test_what_has_come_is_reduced_and_mirrored_while_the_last_backward_still_runs(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(1 << 18))
    plan = World(
        Terms(lanes=4, blocks=LAYOUT.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=7), "abcd"
    ).plan
    traffic, sums, group = Traffic(plan, 0, LAYOUT), LaneSums(LAYOUT, 4), CountingGroup(4)
    group.peers_are_quick = quick
    sums.begin_lane()
    sums.begin_push(0)
    reduced: list[int] = []
    filled = 0
    reduction = CanonicalReduction(group, traffic, sums, 0, on_reduced=lambda: reduced.append(filled))
    for bucket in LAYOUT.buckets:
        filled += 1
        reduction.on_filled(bucket.index)
    sums.end_push()
    filled += 1
    reduction.finish()
    lasts = [piece.last_bucket + 1 for piece in traffic.pieces]
    assert reduced == (lasts if quick else [filled] * len(lasts))
    assert group.in_flight == 0


@rule(
    "An exchange goes by pieces, in each of which every owner has its part, and posts so many bytes beyond the "
    "piece that it waits for: buffers are bounded whatever the size of a parameter",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.exchange.pieces", "        parts = max(1, -(-size // limits.cut))\n", "        parts = 1\n"),
        Edit("shoal.exchange.pieces", "(stop <= index + 1 or ahead + pieces[stop].bytes <= in_flight)", "True"),
    ],
)
def test_what_an_exchange_has_in_flight_is_bounded_whatever_the_size_of_a_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piece, in_flight = 1 << 18, 1 << 19
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(piece))
    for place in ("traffic", "pieces"):
        monkeypatch.setattr(f"shoal.exchange.{place}.windows", lambda pieces: windows(pieces, in_flight))
    layout = lay_out([Trainable("embedding", (1_000, BLOCK), torch.float32, 0), Trainable("b", (9,), torch.float32, 0)])
    plan = World(
        Terms(lanes=4, blocks=layout.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=7), "abcd"
    ).plan
    traffic = Traffic(plan, 0, layout)
    sums = LaneSums(layout, 4)
    group = CountingGroup(4)
    sums.begin_lane()
    sums.begin_push(0)
    reduction = CanonicalReduction(group, traffic, sums, boundaries=0, on_reduced=lambda: None)
    for bucket in layout.buckets:
        reduction.on_filled(bucket.index)
    sums.end_push()
    reduction.finish()
    rows = 3 * BLOCK * 4
    assert group.in_flight == 0
    assert group.most <= in_flight + piece + rows * (in_flight // piece + 1)
    assert len(traffic.pieces) == 1 + -(-3 * 251 * BLOCK * 4 // piece), "the largest share is 251 blocks"
    assert group.sends == 1 + 3 * (len(traffic.pieces) - 1), "one message to each owner for each piece"
    group.most = 0
    assert HandOut(group, WholeValues(layout, empty_flats(layout)), traffic, traffic.handed(0)).finish() > 0
    assert group.most <= in_flight + piece + rows * (in_flight // piece + 1)


def test_what_is_updated_is_handed_out_while_the_rest_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(1 << 18))
    plan = World(
        Terms(lanes=4, blocks=LAYOUT.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=7), "abcd"
    ).plan
    traffic, group = Traffic(plan, 0, LAYOUT), CountingGroup(4)
    flow = traffic.handed(0)
    handed_out = HandOut(group, WholeValues(LAYOUT, empty_flats(LAYOUT)), traffic, flow)
    assert not group.sends
    order = traffic.backwards
    half = order.first_buckets[0]
    handed_out.on_updated(half)
    there = [
        flow.sends[number] for number, first in zip(order.numbers, order.first_buckets, strict=True) if first >= half
    ]
    assert group.sends == sum(map(len, there)) > 0
    assert len(there) < len(traffic.pieces)
    handed_out.on_updated(0)
    early = flow.sends[::-1][: min(order.windows[0], len(traffic.pieces) - 1)]
    assert group.sends == sum(map(len, early)), "the last piece keeps everybody in the step until `finish`"
    handed_out.finish()
    assert group.sends == sum(map(len, flow.sends))
    assert group.in_flight == 0


def test_a_unit_is_waited_for_beside_the_training_thread_from_when_it_is_asked_for() -> None:
    group, one_message = CountingGroup(2), [[(Extent(0, 0, 8),)]]
    traffic: Any = SimpleNamespace(messages=lambda *_: one_message)
    unit: Any = SimpleNamespace(number=0, allocate=lambda: None, restore=lambda: None)
    fetch = UnitFetch(group, traffic, (1, 0), WholeValues(LAYOUT, [torch.ones(8)]), lambda _: [], lambda: True)
    fetch.begin(unit)
    assert (group.begun, group.waits) == (1, 0)
    fetch.finish(unit)
    assert group.waits == 2, "for the request, and for the answer"


class Overlooker(CountingGroup):
    """Raises where a receive of a mirrored gradient is posted over a sum that has not left."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.leaving: dict[Counted, Tensor] = {}
        self.mirrored = 0

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        work = super().send(tensor, to, tag)
        assert isinstance(work, Counted)
        if tag == PARTIALS:
            self.leaving[work] = tensor
        return work

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        if tag == MIRRORED:
            self.mirrored += 1
            first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert not any(
                first < one.data_ptr() + one.nbytes and one.data_ptr() < last for one in self.leaving.values()
            )
        return super().receive(tensor, source, tag)

    def wait(self, works: Sequence[Work]) -> None:
        super().wait(works)
        for work in works:
            self.leaving = {kept: tensor for kept, tensor in self.leaving.items() if kept is not work}


@rule(
    "What is mirrored is received once the sum that lay there has left for its owner",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.exchange.canonical",
        "works += [work for one in self._leaving for work, _ in self._flight[one].sends]",
        "works += []",
    ),
)
def test_what_is_mirrored_is_received_where_a_sum_lay_that_has_left() -> None:
    plan = World(
        Terms(lanes=4, blocks=LAYOUT.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=7), "abcd"
    ).plan
    sums, group = LaneSums(LAYOUT, 4), Overlooker(4)
    sums.begin_lane()
    sums.push(0)
    CanonicalReduction(group, Traffic(plan, 0, LAYOUT), sums, boundaries=0, on_reduced=lambda: None).finish()
    assert group.mirrored > 2
    assert not group.leaving
