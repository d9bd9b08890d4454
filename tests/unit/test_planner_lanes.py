"""Lanes: even, in as few aligned subtrees as any division has, a lane in flight with its worker."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule import holds
from shoal.core import tree
from shoal_controller.core.planning.lanes import NONE_IN_FLIGHT, share_lanes
from shoal_protos.runs import Runs


def shares(lanes: int, trainers: int) -> list[tuple[int, ...]]:
    return share_lanes(lanes, [NONE_IN_FLIGHT] * trainers)


def subtrees(lanes: int, held: Collection[int]) -> int:
    return len(tree.subtrees(Runs.of(held), lanes))


def fewest_subtrees(lanes: int, trainers: int) -> int:
    """Tries every even division."""
    least, more = divmod(lanes, trainers)

    @cache
    def fewest(left: frozenset[int], bigger: int, smaller: int) -> int:
        if not left:
            return 0
        first, rest = min(left), sorted(left - {min(left)})
        found = lanes
        for size, count in ((least + 1, bigger), (least, smaller)):
            for others in combinations(rest, size - 1) if count else ():
                share = frozenset((first, *others))
                further = fewest(left - share, bigger - (size > least), smaller - (size == least))
                found = min(found, subtrees(lanes, share) + further)
        return found

    return fewest(frozenset(range(lanes)), more, trainers - more)


@pytest.mark.parametrize("lanes", range(1, 10))
def test_no_even_division_has_fewer_subtrees(lanes: int) -> None:
    for trainers in range(1, min(lanes, 5) + 1):
        given_out = shares(lanes, trainers)
        assert sum(subtrees(lanes, share) for share in given_out) == fewest_subtrees(lanes, trainers)


@pytest.mark.parametrize(("lanes", "trainers"), [(8, 1), (8, 2), (8, 4), (8, 8), (12, 3), (6, 3), (1024, 64), (48, 12)])
def test_where_powers_of_two_divide_evenly_each_trainer_has_one_subtree(lanes: int, trainers: int) -> None:
    assert [subtrees(lanes, share) for share in shares(lanes, trainers)] == [1] * trainers


@given(st.integers(1, 40), st.lists(st.integers(-1, 45), min_size=1, max_size=50))
def test_lanes_are_even_and_a_lane_in_flight_stays(lanes: int, flights: list[int]) -> None:
    given_out = share_lanes(lanes, flights)
    assert sorted(lane for share in given_out for lane in share) == list(range(lanes))
    counts = [len(share) for share in given_out]
    training = min(lanes, len(flights))
    assert sorted(counts, reverse=True)[:training] == sorted(counts, reverse=True)[: len(counts) - counts.count(0)]
    assert max(counts) - min(count for count in counts if count) <= 1
    for trainer, lane in enumerate(flights):
        if 0 <= lane < lanes and lane not in flights[:trainer]:
            assert lane in given_out[trainer]


def test_with_fewer_lanes_than_workers_the_youngest_are_standbys() -> None:
    assert shares(2, 4) == [(0,), (1,), (), ()]
    assert share_lanes(2, [-1, -1, -1, 1]) == [(0,), (), (), (1,)]


def test_of_two_who_claim_a_lane_in_flight_the_older_has_it() -> None:
    older, younger = share_lanes(4, [3, 3])
    assert (3 in older, 3 in younger) == (True, False)


# ---- hosts

crowds = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 45)), min_size=1, max_size=30)


@given(st.integers(1, 40), crowds)
def test_hosts_change_neither_evenness_nor_lanes_in_flight(lanes: int, trainers: list[tuple[int, int]]) -> None:
    hosts, flights = [host for host, _ in trainers], [lane for _, lane in trainers]
    given_out = share_lanes(lanes, flights, hosts)
    assert sorted(lane for share in given_out for lane in share) == list(range(lanes))
    assert sorted(map(len, given_out)) == sorted(map(len, share_lanes(lanes, flights)))
    for trainer, lane in enumerate(flights):
        if 0 <= lane < lanes and lane not in flights[:trainer]:
            assert lane in given_out[trainer]


@holds("Where the lanes of a host's workers")
@given(st.integers(1, 64), st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_the_workers_of_a_host_have_lanes_of_aligned_subtrees_together(lanes: int, hosts: list[int]) -> None:
    """As few as the binary digits of their number say, and each of them alone too."""
    given_out = share_lanes(lanes, [NONE_IN_FLIGHT] * len(hosts), hosts)
    for host in set(hosts):
        held = [lane for share, of in zip(given_out, hosts, strict=True) if of == host for lane in share]
        assert subtrees(lanes, held) <= len(held).bit_count()
    assert all(subtrees(lanes, share) <= len(share).bit_count() for share in given_out)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4, [0, 1, 2, 3, 0, 1, 2, 3]])
def test_where_powers_of_two_divide_evenly_each_host_has_one_subtree(hosts: list[int]) -> None:
    given_out = share_lanes(16, [NONE_IN_FLIGHT] * 8, hosts)
    for host in set(hosts):
        held = [lane for share, of in zip(given_out, hosts, strict=True) if of == host for lane in share]
        assert subtrees(16, held) == 1


def test_after_a_loss_the_host_that_lacks_a_lane_gets_it() -> None:
    given_out = share_lanes(8, [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1, 1])
    assert given_out[:4] == [(0,), (1,), (2,), (3,)]
    assert 7 in {lane for share in given_out[4:] for lane in share}
