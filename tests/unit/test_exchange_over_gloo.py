"""The exchange over real groups, a thread for each member: the bits of a world of one, in however many pieces."""

from __future__ import annotations

import pytest
import torch
from over_gloo import over_gloo
from planning import World
from shoal.blocks.flat import Flats
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.values import WholeValues
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.hand_out import HandOut
from shoal.exchange.pieces import windows
from shoal.exchange.traffic import Traffic
from shoal.group.group import Group, SoloGroup
from shoal_controller.core.planning.planner import Terms
from shoal_protos.plan import Plan
from small_pieces import limits_of
from tiers import check

pytestmark = check("builds groups of gloo")

BLOCK = 4_096
LANES = 5
LAYOUT = lay_out(
    [
        Trainable(f"p{n}", (blocks, BLOCK - 7), torch.float64 if n == 2 else torch.float32, 0, n)
        for n, blocks in enumerate((1, 60, 2, 9, 1))
    ]
)


def gradient(layout: Layout, lane: int) -> Flats:
    random = torch.Generator().manual_seed(lane)
    return [torch.randn(bucket.elements, dtype=bucket.dtype, generator=random) for bucket in layout.buckets]


def reduced(group: Group, traffic: Traffic, boundaries: int) -> LaneSums:
    """As a step does it: the last lane's buckets leave as they are filled."""
    sums, lanes = LaneSums(LAYOUT, LANES), traffic.plan.shares[traffic.rank].lanes
    reduction = None
    for lane in lanes:
        sums.begin_lane()
        sums.live.zero()
        for flat, values in zip(sums.live.flats, gradient(LAYOUT, lane), strict=True):
            flat.copy_(values)
        if lane != lanes[-1]:
            sums.push(lane)
            continue
        reduction = CanonicalReduction(group, traffic, sums, boundaries, lambda: None)
        sums.begin_push(lane)
        for bucket in LAYOUT.buckets[:-1]:
            reduction.on_filled(bucket.index)  # the last one has a parameter without a gradient
        sums.end_push()
    (reduction or CanonicalReduction(group, traffic, sums, boundaries, lambda: None)).finish()
    return sums


def plans(domains: dict[str, str] | None = None) -> list[Plan]:
    """A start; a loss, after which fills run; a joiner."""
    world = World(
        Terms(lanes=LANES, blocks=LAYOUT.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=20), "abcd", domains
    )
    world.kill("b")
    world.join("e")
    return world.plans


SMALL, USUAL = 100_000, 8 << 20
TWO_HOSTS = dict(zip("abcde", "xyxyx", strict=True))
ONE_AND_THREE = dict(zip("abcde", "xyyyx", strict=True))
WORLDS = [
    *((number, None, piece) for number in range(3) for piece in (USUAL, SMALL)),
    (0, TWO_HOSTS, USUAL),
    (0, ONE_AND_THREE, SMALL),
    (1, TWO_HOSTS, SMALL),
    (2, TWO_HOSTS, SMALL),
]


@pytest.mark.parametrize(("number", "domains", "piece"), WORLDS)
def test_owners_and_mirrors_have_the_bits_of_a_world_of_one(
    number: int, domains: dict[str, str] | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.exchange.traffic.piece_limits", limits_of(piece))
    monkeypatch.setattr("shoal.exchange.traffic.windows", lambda pieces: windows(pieces, 2 * piece))
    alone = World(
        Terms(lanes=LANES, blocks=LAYOUT.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=9), "a"
    ).plan
    right = reduced(SoloGroup(), Traffic(alone, 0, LAYOUT), 0).live.flats
    plan = plans(domains)[number]

    def member(group: Group) -> None:
        traffic = Traffic(plan, group.rank, LAYOUT)
        assert len(traffic.pieces) >= (3 if piece > 1 << 20 else 12)
        for boundaries in range(2):
            flats = reduced(group, traffic, boundaries).live.flats
            for flat, wanted, ranges in zip(
                flats, right, LAYOUT.cut(plan.replays(group.rank, boundaries)), strict=True
            ):
                for start, stop in ranges:
                    assert torch.equal(flat[start:stop], wanted[start:stop])
            replays_all = len(plan.replays(group.rank, boundaries)) == plan.blocks
            handed = HandOut(group, WholeValues(LAYOUT, flats), traffic, traffic.handed(boundaries)).finish()
            assert (handed > 0) != replays_all
            assert all(torch.equal(flat, wanted) for flat, wanted in zip(flats, right, strict=True))

    over_gloo(plan.world_size, member)
