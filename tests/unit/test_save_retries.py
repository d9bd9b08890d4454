"""When a save that has failed is tried again. In whole jobs: test_owed_at_the_end.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
from shoal.core.saving import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, SaveRetries


def tries(retries: SaveRetries, began: float, patience: float) -> list[float]:
    """When a place that never comes back is tried, each try failing at once."""
    now, found = began, [began]
    while retries.on_failed(now, patience):
        while retries.is_waiting(now):
            now += 0.5
        found.append(now)
    return found


def test_a_failed_save_is_tried_again_later_and_later_and_a_last_time_when_its_time_is_over() -> None:
    found = tries(SaveRetries(), 100.0, patience=1800.0)
    pauses = [later - earlier for earlier, later in pairwise(found)]
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_SECONDS]
    assert found[-1] == 1900.0 and max(pauses) == LONGEST_PAUSE_SECONDS


def test_without_patience_nothing_is_tried_again() -> None:
    assert tries(SaveRetries(), 5.0, patience=0.0) == [5.0]


@pytest.mark.parametrize("forgive", [SaveRetries.on_saved, SaveRetries.on_end])
def test_what_was_saved_since_and_the_end_of_the_job_give_the_whole_time_again(forgive: object) -> None:
    retries = SaveRetries()
    assert callable(forgive)
    assert tries(retries, 0.0, patience=10.0)[-1] == 10.0
    forgive(retries)
    assert not retries.is_waiting(10.0), "what failed before is tried at once"
    assert tries(retries, 10.0, patience=10.0)[1] == 10.0 + FIRST_PAUSE_SECONDS
