"""How large pieces are: by the members, and by whether anything waits for links."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning import World
from rule import holds
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.core.tree import HostSums
from shoal.exchange.pieces import PieceLimits, cut_into_pieces, piece_limits, windows
from shoal.exchange.traffic import Traffic
from shoal_controller.core.planning.planner import Terms
from shoal_protos.runs import Runs

BLOCK = 4_096


def test_a_piece_grows_with_the_world_so_that_messages_are_worth_sending() -> None:
    assert piece_limits(2, False, False) == piece_limits(16, False, False) == (2 << 20, 8 << 20, 0)
    assert piece_limits(64, False, True) == (8 << 20, 32 << 20, 0)
    assert piece_limits(2, True, False) == piece_limits(64, True, False) == (32 << 20, 32 << 20, 0)
    assert piece_limits(128, True, False) == (64 << 20, 64 << 20, 0)
    assert piece_limits(2, True, True) == (2 << 20, 8 << 20, 2)


@pytest.mark.parametrize(
    ("hosts", "by_rounds", "count"),
    [("xxx", False, 1), ("xxy", False, 8), ("xyz", False, 8), ("xxx", True, 4), ("xxy", True, 8)],
)
def test_pieces_are_large_where_no_link_waits_for_them_above_all_where_gradients_are_whole(
    hosts: str, by_rounds: bool, count: int
) -> None:
    layout = lay_out([Trainable(f"p{n}", (256, BLOCK), torch.float32, 0, n) for n in range(8)])
    terms = Terms(lanes=3, blocks=layout.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=7, rounds=by_rounds)
    plan = World(terms, "abc").plan
    members = tuple(replace(one, address=f"{host}:1") for one, host in zip(plan.members, hosts, strict=True))
    plan = replace(plan, members=members)
    found = {Traffic(plan, rank, layout, by_rounds=by_rounds).pieces for rank in range(3)}
    assert [len(pieces) for pieces in found] == [count]


@holds("An exchange goes by pieces")
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(0, 60))
def test_messages_are_posted_for_so_many_bytes_beyond_the_piece_that_is_waited_for(
    sizes: list[int], in_flight: int
) -> None:
    layout = lay_out([Trainable("p", (1,), torch.float32, 0)])
    (one,) = cut_into_pieces(
        layout, [layout.cut(Runs([(0, 1)]))], HostSums([[(0, 1)]], (), range(1), 1), PieceLimits(BLOCK, BLOCK)
    )
    pieces = [type(one)(0, size, ()) for size in sizes]
    until = windows(pieces, in_flight)
    assert list(until) == sorted(until)
    for index, stop in enumerate(until):
        assert stop >= min(index + 2, len(sizes)), "the next piece always is on its way"
        assert sum(sizes[index + 1 : stop]) <= in_flight or stop == index + 2
        assert stop == len(sizes) or sum(sizes[index + 1 : stop + 1]) > in_flight
