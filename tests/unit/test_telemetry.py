"""The meter's numbers."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
import shoal.training.telemetry
from shoal.training.telemetry import LATEST_STEPS, Meter


def test_the_median_step_is_that_of_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, chance = 0.0, Random(1)
    monkeypatch.setattr(shoal.training.telemetry.time, "monotonic", lambda: now)
    meter, took = Meter(), []
    for _ in range(LATEST_STEPS + 500):
        before = now
        now += chance.choice((0.1, 0.2, chance.random()))
        took.append(now - before)
        meter.on_step()
        assert meter._median() == pytest.approx(median(took[-LATEST_STEPS:]))


def test_a_worker_that_starts_over_has_received_nothing_by_fills() -> None:
    meter = Meter()
    meter.on_fill(100, 0.1)
    meter.on_start_over()
    meter.on_fill(7, 0.1)
    assert meter._fill_bytes == 7
