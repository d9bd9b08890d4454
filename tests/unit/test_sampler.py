"""The data order: every epoch covered exactly once whoever trains the lanes, and the same for ever."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from shoal.core.sampler import MANY, Sampler, all_shuffled, shuffled
from shoal_protos.errors import UserError

sizes = st.integers(1, 5)


def world(lanes: int, chance: random.Random) -> list[list[int]]:
    """The lanes dealt out to a random number of workers."""
    members: list[list[int]] = [[] for _ in range(chance.randint(1, lanes))]
    for lane in range(lanes):
        chance.choice(members).append(lane)
    return members


@settings(max_examples=examples(60), deadline=None)
@given(lanes=sizes, micro=sizes, per_lane=st.integers(1, 3), extra=st.integers(0, 70), seed=st.integers(0, 2**64 - 1))
def test_every_epoch_is_covered_exactly_once_by_any_sequence_of_worlds(
    lanes: int, micro: int, per_lane: int, extra: int, seed: int
) -> None:
    sampler = Sampler(lanes * micro * per_lane + extra, lanes, micro, per_lane, seed)
    chance = random.Random(seed)
    for epoch in range(2):
        read: list[int] = []
        for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
            for member in world(lanes, chance):
                for lane in member:
                    for batch in range(per_lane):
                        read += sampler.indices(step, lane, batch)
        assert len(read) == len(set(read)) == sampler.steps_per_epoch * sampler.samples_per_step
        assert set(read) <= set(range(sampler.samples))
        assert sampler.samples - len(read) < sampler.samples_per_step


@settings(max_examples=examples(100), deadline=None)
@given(count=st.integers(1, 400), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation_of_the_dataset(count: int, seed: int, epoch: int) -> None:
    sampler = Sampler(count, 1, 1, 1, seed)
    order = [sampler.indices(epoch * count + step, 0, 0)[0] for step in range(count)]
    assert sorted(order) == list(range(count))


@settings(max_examples=examples(200), deadline=None)
@given(
    count=st.integers(1, 10**15),
    keys=st.tuples(*[st.integers(0, 2**64 - 1)] * 8),
    chance=st.randoms(use_true_random=False),
)
def test_many_places_at_once_are_those_of_each_alone(count: int, keys: tuple[int, ...], chance: random.Random) -> None:
    places = [chance.randrange(count) for _ in range(MANY)]
    together = all_shuffled(numpy.array(places, dtype=numpy.uint64), count, keys)
    assert together.tolist() == [shuffled(place, count, keys) for place in places]


def test_a_large_micro_batch_reads_what_small_ones_would() -> None:
    large, small = Sampler(10_000, 2, 4 * MANY, 1, 5), Sampler(10_000, 2, MANY // 2, 8, 5)
    assert large.indices(3, 1, 0) == [number for micro in range(8) for number in small.indices(3, 1, micro)]


def test_the_order_never_changes() -> None:
    """A change of these numbers changes every user's run."""
    assert Sampler(1000, 8, 2, 1, 0).indices(0, 0, 0) == [710, 557]
    assert Sampler(10, 1, 10, 1, 7).indices(0, 0, 0) == [9, 7, 6, 8, 4, 2, 5, 3, 1, 0]
    assert Sampler(10, 1, 10, 1, 7).indices(1, 0, 0) == [7, 1, 2, 3, 4, 0, 6, 5, 8, 9]
    assert Sampler(10**12, 4, 1, 2, 2**64 - 1).indices(10**10, 3, 1) == [199410656109]


def test_epochs_and_seeds_shuffle_anew() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return Sampler(1000, 1, 1000, 1, seed).indices(epoch, 0, 0)

    orders = [first(0, 0), first(0, 1), first(1, 0), first(1, 1), list(range(1000))]
    for at, order in enumerate(orders):
        for other in orders[at + 1 :]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 10


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_every_sample_comes_equally_often_at_every_place(count: int) -> None:
    """Chi-square of the table sample × place over 3,000 epochs, far below what one order in ten thousand exceeds."""
    epochs = 3000
    table = Counter(
        (place, sample)
        for epoch in range(epochs)
        for place, sample in enumerate(Sampler(count, 1, count, 1, 11).indices(epoch, 0, 0))
    )
    expected = epochs / count
    chi_square = sum((table[place, one] - expected) ** 2 / expected for place in range(count) for one in range(count))
    degrees = (count - 1) ** 2
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 12


def test_neighbours_in_the_dataset_do_not_stay_neighbours() -> None:
    count = 10_000
    order = Sampler(count, 1, count, 1, 3).indices(0, 0, 0)
    near = sum(abs(a - b) < 10 for a, b in pairwise(order))
    assert 5 < near < 40, "about 19 of 9,999 pairs are near in a random order"


def test_a_dataset_smaller_than_one_step_is_refused_with_the_figures() -> None:
    with pytest.raises(UserError) as refusal:
        Sampler(63, 8, 4, 2, 0)
    assert str(refusal.value) == (
        "the dataset has 63 samples, one step takes 64 (micro-batch 4 × 8 lanes × 2 micro-batches per lane). "
        "Use fewer lanes, smaller micro-batches or more data."
    )
    assert Sampler(64, 8, 4, 2, 0).steps_per_epoch == 1


def test_the_job_ends_at_whichever_comes_first() -> None:
    sampler = Sampler(100, 4, 2, 1, 0)
    assert sampler.steps_per_epoch == 12
    assert sampler.last_step(5, None) == 5
    assert sampler.last_step(None, 3) == 36
    assert sampler.last_step(50, 3) == 36
    assert sampler.last_step(30, 3) == 30
    assert sampler.last_step(None, None) == 0, "a script says it by its end"
