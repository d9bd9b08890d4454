"""A size that goes to and fro: the newest counts, and it is followed less and less often."""

from __future__ import annotations

import pytest
from rule import Edit, rule
from shoal_controller.elastic_jobs.owned_job import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    QUIET_SECONDS,
    SizeSettling,
)


def changes(sizes: list[tuple[float, int]], until: float, wanted: int = 2) -> list[tuple[float, int]]:
    """When which size is passed on, of sizes that are asked for from these times on; looked at twice a second."""
    settling, found = SizeSettling(), []
    for number in range(round(2 * until)):
        now = number / 2
        asked = next((size for at, size in reversed(sizes) if at <= now), wanted)
        if asked != wanted and settling.due(wanted, asked, now) <= now:
            settling.note(wanted, asked, now)
            wanted = asked
            found.append((now, asked))
    return found


@rule(
    "A size that goes to and fro is followed less and less often, and the newest counts in the end",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "        if change is not None and due <= now:",
            "        if change is not None:",
        ),
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)",
            "            self._pause = FIRST_PAUSE_SECONDS",
        ),
    ],
)
@pytest.mark.parametrize("period", [0.5, 1.0, 15.0, 30.0])
def test_an_hour_of_flapping_is_a_dozen_or_two_of_changes(period: float) -> None:
    sizes = [(number * period, 4 - 2 * (number % 2)) for number in range(round(3600 / period))]
    found = changes([*sizes, (3600.0, 3)], until=3600 + 2 * LONGEST_PAUSE_SECONDS)
    assert len(found) <= 24
    assert found[-1][1] == 3, "the newest counts in the end"


def test_a_change_in_the_direction_of_the_last_one_is_followed_at_once() -> None:
    sizes = [(0.0, 3), (1.0, 4), (1.5, 8)]
    assert changes(sizes, 10) == sizes


def test_a_turn_waits_until_the_last_change_is_some_seconds_old() -> None:
    assert changes([(0.0, 8), (1.0, 3)], 20) == [(0.0, 8), (FIRST_PAUSE_SECONDS, 3)]
    assert changes([(0.0, 8), (1.0, 3), (2.0, 8)], 20) == [(0.0, 8)], "nothing is left to be changed"


def test_after_a_quiet_time_the_first_pause_counts_again() -> None:
    quiet = QUIET_SECONDS + 1
    sizes = [(0.0, 4), (5.0, 2), (15.0, 4), (35.0, 2), (quiet + 35, 4), (quiet + 36, 2)]
    assert changes(sizes, quiet + 100)[-1] == (quiet + 35 + FIRST_PAUSE_SECONDS, 2)
