"""Sharded gradients leave in the order in which buckets were seen to fill: bits, an end, and what waits meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from crew import Crew, Task, undisturbed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matrices import examples
from over_gloo import over_gloo
from planning import World
from random_modules import RandomModel, optimizer_of
from rule import Edit, rule
from shoal.blocks.flat import Flats
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.shard_sums import ShardSums
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable
from shoal.core.tree import NO_LANE
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.pieces import NEVER, ExchangePiece, FillTimes, PieceOrder, Portion, portions
from shoal.exchange.round_reduction import RoundReduction
from shoal.exchange.traffic import RoundsTraffic, Traffic
from shoal.group.group import Group, SoloGroup
from shoal.training.reducing import BucketHooks
from shoal_controller.core.planning.planner import Terms
from small_pieces import limits_of
from torch import Tensor, nn

BLOCK = 4_096
ROUGHLY = settings(
    max_examples=examples(8), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)

Filling = tuple[int, ...]
"""The buckets that a lane fills, one after the other; the others get no gradient."""


def pieces_of(*last_buckets: int) -> list[ExchangePiece]:
    return [ExchangePiece(bucket, 1, ()) for bucket in last_buckets]


# ---- the order


def test_buckets_of_one_piece_and_pieces_of_one_bucket_keep_together() -> None:
    found = portions(pieces_of(2, 3, 3, 3, 5))
    assert found == [Portion((0, 3), (0, 1)), Portion((3, 4), (1, 4)), Portion((4, 6), (4, 5))]
    order = PieceOrder.of([found[1], found[2], found[0]])
    assert order.pieces == (1, 2, 3, 4, 0)
    assert order.buckets == (3, 4, 5, 0, 1, 2)
    assert order.places == (3, 4, 5, 0, 1, 2)
    assert order.until == (1, 1, 1, 3, 6)


def seen_by(times: FillTimes, filling: Sequence[int]) -> None:
    times.begin_lane()
    for bucket in filling:
        times.on_whole(bucket)
    times.end_lane()


@rule(
    "Sharded gradients leave in one order on all members: by the latest time at which any lane of the world has "
    "filled a bucket",
    "Arithmetic and layout",
    broken_by=Edit("shoal.exchange.pieces", "rows.amax(0)", "rows.amin(0)"),
)
def test_the_order_goes_by_the_latest_lane_of_all_members_so_far() -> None:
    mine, theirs = FillTimes(pieces_of(0, 1, 2, 3)), FillTimes(pieces_of(0, 1, 2, 3))
    assert mine.order.pieces == (0, 1, 2, 3)
    seen_by(mine, (0, 1, 2, 3))
    seen_by(theirs, (1, 2, 3))
    for times in (mine, theirs):
        times.agree(torch.stack([mine.row, theirs.row]))
        assert times.order.pieces == (1, 2, 3, 0)
    seen_by(mine, (3, 0, 1, 2))
    assert mine.row.tolist() == [1, 2, 3, 3, 0, 0, 0, 0]
    mine.agree(torch.stack([mine.row, theirs.row * 0]))
    assert mine.order.pieces == (1, 2, 3, 0), "what was late once is late in this world"


def test_an_order_that_nothing_changes_stays_the_same_object() -> None:
    times = FillTimes(pieces_of(0, 1, 2))
    seen_by(times, (0, 1, 2))
    times.agree(times.row[None])
    order = times.order
    seen_by(times, (0, 1, 2))
    times.agree(times.row[None])
    assert times.order is order


def test_a_backward_that_fills_nothing_for_good_is_not_counted() -> None:
    times = FillTimes(pieces_of(0, 1))
    times.on_whole(1)
    assert times.row.tolist() == [0] * 8
    seen_by(times, (1,))
    times.on_whole(0)
    assert times.row.tolist() == [NEVER] + [0] * 7


def test_there_may_be_more_pieces_than_times() -> None:
    times = FillTimes(pieces_of(*range(600)))
    seen_by(times, range(599, 0, -1))
    times.agree(times.row[None])
    assert times.order.pieces[: NEVER - 1] == tuple(range(599, 599 - (NEVER - 1), -1))
    assert times.order.pieces[-1] == 0


# ---- over gloo


def layout_of(buckets: int) -> Layout:
    return lay_out([Trainable(f"p{n}", (2, BLOCK), torch.float32, 0, n) for n in range(buckets)])


def gradient(layout: Layout, lane: int) -> list[Tensor]:  # by bucket: (2, BLOCK)
    random = torch.Generator().manual_seed(lane)
    return [torch.randn(2, BLOCK, generator=random) for _ in layout.buckets]


def whole(layout: Layout, fillings: Sequence[Filling]) -> Flats:
    """The mean as a world of one makes it of whole gradients."""
    terms = Terms(lanes=len(fillings), blocks=layout.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=9)
    sums = LaneSums(layout, len(fillings))
    for lane, filling in enumerate(fillings):
        sums.begin_lane()
        for bucket in filling:
            sums.live.add(bucket, gradient(layout, lane)[bucket])
        sums.push(lane) if lane + 1 < len(fillings) else sums.begin_push(lane)
    sums.end_push()
    CanonicalReduction(SoloGroup(), Traffic(World(terms, "a").plan, 0, layout), sums, 0, lambda: None).finish()
    return sums.live.flats


class Lanes:
    """One member's backwards, by real hooks of real parameters, and the most buckets that waited at any time."""

    def __init__(self, layout: Layout, fillings: Sequence[Filling]) -> None:
        self.layout, self.fillings = layout, fillings
        self.parameters = [nn.Parameter(torch.zeros(2, BLOCK)) for _ in layout.buckets]
        self.sums = ShardSums(layout, are_narrow=True)
        self.hooks = BucketHooks(layout, self.parameters, self.sums, self._on_whole)
        self.times: FillTimes
        self.most = self.beyond = 0

    def latest_of(self, bucket: int) -> int:
        return max(one.index(bucket) if bucket in one else NEVER for one in self.fillings)

    def _on_whole(self, bucket: int) -> None:
        """What no lane fills later has left, but for what is in flight."""
        self.times.on_whole(bucket)
        here = set(self.sums.live._flats) | {one for one, kept in self.sums.live._kept.items() if kept}
        later = {one for one in here if self.latest_of(one) >= len(self._filled)}
        self.most, self.beyond = max(self.most, len(here)), max(self.beyond, len(here - later))
        self._filled.append(bucket)

    def step(self, group: Group, rounds: RoundsTraffic, times: FillTimes) -> None:
        self.times = times
        reduction = RoundReduction(group, rounds, self.sums, 0, lambda: None)
        for lanes in rounds.rounds:
            lane = lanes[group.rank]
            if lane == NO_LANE:
                continue
            self.sums.begin_lane()
            self._filled: list[int] = []
            loss = torch.zeros(())
            for bucket in reversed(self.fillings[lane]):
                loss = loss + (self.parameters[bucket] * gradient(self.layout, lane)[bucket]).sum()
            times.begin_lane()
            with self.hooks.armed(reduction.on_filled, times.order.buckets):
                if loss.requires_grad:
                    loss.backward()
            times.end_lane()
            assert tuple(self._filled) == self.fillings[lane]
            reduction.end_lane()
        reduction.finish()


@st.composite
def fillings(draw: st.DrawFn, buckets: int, lanes: int) -> list[Filling]:
    """In most lanes a bucket or two are late or unused; in some nothing is where it was."""
    found = []
    for _ in range(lanes):
        order = list(range(buckets))
        for _ in range(draw(st.integers(0, 2))):
            late = order.pop(draw(st.integers(0, len(order) - 1)))
            if draw(st.booleans()):
                order.insert(draw(st.integers(0, len(order))), late)
        found.append(tuple(draw(st.permutations(order)) if draw(st.integers(0, 5)) == 0 else order))
    return found


@given(st.data())
@ROUGHLY
def test_lanes_that_fill_in_any_order_have_the_bits_of_whole_gradients_and_only_what_is_late_waits(
    data: st.DataObject,
) -> None:
    lanes, members = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 3))
    layout = layout_of(9)
    each = data.draw(fillings(9, lanes))
    right = whole(layout, each)
    terms = Terms(
        lanes=lanes, blocks=layout.blocks, mirrors=data.draw(st.integers(0, 1)), mirror_partners=4,
        fill_blocks_per_step=20, rounds=True,
    )  # fmt: skip
    plan = World(terms, "abc"[:members]).plan
    size = layout.buckets[0].elements * 4

    def member(group: Group) -> None:
        traffic = Traffic(plan, group.rank, layout, leaves_are_narrow=True, by_rounds=True)
        assert len(traffic.pieces) >= 9
        times, here = FillTimes(traffic.pieces), Lanes(layout, each)
        for step in range(3):
            here.beyond = 0
            here.step(group, RoundsTraffic.of(traffic, is_first=not step, order=times.order), times)
            for stretch in layout.stretches(here.sums.reduced.runs):
                start, stop = layout.elements(stretch)
                assert torch.equal(here.sums.reduced.of(stretch), right[stretch.bucket][start:stop])
            times.agree(group.all_gather(times.row))
            if step:
                assert here.beyond <= 3, (step, each)
            assert not here.sums.live._flats

    with patch("shoal.exchange.traffic.piece_limits", limits_of(size)):
        over_gloo(members, member)


def test_a_parameter_that_no_lane_uses_holds_back_nothing_after_the_first_step() -> None:
    layout, lanes = layout_of(20), 2
    terms = Terms(lanes=lanes, blocks=layout.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=20, rounds=True)
    plan = World(terms, "ab").plan

    def member(group: Group) -> None:
        traffic = Traffic(plan, group.rank, layout, leaves_are_narrow=True, by_rounds=True)
        times, here = FillTimes(traffic.pieces), Lanes(layout, [tuple(range(1, 20))] * lanes)
        found = []
        for step in range(2):
            here.most = 0
            here.step(group, RoundsTraffic.of(traffic, is_first=not step, order=times.order), times)
            times.agree(group.all_gather(times.row))
            found.append(here.most)
        assert found[0] == 19
        assert found[1] <= 4

    with patch("shoal.exchange.traffic.piece_limits", limits_of(layout.buckets[0].elements * 4)):
        over_gloo(2, member)


# ---- whole engines


@given(st.integers(0, 1 << 30), st.sampled_from([2, 3]), st.data())
@settings(
    max_examples=examples(4), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)
def test_random_programs_over_many_pieces_have_the_bits_of_stage_0(
    number: int, stage: int, data: st.DataObject
) -> None:
    """Each batch takes another path: layers are called late, twice, or not at all."""
    options: dict[str, Any] = {"max_steps": 6, "lanes": data.draw(st.integers(3, 5))}

    def task(stage: int) -> Task:
        return Task({**options, "stage": stage}, model=lambda: RandomModel(number), optimizer=optimizer_of(number))

    with patch("shoal.exchange.traffic.piece_limits", limits_of(1 << 15)):
        with Crew("abc", task(stage)) as crew:
            crew.plant(data.draw(st.sampled_from("bc")), data.draw(st.integers(3, 5)), "exchange")
            crew.train_to(2)
            crew.add("d")
            found = crew.finish()
        assert found == undisturbed(task(0))
