"""Sharded gradients over real groups: the bits of whole ones, and no gradient whole anywhere but in its piece."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ordered_wire import ordered_over_gloo
from over_gloo import over_gloo
from planning import World
from rule import Edit, holds, rule
from shoal.blocks.flat import Flats
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.shard_sums import ShardSums
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.pieces import PieceOrder, portions
from shoal.exchange.round_reduction import RoundReduction
from shoal.exchange.traffic import RoundsTraffic, Traffic
from shoal.group.group import LANES_BEGIN, USER_STEPS, Group, GroupProgress, SoloGroup
from shoal_controller.core.planning.planner import Terms
from shoal_protos.activity import StepPhase
from shoal_protos.plan import Plan
from small_pieces import limits_of
from tiers import check

pytestmark = check("builds groups of gloo")

BLOCK = 4_096
LANES = 7
DTYPES = [torch.float32, torch.bfloat16]


def layout_of(dtype: torch.dtype) -> Layout:
    """One of the parameters fills its blocks, and so its gradient may be a bucket's memory."""
    shapes = [(1, BLOCK - 7), (60, BLOCK), (2, BLOCK - 7), (50, BLOCK - 7), (1, BLOCK - 7)]
    return lay_out([Trainable(f"p{n}", shape, dtype, 0, n) for n, shape in enumerate(shapes)])


def gradient(layout: Layout, lane: int) -> list[torch.Tensor]:
    """By slot; negative zeros among the numbers, the same in all lanes, as backward may make them."""
    random = torch.Generator().manual_seed(lane)
    found = [
        torch.randn(slot.parameter.shape, dtype=bucket.wide_dtype, generator=random).to(bucket.dtype)
        for bucket in layout.buckets
        for slot in bucket.slots
    ]
    found[1][0, 0] = found[3][0, 0] = -0.0
    return found


UNUSED = 4
"""The slot of a parameter that gets no gradient."""


def whole(layout: Layout) -> Flats:
    """The mean as a world of one makes it of whole gradients."""
    terms = Terms(lanes=LANES, blocks=layout.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=9)
    plan = World(terms, "a").plan
    sums = LaneSums(layout, LANES)
    for lane in range(LANES):
        sums.begin_lane()
        for slot, values in enumerate(gradient(layout, lane)):
            if slot != UNUSED:
                sums.live.add(slot, values)
        if lane < LANES - 1:
            sums.push(lane)
    sums.begin_push(LANES - 1)
    sums.end_push()
    CanonicalReduction(SoloGroup(), Traffic(plan, 0, layout), sums, 0, lambda: None).finish()
    return sums.live.flats


def plans(layout: Layout) -> list[Plan]:
    """A start; a loss, with lanes in flight; a joiner."""
    terms = Terms(lanes=LANES, blocks=layout.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=20, rounds=True)
    world = World(terms, "abcd")
    world.kill("b")
    world.join("e")
    return world.plans


def reduce(group: Group, traffic: Traffic, layout: Layout, is_first: bool) -> tuple[ShardSums, int]:
    """As a step does it; and the most bytes of gradients that there were at one time, without the reduced ones."""
    sums, most = ShardSums(layout, are_narrow=True), 0
    rounds = RoundsTraffic.of(traffic, is_first, PieceOrder.of(portions(traffic.pieces)))
    reduction = RoundReduction(group, rounds, sums, 0, lambda: None)
    slots = [bucket.index for bucket in layout.buckets for _ in bucket.slots]
    for lanes in rounds.rounds:
        if lanes[traffic.rank] < 0:
            continue
        sums.begin_lane()
        for slot, values in enumerate(gradient(layout, lanes[traffic.rank])):
            if slot != UNUSED:
                sums.live.add(slot, values)
                most = max(most, sums.live.bytes)
            if slot != UNUSED and slot + 1 < len(slots) and slots[slot + 1] > slots[slot]:
                reduction.on_filled(slots[slot])
        reduction.end_lane()
    reduction.finish()
    return sums, most


@rule(
    "Sharded gradients are added up by the one tree whatever the rounds, 0 is added to what is taken, or to "
    "their sum (−0.0 becomes +0.0), a gradient is copied at once where its memory has other uses, and is a "
    "bucket's memory where it fills it, a parameter without one counts as zeros, and a bucket's memory serves "
    "again once all of it has left",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.exchange.round_reduction", ", out=mean).add_(0.0)\n", ", out=mean)\n"),
        Edit("shoal.blocks.shard_sums", "        if bucket in self._lent:\n", "        if False:\n"),
        Edit("shoal.blocks.shard_sums", "                view.zero_()\n", ""),
        Edit("shoal.blocks.shard_sums", " and not _is_shared(gradient):\n", ":\n"),
        Edit(
            "shoal.blocks.shard_sums",
            ", OF_ITS_OWN)) or not gradient.untyped_storage().resizable()\n",
            ", OF_ITS_OWN))\n",
        ),
        Edit(
            "shoal.blocks.flat",
            "    view.add_(gradient if is_added_at_once(gradient, view) else gradient.to(view.dtype))\n",
            "    view.add_((gradient.to_dense() if gradient.is_sparse else gradient).to(view.dtype))\n",
        ),
        Edit(
            "shoal.exchange.round_reduction",
            "        if place + 1 < self._pieces and until[place + 1] == until[place]:\n            return\n",
            "",
        ),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("piece", [100_000, 8 << 20])
def test_owners_and_mirrors_have_the_bits_of_whole_gradients(
    number: int, piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(piece))
    has_the_bits(number, dtype, over_gloo)


@pytest.mark.parametrize("number", [1, 2])
def test_a_wire_without_tags_brings_the_same_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(100_000))
    has_the_bits(number, torch.float32, ordered_over_gloo)


def has_the_bits(number: int, dtype: torch.dtype, run: Callable[[int, Callable[[Group], object]], None]) -> None:
    layout = layout_of(dtype)
    right, plan = whole(layout), plans(layout)[number]

    def member(group: Group) -> None:
        traffic = Traffic(plan, group.rank, layout, leaves_are_narrow=True, by_rounds=True)
        for is_first in (True, False):
            sums, _ = reduce(group, traffic, layout, is_first)
            assert sums.reduced.runs == plan.replays(group.rank, 0)
            for stretch in layout.stretches(sums.reduced.runs):
                start, stop = layout.elements(stretch)
                found, wanted = sums.reduced.of(stretch), right[stretch.bucket][start:stop]
                assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
            assert not sums.live._flats

    run(plan.world_size, member)


@holds("Sharded gradients are added up")
def test_of_the_gradients_only_what_is_in_flight_is_there_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(1 << 18))
    layout = lay_out([Trainable(f"p{n}", (16, BLOCK), torch.float32, 0, n) for n in range(40)])
    plan = plans(layout)[0]
    bucket = layout.buckets[0].elements * 4

    def member(group: Group) -> None:
        traffic = Traffic(plan, group.rank, layout, leaves_are_narrow=True, by_rounds=True)
        _, most = reduce(group, traffic, layout, is_first=False)
        assert 2 * bucket <= most <= 4 * bucket

    over_gloo(plan.world_size, member)


@rule(
    "By the end of a lane's backward its round is over on this member, and its position is that of the first "
    "piece that it has not sent: a peer that waits for a piece does not seem to wait in vain for one that is in "
    "user code",
    "Arithmetic and layout",
    broken_by=Edit("shoal.exchange.round_reduction", "        self._settle_up_to(self._lane * self._pieces)\n", ""),
)
def test_positions_only_grow_and_stand_at_the_next_lane_in_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(100_000))
    layout = layout_of(torch.float32)
    plan = plans(layout)[0]

    seen: dict[GroupProgress, list[tuple[StepPhase, int]]] = {}
    reach = GroupProgress.reach

    def note(progress: GroupProgress, phase: StepPhase, bucket: int = 0) -> None:
        seen.setdefault(progress, []).append((phase, bucket))
        reach(progress, phase, bucket)

    monkeypatch.setattr(GroupProgress, "reach", note)

    def member(group: Group) -> None:
        traffic = Traffic(plan, group.rank, layout, leaves_are_narrow=True, by_rounds=True)
        reduce(group, traffic, layout, is_first=False)
        positions = [position for position in seen[group.progress] if position[0] >= StepPhase.LANES]
        assert positions == sorted(positions)
        lanes = len(plan.shares[group.rank].lanes)
        in_user_code = [bucket for phase, bucket in positions if phase is StepPhase.LANES and not bucket % USER_STEPS]
        assert in_user_code == [LANES_BEGIN + lane * len(traffic.pieces) * USER_STEPS for lane in range(1, lanes + 1)]

    over_gloo(plan.world_size, member)
