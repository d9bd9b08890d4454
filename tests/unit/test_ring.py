"""Series are bounded rings: what they keep, in which order, in how many bytes; against lists as a dumb twin."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_driver import training
from shoal_controller.core.machine.view import Sample
from shoal_controller.observe import job_series
from shoal_controller.observe.job_series import (
    DAY_EVERY,
    HIGHEST,
    MINUTES,
    MOST_BYTES,
    POINT_BYTES,
    TIME,
    TYPECODES,
    JobSeries,
    Minute,
    Ring,
    Span,
    short,
)

CALM = Sample(step=1, loss=2.5, step_seconds=0.25, samples=8, goodput_ratio=0.5, active=2, wanted=3)


def point(time: float, **given: float | None) -> dict[str, float | None]:
    return {**dict.fromkeys(TYPECODES, 0), TIME: time, **given}


@given(st.integers(1, 7), st.lists(st.floats(0, 100), max_size=30))
def test_a_ring_keeps_the_newest_points_in_order(capacity: int, times: list[float]) -> None:
    ring, twin = Ring(capacity), []
    for step, time in enumerate(times):
        ring.put(point(time, step=step))
        if not twin or time != twin[-1][0]:
            twin = [*(one for one in twin if one[0] < time), (time, step)][-capacity:]
    columns = ring.after(-1.0)
    assert list(zip(columns[TIME], columns["step"], strict=True)) == twin
    assert ring.newest == (twin[-1][0] if twin else None)
    middle = twin[len(twin) // 2][0] if twin else 0.0
    assert ring.after(middle)[TIME] == [time for time, _ in twin if time > middle]


@pytest.mark.parametrize("loss", [None, nan, float("inf"), -float("inf")])
def test_what_is_no_number_is_shown_as_nothing(loss: float | None) -> None:
    ring = Ring(3)
    ring.put(point(1.0, loss=loss, step_seconds=loss))
    assert ring.after(0.0)["loss"] == ring.after(0.0)["step_seconds"] == [None]


def test_a_number_that_is_too_large_is_shown_as_the_largest() -> None:
    ring = Ring(3)
    ring.put(point(1.0, step=1 << 70, active=1 << 20, unmirrored_blocks=-1))
    columns = ring.after(0.0)
    assert [columns[name] for name in ("step", "active", "unmirrored_blocks")] == [[HIGHEST["q"]], [HIGHEST["H"]], [0]]


def test_a_loss_is_shown_as_the_job_has_it_and_short_numbers_without_noise() -> None:
    ring = Ring(3)
    ring.put(point(1.0, loss=2.4211222831))
    assert ring.after(0.0)["loss"] == [2.4211222831] and short(0.1234567891) == 0.123457 and short(None) is None


def test_a_day_of_a_job_takes_a_few_hundred_kilobytes_and_no_more() -> None:
    series = JobSeries(0.0)
    for second in (*range(1, 4000), *range(4000, 2 * 86_400, DAY_EVERY)):
        series.record(CALM, float(second))
    assert series.bytes == MOST_BYTES == (3600 + 2880) * POINT_BYTES < 400_000
    day = series.points(Span.DAY, 0.0, 2 * 86_400.0)[TIME]
    assert 2880 - 1 <= len(day) <= 2880
    assert {later - earlier for earlier, later in pairwise(day)} == {DAY_EVERY}


def test_a_dip_between_two_points_of_the_day_is_seen_there() -> None:
    series = JobSeries(0.0)
    for second in range(1, 62):
        active = 1 if second == 40 else 2
        series.record(Sample(second, None, None, None, 0.0, active, 2), float(second))
    assert series.points(Span.DAY, 0.0, 61.0)["active"] == [2, 2, 1]


def test_samples_per_second_are_counted_over_the_last_seconds_and_never_below_nothing() -> None:
    series = JobSeries(0.0)
    read = [None, 0, 0, 0, 30, 30, 30, 60, 20]
    for second, samples in enumerate(read, start=1):
        series.record(Sample(0, None, None, samples, 0.0, 1, 1), float(second))
    rates = series.points(Span.HOUR, 0.0, 9.0)["samples_per_second"]
    assert rates == [None, None, 0.0, 0.0, 10.0, 7.5, 6.0, 10.0, 2.85714]


def test_a_clock_that_was_ahead_and_is_set_right_stops_nothing() -> None:
    """What was noted of a time that is to come is forgotten; what is measured then is shown."""
    series = JobSeries(0.0)
    read = itertools.count(8, 8)
    for second in (*range(1000, 1100), *range(90_000, 90_100), *range(1100, 1200)):
        series.record(Sample(second, 1.0, None, next(read), 0.5, 1, 3), float(second))
    hour, day = series.points(Span.HOUR, 0.0, 1199.0), series.points(Span.DAY, 0.0, 1199.0)
    assert hour[TIME] == list(range(1000, 1200)) and set(hour["samples_per_second"][101:]) == {8.0}
    assert day[TIME][:4] == [1000.0, 1030.0, 1060.0, 1090.0] and day[TIME][-1] > 1150
    last = series.minutes(1199.0)[-3:]
    assert [minute.number for minute in last if minute is not None] == [17, 18, 19]


def test_lanes_are_remembered_of_the_last_worlds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_series, "MOST_LANES", 24)
    world = training(2).job.durable.current
    assert world is not None and world.lanes == 8
    series = JobSeries(0.0)
    for generation in (1, 2, 3, 4, 5):
        series.see_world(replace(world, generation=generation), 2)
    assert [series.lanes_of(generation) is not None for generation in (1, 2, 3, 4, 5)] == [False] * 2 + [True] * 3


def test_a_job_that_is_over_keeps_no_points_for_ever() -> None:
    series = JobSeries(0.0)
    series.record(CALM, 1.0)
    series.forget_the_old(3000.0)
    assert series.bytes == 2 * POINT_BYTES
    series.forget_the_old(4000.0)
    assert series.bytes == POINT_BYTES
    series.forget_the_old(100_000.0)
    assert series.bytes == 0


def test_minutes_show_the_fewest_workers_the_last_loss_and_gaps() -> None:
    series = JobSeries(0.0)
    for second, active, loss in ((3421.0, 3, 1.0), (3430.0, 2, None), (3440.0, 3, nan), (3599.0, 4, 0.5)):
        series.record(Sample(0, loss, None, None, 0.0, active, 4), second)
    minutes = series.minutes(3599.5)
    assert len(minutes) == MINUTES and minutes[57] == Minute(57, 2, 4, 1.0) and minutes[59] == Minute(59, 4, 4, 0.5)
    assert [at for at, minute in enumerate(minutes) if minute is not None] == [57, 59]
    assert [at for at, minute in enumerate(series.minutes(3600.0)) if minute is not None] == [56, 58]
