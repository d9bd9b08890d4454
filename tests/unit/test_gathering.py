"""All-gathers by levels: every member has every row, by few messages, and what is sent is received."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from over_gloo import over_gloo
from shoal.group.build import MOST_DIRECT, exchanges
from shoal.group.group import Group

LIMIT = "shoal.group.build.MOST_DIRECT"


@given(st.integers(2, 600))
@settings(max_examples=examples(40), deadline=None)
def test_after_its_levels_every_member_has_every_row_and_what_is_sent_is_received(size: int) -> None:
    exchanges.cache_clear()
    plans = [exchanges(rank, size) for rank in range(size)]
    has = [{rank} for rank in range(size)]
    for level in range(len(plans[0])):
        sent = {(rank, to, plan[level].rows) for rank, plan in enumerate(plans) for to in plan[level].targets}
        got = {(source, rank, rows) for rank, plan in enumerate(plans) for source, rows in plan[level].sources}
        assert sent == got
        before = [set(rows) for rows in has]
        for source, to, rows in got:
            assert before[source] >= set(range(*rows)), "only what is there is sent"
            has[to] |= set(range(*rows))
    assert all(rows == set(range(size)) for rows in has)


@pytest.mark.parametrize("size", [65, 100, 1000])
def test_a_member_of_a_large_group_sends_about_twice_the_root_of_its_size(size: int) -> None:
    most = max(sum(len(level.targets) for level in exchanges(rank, size)) for rank in range(size))
    assert most <= 2.2 * size**0.5 + 2
    assert len(exchanges(0, MOST_DIRECT)) == 1


def test_a_group_over_gloo_gathers_by_two_levels_what_it_gathers_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMIT, 4)
    exchanges.cache_clear()

    def member(group: Group) -> None:
        assert len(exchanges(group.rank, group.size)) == 2
        for size in (1, 300):
            rows = group.all_gather(torch.full((size,), 10 + group.rank, dtype=torch.uint8))
            assert rows.tolist() == [[10 + rank] * size for rank in range(7)]

    over_gloo(7, member)
    exchanges.cache_clear()
