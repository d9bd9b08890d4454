"""Adding up on shards, round by round: the bits of the plain tree, whoever trains which lane, in whatever rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rule import Edit, holds, rule
from shoal.core.tree import NO_LANE, Round, ShardTree, first_rounds, rounds, shard_tree
from shoal_protos.plan import Plan, Recovery, Share, check_plan
from worlds import recovery

Shard = NDArray[np.float32]


def plain_tree(values: Sequence[Shard]) -> Shard:
    """The dumb twin: level by level."""
    level = list(values)
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def add_up(tree: ShardTree, step: Sequence[Round], values: Sequence[Shard]) -> Shard:
    """What an owner does, with whatever lies in its memory before."""
    copies = [np.full_like(values[0], np.nan) for _ in range(tree.copies)]
    parts: list[Shard | None] = []
    for one, lanes_by_rank in zip(tree.rounds, step, strict=True):
        parts = [values[lane].copy() if lane != NO_LANE else None for lane in lanes_by_rank] + copies
        for into, other in one.additions:
            mine, theirs = parts[into], parts[other]
            assert mine is not None and theirs is not None
            mine += theirs
        for part, copy in one.pushes:
            parts[copy][:] = parts[part]  # type: ignore[index]
    root = parts[tree.root]
    assert root is not None
    return root / np.float32(len(values))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any that `check_plan` lets through: lanes as uneven as one likes."""
    size, lanes = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    trainers = draw(st.lists(st.integers(0, size - 1), min_size=lanes, max_size=lanes))
    base = recovery(1, "abcdef"[:size])
    shares = tuple(
        Share(tuple(lane for lane, trainer in enumerate(trainers) if trainer == rank), share.owned)
        for rank, share in enumerate(base.shares)
    )
    begun = tuple(draw(st.sampled_from((-1, *share.lanes))) for share in shares)
    assert base.recovery is not None
    plan = replace(base, lanes=lanes, shares=shares, recovery=replace(base.recovery, lanes_in_flight=begun))
    check_plan(plan)
    return plan


@rule(
    "On a shard lanes are added up in the order of the one tree, round by round, whoever trains which; all know "
    "which lane comes from whom: the plan says who begins its first step with the lane that it had in flight",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.core.tree", "key=lambda lane: lane != first", "key=lambda lane: lane"),
        Edit(
            "shoal.core.tree",
            "found, left = fold_up(list(spans.values()), lanes, range(len(waiting)))",
            "found, left = fold_up([(n, n + 1) for n in range(len(spans))], len(spans))",
        ),
        Edit("shoal_controller.core.planning.planner", "    if not terms.rounds:\n", "    if terms.rounds:\n"),
        Edit("shoal_protos.plan", "if lane != -1 and lane not in share.lanes:", "if lane < -1:"),
    ],
)
@given(plans(), st.integers(0, 2**32 - 1))
def test_any_rounds_give_the_bits_of_the_plain_tree(plan: Plan, seed: int) -> None:
    chance = np.random.default_rng(seed)
    values = list((chance.standard_normal((plan.lanes, 3)) * 10.0 ** chance.integers(-6, 6)).astype(np.float32))
    expected = plain_tree(values) / np.float32(plan.lanes)
    for step in (rounds(plan), first_rounds(plan)):
        assert add_up(shard_tree(step, plan.lanes), step, values).tobytes() == expected.tobytes()


def test_torch_adds_and_divides_to_the_same_bits() -> None:
    plan = replace(recovery(1, "abc"), lanes=7, shares=tuple(Share(lanes) for lanes in ((0, 3, 6), (1, 4), (2, 5))))
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    tree, step = shard_tree(rounds(plan), 7), rounds(plan)
    level = list(values.clone())
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[len(level) - len(level) % 2 :]
    ours = torch.from_numpy(add_up(tree, step, [value.numpy() for value in values]))
    assert torch.equal(ours, level[0] / 7)


@given(plans())
def test_every_lane_is_trained_once_and_by_who_has_it(plan: Plan) -> None:
    for step in (rounds(plan), first_rounds(plan)):
        found = [(lane, rank) for one in step for rank, lane in enumerate(one) if lane != NO_LANE]
        assert sorted(found) == sorted((lane, rank) for rank, share in enumerate(plan.shares) for lane in share.lanes)
        assert [len(one) for one in step] == [plan.world_size] * len(step)


@holds("On a shard lanes are added")
@given(plans())
def test_who_has_begun_a_lane_begins_with_it_and_goes_on_in_order(plan: Plan) -> None:
    assert plan.recovery is not None
    for rank, begun in enumerate(plan.recovery.lanes_in_flight):
        mine = [one[rank] for one in first_rounds(plan) if one[rank] != NO_LANE]
        rest = mine[1:] if begun != NO_LANE else mine
        assert rest == sorted(rest)
        assert begun == NO_LANE or mine[0] == begun


def test_where_no_steps_run_there_are_no_rounds() -> None:
    begun = Recovery(0, b"", (True,), (recovery(1, "a").recovery.stale[0],), lanes_in_flight=(0,))  # type: ignore[union-attr]
    plan = replace(recovery(1, "a"), steps=False, recovery=begun)
    assert (rounds(plan), first_rounds(plan)) == ([], [])


def test_with_one_lane_each_nothing_waits() -> None:
    plan = recovery(1, "abcde")
    tree = shard_tree(rounds(plan), plan.lanes)
    assert (len(tree.rounds), tree.copies, tree.rounds[0].pushes, tree.rounds[0].waiting) == (1, 0, (), ())
