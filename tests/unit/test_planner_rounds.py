"""Rounds of consecutive lanes: few sums wait on a shard, no rounds at all leave much fewer; flights stay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import World
from rule import Edit, holds, rule
from shoal.core.tree import first_rounds, rounds, shard_tree, subtrees
from shoal_controller.core.planning.lanes import NONE_IN_FLIGHT, share_lanes, share_rounds
from shoal_controller.core.planning.planner import Terms
from shoal_protos.runs import Runs

Shares = Sequence[tuple[int, ...]]


def none_in_flight(trainers: int) -> list[int]:
    return [NONE_IN_FLIGHT] * trainers


def waiting(shares: Shares, lanes: int) -> list[int]:
    """After each round but the last, the subtrees that wait: counted anew from all lanes that are done."""
    done: set[int] = set()
    counts = []
    for lanes_of_round in list(zip_longest(*shares))[:-1]:
        done |= {lane for lane in lanes_of_round if lane is not None}
        counts.append(len(subtrees(Runs.of(done), lanes)))
    return counts


@rule(
    "Lanes of a round are consecutive where gradients are sharded, and a lane in flight stays with its worker",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.cells",
            "share = share_rounds if rounds else share_lanes",
            "share = share_lanes",
            by="test_a_plan_for_shards_has_rounds_of_consecutive_lanes",
        ),
        Edit(
            "shoal_controller.core.planning.lanes",
            "for trainer in here if start <= flights[trainer] < stop}",
            "for trainer in here if start > flights[trainer] > stop}",
        ),
    ],
)
@pytest.mark.parametrize(
    ("lanes", "workers", "by_subtrees", "by_rounds"),
    [
        (8, 4, 4, 1),
        (8, 3, 3, 2),
        (16, 4, 8, 2),
        (64, 8, 24, 3),
        (64, 7, 21, 6),
        (1024, 64, 256, 4),
        (1024, 100, 300, 6),
    ],
)
def test_so_many_copies_of_a_shard_wait_at_most(lanes: int, workers: int, by_subtrees: int, by_rounds: int) -> None:
    assert max(waiting(share_lanes(lanes, none_in_flight(workers)), lanes)) == by_subtrees
    assert max(waiting(share_rounds(lanes, none_in_flight(workers)), lanes)) == by_rounds


@pytest.mark.parametrize(("lanes", "workers"), [(8, 3), (64, 7), (1024, 100)])
def test_an_owner_keeps_as_many_copies_as_wait(lanes: int, workers: int) -> None:
    shares = share_rounds(lanes, none_in_flight(workers))
    step = list(zip_longest(*shares, fillvalue=-1))
    tree = shard_tree(step, lanes)
    assert [len(one.waiting) for one in tree.rounds] == [*waiting(shares, lanes), 0]
    assert tree.copies == max(waiting(shares, lanes))


def fewest_waiting(lanes: int, trainers: int) -> list[int]:
    """The dumb twin: by round, the least that any lanes of the rounds so far leave waiting."""
    ends = range(trainers, lanes, trainers)
    return [min(len(subtrees(Runs.of(done), lanes)) for done in combinations(range(lanes), end)) for end in ends]


@pytest.mark.parametrize("lanes", range(1, 13))
def test_no_rounds_leave_fewer_where_the_number_of_lanes_has_two_binary_digits_else_hardly_fewer(lanes: int) -> None:
    for trainers in range(1, lanes + 1):
        counts = waiting(share_rounds(lanes, none_in_flight(trainers)), lanes)
        fewest = fewest_waiting(lanes, trainers)
        assert all(0 <= a - b <= max(0, lanes.bit_count() - 2) for a, b in zip(counts, fewest, strict=True))


@cache
def best_step(lanes: int, trainers: int, done: frozenset[int]) -> int:
    """Another one: by every choice of every round, the most that wait at any time."""
    left = sorted(set(range(lanes)) - done)
    if len(left) <= trainers:
        return 0
    steps = (done.union(chosen) for chosen in combinations(left, trainers))
    return min(max(len(subtrees(Runs.of(after), lanes)), best_step(lanes, trainers, after)) for after in steps)


@pytest.mark.parametrize(("lanes", "trainers"), [(6, 2), (7, 2), (7, 3), (8, 2), (8, 3), (9, 4)])
def test_no_order_of_any_rounds_needs_fewer_copies(lanes: int, trainers: int) -> None:
    shares = share_rounds(lanes, none_in_flight(trainers))
    assert max(waiting(shares, lanes)) == best_step(lanes, trainers, frozenset())


crowds = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 45)), min_size=1, max_size=50)


@holds("Lanes of a round are consecutive")
@given(st.integers(1, 40), crowds)
def test_rounds_are_consecutive_and_a_lane_in_flight_stays(lanes: int, trainers: list[tuple[int, int]]) -> None:
    hosts, flights = [host for host, _ in trainers], [lane for _, lane in trainers]
    shares = share_rounds(lanes, flights, hosts)
    training = min(lanes, len(flights))
    assert sorted(map(len, shares)) == sorted(map(len, share_lanes(lanes, flights, hosts)))
    for number, lanes_of_round in enumerate(zip_longest(*shares)):
        found = sorted(lane for lane in lanes_of_round if lane is not None)
        assert found == list(range(number * training, min((number + 1) * training, lanes)))
    for trainer, lane in enumerate(flights):
        if 0 <= lane < lanes and lane not in flights[:trainer]:
            assert lane in shares[trainer]


@given(st.integers(1, 40), st.lists(st.integers(-1, 45), min_size=1, max_size=50))
def test_those_who_train_are_the_same_with_either_aim(lanes: int, flights: list[int]) -> None:
    assert [bool(share) for share in share_rounds(lanes, flights)] == [bool(s) for s in share_lanes(lanes, flights)]


def test_the_workers_of_a_host_have_neighbours_of_every_round() -> None:
    shares = share_rounds(16, none_in_flight(4), [0, 1, 0, 1])
    assert shares == [(0, 4, 8, 12), (2, 6, 10, 14), (1, 5, 9, 13), (3, 7, 11, 15)]


# ---- plans


def rounds_terms(lanes: int) -> Terms:
    return Terms(lanes, blocks=24, mirrors=1, mirror_partners=4, fill_blocks_per_step=4, rounds=True)


@holds("Lanes of a round are consecutive")
def test_a_plan_for_shards_has_rounds_of_consecutive_lanes() -> None:
    world = World(rounds_terms(8), "abc")
    assert rounds(world.plan) == [(0, 1, 2), (3, 4, 5), (6, 7, -1)]
    world.join("d")
    assert rounds(world.plan) == first_rounds(world.plan) == [(0, 1, 2, 3), (4, 5, 6, 7)]


@holds("On a shard lanes are added")
def test_after_a_loss_all_begin_with_the_lane_that_they_had_in_flight() -> None:
    world = World(rounds_terms(8), "abcd")
    plan = world.kill("b", lanes={"a": 4, "d": 7})
    assert plan.recovery is not None
    assert plan.recovery.lanes_in_flight == (4, -1, 7)
    assert first_rounds(plan)[0] == (4, 2, 7)
    assert sorted(lane for of_round in first_rounds(plan) for lane in of_round if lane >= 0) == list(range(8))
    assert rounds(plan) == [(0, 2, 1), (4, 5, 3), (6, -1, 7)]


def test_a_plan_for_whole_gradients_names_no_lane_in_flight() -> None:
    world = World(Terms(8, 24, 1, 4, 4), "abcd")
    plan = world.kill("b", lanes={"a": 4, "d": 7})
    assert plan.recovery is not None
    assert (plan.recovery.lanes_in_flight, 4 in plan.shares[0].lanes) == ((), True)


@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 30), st.data())
def test_in_the_first_step_after_a_loss_few_more_copies_wait(
    workers: int, more: int, lost: int, data: st.DataObject
) -> None:
    """All were in one round, or had just ended it, when one of them died."""
    lanes = workers * (1 << more)
    world = World(rounds_terms(lanes), "abcdefghi"[:workers])
    at = data.draw(st.integers(0, len(rounds(world.plan)) - 1))
    begun = dict(zip("abcdefghi"[:workers], rounds(world.plan)[at], strict=True))
    flights = {worker: lane for worker, lane in begun.items() if lane >= 0 and data.draw(st.booleans())}
    plan = world.kill("abcdefghi"[lost % workers], lanes=flights)
    usual, first = shard_tree(rounds(plan), lanes), shard_tree(first_rounds(plan), lanes)
    assert first.copies <= usual.copies + 2 * workers.bit_length()
