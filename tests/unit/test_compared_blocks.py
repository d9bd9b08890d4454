"""Which blocks are compared: some in each step, all in so many; before a change those that lose a copy by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal.core.sampled_blocks import losing_a_copy, sampled
from shoal_protos.plan import Fill, Member, Plan, Reason, Share
from shoal_protos.runs import Runs


@holds("The copies of every block are compared within")
@given(st.integers(0, 10**9), st.integers(1, 300), st.integers(1, 300))
def test_every_block_is_compared_once_in_so_many_steps_and_no_step_does_more_than_its_share(
    step: int, blocks: int, every: int
) -> None:
    samples = [sampled(step + n, blocks, every) for n in range(every)]
    assert sorted(block for sample in samples for block in sample) == list(range(blocks))
    assert max(map(len, samples)) <= -(-blocks // every)


@rule(
    "Before a planned change begins, copies of blocks are compared of which it leaves fewer than two; where "
    "another copy is made first, they are compared beside that fill, without the new one, which agrees with what "
    "it is made of",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.training.resize", "        self._boundary.before_change(old, prepared.plan)\n", ""),
        Edit(
            "shoal.training.corruption_watch",
            "self._valid & self._world.kept",
            "self._valid",
            by="test_a_flipped_bit_is_told_though_a_drain_takes_away_a_copy_before_its_turn",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "        if filled:\n",
            "        if filled and False:\n",
            by="test_a_flipped_bit_is_told_though_a_joiner_takes_over_one_of_its_two_copies",
        ),
        Edit(
            "shoal.core.sampled_blocks",
            " - in_two(has & going for has in after)",
            "",
            by="test_a_change_compares_what_loses_the_second_copy_and_nothing_else",
        ),
    ],
)
@given(st.lists(st.tuples(st.frozensets(st.integers(0, 9)), st.frozensets(st.integers(0, 9))), min_size=1, max_size=5))
def test_a_change_compares_what_loses_the_second_copy_and_nothing_else(
    keeps: list[tuple[frozenset[int], frozenset[int]]],
) -> None:
    """Whoever keeps nothing afterwards is left out."""
    members = [Member(f"w{place}", f"i{place}", "host:1") for place in range(len(keeps))]
    old = world_of(members, [before for before, _ in keeps])
    new = world_of([m for m, (_, after) in zip(members, keeps, strict=True) if after], [a for _, a in keeps if a])
    had = Counter(block for before, _ in keeps for block in before)
    keep_on = Counter(block for before, after in keeps for block in before & after)
    assert set(losing_a_copy(old, new, 0)) == {block for block in had if had[block] > 1 and keep_on[block] < 2}


@holds("Before a planned change begins, copies")
@pytest.mark.parametrize(("boundaries", "compared"), [(0, [3, 4]), (1, [3, 4]), (2, [])])
def test_a_change_compares_no_blocks_whose_copies_were_compared_when_they_were_filled(
    boundaries: int, compared: list[int]
) -> None:
    a, b, c = (Member(name, name, "host:1") for name in "abc")
    kept = frozenset({3, 4})
    fills = (Fill(1, 2, Runs.of(kept)),)
    old = replace(world_of([a, b, c], [kept, kept, frozenset()]), fills=fills)
    assert list(losing_a_copy(old, world_of([b, c], [kept, kept]), boundaries)) == compared


def world_of(members: list[Member], keeps: list[frozenset[int]]) -> Plan:
    shares = tuple(Share(owned=Runs.of(blocks)) for blocks in keeps)
    return Plan(1, 0, Reason.DRAIN, 1, 10, tuple(members), shares, (), 1, 0, steps=True)
