"""Lanes by speed: as short a step as whole lanes allow, changed seldom, and never for noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, holds, rule
from shoal.core.tree import shard_tree
from shoal_controller.core.planning.lanes import (
    EVENLY,
    NONE_IN_FLIGHT,
    LaneSharing,
    Look,
    MeasuredTrainer,
    counts_by_speed,
    judge,
    seconds_of_step,
    share_lanes,
    share_rounds,
    without,
)

paces = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)
NAMES = "abcdefghijklmnop"


def even_counts(lanes: int, trainers: int) -> list[int]:
    return [len(one) for one in share_lanes(lanes, [NONE_IN_FLIGHT] * trainers)]


# ---- how many lanes each


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("rounds", [False, True])
@given(st.integers(0, 20), paces)
def test_no_step_is_longer_than_with_even_lanes(rounds: bool, least: int, more: int, taken: list[float]) -> None:
    lanes = len(taken) + more
    counts = counts_by_speed(lanes, taken, rounds, least)
    assert sum(counts) == lanes
    assert min(counts) >= least
    fewest, odd = divmod(lanes, len(taken))
    favoured = set(sorted(range(len(taken)), key=taken.__getitem__)[:odd])  # the best that even lanes can be
    evenly = [fewest + (trainer in favoured) for trainer in range(len(taken))]
    assert seconds_of_step(counts, taken, rounds) <= seconds_of_step(evenly, taken, rounds) * (1 + 1e-12)


@rule(
    "A trainer has no lane only where a single one would make a step a tenth longer; none that is faster has fewer",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.lanes",
            "seconds > (1 - GAIN) * seconds_of_step(_counts",
            "seconds > seconds_of_step(_counts",
        ),
        Edit(
            "shoal_controller.core.planning.lanes",
            "if seconds > (1 - GAIN)",
            "if seconds >= 0 * (1 - GAIN)",
            by="test_who_would_be_the_slowest_with_a_single_lane_has_none",
        ),
    ],
)
@pytest.mark.parametrize("rounds", [False, True])
@given(st.integers(0, 20), paces)
def test_a_trainer_has_no_lane_only_where_a_step_is_a_tenth_shorter_for_it(
    rounds: bool, more: int, taken: list[float]
) -> None:
    lanes = len(taken) + more
    counts, with_one = counts_by_speed(lanes, taken, rounds), counts_by_speed(lanes, taken, rounds, least=1)
    if min(counts) == 0:
        shorter = seconds_of_step(counts, taken, rounds)
        assert shorter <= 0.9 * seconds_of_step(with_one, taken, rounds)
        assert max(p for p, count in zip(taken, counts, strict=True) if count) <= min(
            p for p, count in zip(taken, counts, strict=True) if not count
        )
    else:
        assert counts == with_one


@pytest.mark.parametrize("least", [0, 1])
@given(st.integers(0, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_no_whole_sharing_of_lanes_has_a_shorter_step(least: int, more: int, taken: list[int]) -> None:
    lanes = len(taken) + more
    choices = (one for one in product(range(least, lanes + 1), repeat=len(taken)) if sum(one) == lanes)
    best = min(seconds_of_step(one, taken, rounds=False) for one in choices)
    found = seconds_of_step(counts_by_speed(lanes, taken, rounds=False, least=least), taken, rounds=False)
    assert best <= found <= (best / 0.9 if least == 0 else best) * (1 + 1e-12)


def test_a_slow_trainer_has_no_lane_in_the_last_rounds_where_there_are_three_or_more() -> None:
    assert counts_by_speed(12, [1, 1, 2], rounds=False) == [5, 5, 2]
    assert counts_by_speed(12, [1, 1, 2], rounds=True, least=1) == [5, 5, 2]
    assert seconds_of_step([4, 4, 4], [1, 1, 2], rounds=True) == 8
    assert seconds_of_step([5, 5, 2], [1, 1, 2], rounds=True) == 7
    assert counts_by_speed(6, [1, 1, 2], rounds=True, least=1) == [2, 2, 2], "of two rounds nothing is gained"


@holds("A trainer has no lane only where")
def test_who_would_be_the_slowest_with_a_single_lane_has_none() -> None:
    assert counts_by_speed(12, [1, 1, 10], rounds=False) == [6, 6, 0]
    assert counts_by_speed(12, [1, 1, 6], rounds=False) == [6, 5, 1]
    assert counts_by_speed(12, [1, 1, 2], rounds=True) == [6, 6, 0]
    assert counts_by_speed(12, [1, 1, 10], rounds=True, least=1) == [6, 5, 1]
    assert counts_by_speed(12, [1, 1, 1.5], rounds=True) == [4, 4, 4], "as long with it as without"
    assert counts_by_speed(12, [9, 1, 20, 1], rounds=False) == [0, 6, 0, 6]


# ---- which lanes

crews = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 25), st.floats(0.1, 3)), min_size=1, max_size=12)


def check_counts(shares: Sequence[Sequence[int]], counts: Sequence[int], flights: Sequence[int]) -> None:
    """As by speed alone, unless somebody without lanes has one in flight, which it keeps."""
    idle = [trainer for trainer, count in enumerate(counts) if not count]
    flying = [trainer for trainer in idle if flights[trainer] != NONE_IN_FLIGHT]
    assert all(len(shares[trainer]) == 0 for trainer in idle if trainer not in flying)
    if not flying:
        assert [len(share) for share in shares] == counts


@given(st.integers(0, 12), crews)
def test_each_trainer_gets_its_number_of_lanes_and_keeps_the_one_in_flight(
    more: int, trainers: list[tuple[int, int, float]]
) -> None:
    lanes = len(trainers) + more
    hosts, flights, taken = ([one[place] for one in trainers] for place in range(3))
    shares = share_lanes(lanes, flights, hosts, taken)
    assert sorted(lane for share in shares for lane in share) == list(range(lanes))
    check_counts(shares, counts_by_speed(lanes, taken, rounds=False), flights)
    for trainer, lane in enumerate(flights):
        if 0 <= lane < lanes and lane not in flights[:trainer]:
            assert lane in shares[trainer]


@given(st.integers(0, 12), crews)
def test_rounds_by_speed_are_consecutive_and_owners_can_add_them_up(
    more: int, trainers: list[tuple[int, int, float]]
) -> None:
    lanes = len(trainers) + more
    hosts, flights, taken = ([one[place] for one in trainers] for place in range(3))
    shares = share_rounds(lanes, flights, hosts, taken)
    check_counts(shares, counts_by_speed(lanes, taken, rounds=True), flights)
    step = [tuple(share[at] if at < len(share) else -1 for share in shares) for at in range(max(map(len, shares)))]
    assert [lane for one in step for lane in sorted(one) if lane >= 0] == list(range(lanes))
    assert shard_tree(step, lanes).rounds[-1].waiting == ()


# ---- when


class Job:
    """A job whose steps take as long as its lanes, and `judge` beside it."""

    def __init__(self, lanes: int, trainers: int, rounds: bool = False, seed: int = 0) -> None:
        self.lanes, self.rounds, self.chance = lanes, rounds, Random(seed)
        self.names = NAMES[:trainers]
        self.counts = even_counts(lanes, trainers)
        self.taken = [[] for _ in self.names]  # type: list[list[float]]
        self.sharing, self.since = EVENLY, None  # type: tuple[LaneSharing, Since | None]
        self.step, self.now, self.changes = 0, 0.0, list[int]()

    def look(self) -> Look:
        seconds = [median(taken[-9:]) for taken in self.taken]
        trainers = [MeasuredTrainer((w,), c, s) for w, c, s in zip(self.names, self.counts, seconds, strict=True)]
        return Look(self.now, self.step, self.lanes, self.rounds, trainers)

    def make_step(self, true: Sequence[float], noise: float = 0.0) -> float:
        """One step, in which a lane takes that long; returns how long the step took."""
        seconds = 0.0
        for taken, pace, count in zip(self.taken, true, self.counts, strict=True):
            lanes = [pace * self.chance.uniform(1 - noise, 1 + noise) for _ in range(count)]
            taken.extend(lanes)
            seconds = max(seconds, sum(lanes))
        self.step, self.now = self.step + 1, self.now + seconds
        if self.step >= 3:
            self._judge()
        return seconds

    def _judge(self) -> None:
        look = self.look()
        before, (self.sharing, self.since) = self.sharing, judge(self.sharing, self.since, look)
        if self.sharing is before:
            return
        self.changes.append(self.step)
        kept = [self.sharing.seconds[worker] for worker in self.names] if self.sharing.seconds else ()
        share = share_rounds if self.rounds else share_lanes
        flights = [NONE_IN_FLIGHT] * len(self.names)
        self.counts = [len(one) for one in share(self.lanes, flights, (), kept)]
        assert look.seconds_with(self.counts) <= look.longest_evenly * (1 + 1e-12)

    def run(self, steps: int, true: Sequence[float], noise: float = 0.0) -> Iterator[float]:
        return (self.make_step(true, noise) for _ in range(steps))


@rule(
    "Lanes are shared by speed only where a step is a tenth shorter by it for seconds and steps on end",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.lanes",
            "is_long = look.now - since.time >= PATIENCE_SECONDS and look.step - since.step >= PATIENCE_STEPS",
            "is_long = True",
            by="test_what_lasts_for_a_moment_changes_nothing",
        ),
        Edit(
            "shoal_controller.core.planning.lanes",
            "min((1 - GAIN) * seconds_now, seconds_now",
            "min(seconds_now, seconds_now * 1.0001",
            by="test_a_step_that_is_a_bit_shorter_is_worth_no_change",
        ),
    ],
)
@pytest.mark.parametrize("rounds", [False, True])
@settings(max_examples=examples(30))
@given(seed=st.integers(0, 1 << 30), trainers=st.integers(1, 8), more=st.integers(0, 40))
def test_an_hour_of_noise_changes_nothing(rounds: bool, seed: int, trainers: int, more: int) -> None:
    job = Job(trainers + more, trainers, rounds, seed)
    steps = int(3600 / job.make_step([1.0] * trainers))
    assert sum(job.run(steps, [1.0] * trainers, noise=0.05)) > 0
    assert job.changes == []


@holds("Lanes are shared by speed only")
def test_a_step_that_is_a_bit_shorter_is_worth_no_change() -> None:
    job = Job(4, 3)
    list(job.run(60, [1.05, 1.0, 1.0]))
    assert (job.counts, job.changes) == ([2, 1, 1], [])


@holds("Lanes are shared by speed only")
def test_what_lasts_for_a_moment_changes_nothing() -> None:
    job = Job(12, 3)
    list(job.run(20, [0.1] * 3))
    for _ in range(5):
        list(job.run(3, [0.1, 0.1, 0.2]))
        list(job.run(20, [0.1] * 3))
    assert job.changes == []


@pytest.mark.parametrize(("lanes", "trainers"), [(12, 3), (8, 4), (64, 8), (16, 2)])
def test_a_worker_at_half_its_speed_costs_a_tenth_at_most_ten_seconds_later(lanes: int, trainers: int) -> None:
    job = Job(lanes, trainers)
    list(job.run(30, [0.1] * trainers, noise=0.05))
    slow, began = [0.2, *[0.1] * (trainers - 1)], job.now
    while job.now < began + 10:
        job.make_step(slow, noise=0.05)
    best = seconds_of_step(counts_by_speed(lanes, slow, rounds=False), slow, rounds=False)
    assert median(job.run(30, slow)) <= 1.1 * best
    assert len(job.changes) == 1
    list(job.run(200, [0.1] * trainers, noise=0.05))
    assert job.counts == even_counts(lanes, trainers)
    assert job.sharing.seconds == {}, "lanes of one speed are shared evenly"


@rule(
    "Lanes are shared anew at most once in twenty steps, and more seldom each time that this was undone",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.lanes",
            "look.step - changed_at < sharing.pause_steps",
            "look.step - changed_at < 1",
        ),
        Edit(
            "shoal_controller.core.planning.lanes",
            "min(LONGEST_PAUSE, 2 * sharing.pause_steps) if is_undone and is_soon",
            "LEAST_PAUSE if is_undone and is_soon",
            by="test_a_clock_that_flaps_changes_lanes_more_and_more_seldom",
        ),
    ],
)
@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 1 << 30), trainers=st.integers(2, 5), more=st.integers(0, 20), rounds=st.booleans(),
    paces_over_time=st.lists(st.tuples(st.integers(1, 40), st.lists(st.floats(0.2, 4), min_size=5, max_size=5))),
)  # fmt: skip
def test_no_more_than_one_change_in_twenty_steps(
    seed: int, trainers: int, more: int, rounds: bool, paces_over_time: list[tuple[int, list[float]]]
) -> None:
    job = Job(trainers + more, trainers, rounds, seed)
    for steps, true in paces_over_time:
        list(job.run(steps, true[:trainers], noise=0.2))
    assert all(later - earlier >= 20 for earlier, later in zip(job.changes, job.changes[1:], strict=False))


@holds("Lanes are shared anew at most once")
def test_a_clock_that_flaps_changes_lanes_more_and_more_seldom() -> None:
    job = Job(12, 3)
    for _ in range(100):
        list(job.run(30, [1.0, 1.0, 2.0]))
        list(job.run(30, [1.0, 1.0, 1.0]))
    gaps = [later - earlier for earlier, later in zip(job.changes, job.changes[1:], strict=False)]
    assert max(gaps) > 800
    assert len(job.changes) < 15
    list(job.run(2500, [1.0, 1.0, 1.0]))
    list(job.run(40, [1.0, 1.0, 2.0]))
    assert job.sharing.pause_steps == 20, "what comes long after is no flapping"


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("trainers", [3, 16])
def test_who_has_no_lane_gets_some_when_it_is_well_though_among_many_little_is_gained(
    rounds: bool, trainers: int
) -> None:
    """What it says a lane takes is a lane that it trains for nothing."""
    job = Job(10 * trainers, trainers, rounds)
    slow, well = [*[0.1] * (trainers - 1), 3.0], [0.1] * trainers
    list(job.run(40, slow, noise=0.05))
    assert job.counts[-1] == 0
    list(job.run(100, slow, noise=0.05))
    assert len(job.changes) == 1
    job.taken[-1] = [0.1]
    list(job.run(60, well, noise=0.05))
    assert job.counts == [10] * trainers


def test_the_speed_of_somebody_who_is_gone_is_forgotten() -> None:
    kept = LaneSharing({"a": 1.0, "b": 1.02, "c": 2.0}, usual=1.02, changed_at=30)
    assert without(kept, frozenset("abc")) is kept
    assert without(kept, frozenset("ab")) == LaneSharing(changed_at=30)
    assert without(kept, frozenset("bc")).seconds == {"b": 1.02, "c": 2.0}


def test_after_a_return_to_a_checkpoint_it_goes_on() -> None:
    job = Job(12, 3)
    list(job.run(100, [1.0, 1.0, 2.0]))
    assert job.changes == [8]
    job.step = 3
    list(job.run(60, [1.0, 1.0, 1.0]))
    assert len(job.changes) == 2
