"""The timeline of one change: what belongs to it of all that happened while the world before it trained."""

from __future__ import annotations

import pytest
from shoal_controller.jobs.records import JobEvent
from shoal_controller.jobs.timeline import timeline

HOURS = 5 * 3600.0


def event(time: float, kind: str, worker: str = "", message: str = "", generation: int = 1, **data: object) -> JobEvent:
    return JobEvent(time, kind, generation, worker, message, data)


TRAINED = (
    event(0.0, "audit", action="create"),
    event(1.0, "open"),
    event(2.0, "suspected", "w1"),
    event(3.0, "joined", "w9"),
    event(4.0, "lost", "w9", noticed_by="the launcher"),
    event(5.0, "audit", action="checkpoint"),
    event(6.0, "audit", "w9", action="drain"),
)
"""A world in which this and that happened."""


@pytest.mark.parametrize("reason", ["kill", "restore"])
def test_a_loss_begins_with_what_led_to_it_and_not_hours_before(reason: str) -> None:
    lost = (
        event(HOURS - 1.6, "disconnected", "w1"),
        event(HOURS, "lost", "w1", noticed_by="an operator"),
        event(HOURS, "prepare", detect_seconds=1.5),
        event(HOURS + 0.1, "open", generation=2),
    )
    found = timeline([*TRAINED, *lost], 2, reason)
    assert (found.events, found.noticed_by) == (lost, "an operator")


def test_a_loss_is_noticed_by_the_process_that_saw_it_before_a_launcher_says_how_it_came() -> None:
    seen = (
        event(HOURS, "disconnected", "w1", noticed_by="worker w0"),
        event(HOURS, "prepare"),
        event(HOURS + 0.1, "lost", "w1", noticed_by="the launcher"),
        event(HOURS + 0.2, "open", generation=2),
    )
    found = timeline([*TRAINED, *seen], 2, "kill")
    assert (found.events, found.noticed_by) == (seen, "worker w0")


def test_a_drain_is_an_operators_only_where_one_asked_for_that_one() -> None:
    planned = event(HOURS, "plan", message="generation 2 will replace 1 (drain): remove w2")
    begun = event(HOURS + 1.0, "begun", generation=2)
    terminated = (event(HOURS - 90.0, "draining", "w2"), planned, begun)
    found = timeline([*TRAINED, *terminated], 2, "drain")
    assert (found.events, found.noticed_by) == (terminated, "the controller")
    asked = (event(HOURS - 90.0, "audit", "w2", action="drain"), *terminated)
    found = timeline([*TRAINED, *asked], 2, "drain")
    assert (found.events, found.noticed_by) == (asked, "an operator")


def test_a_plan_that_names_nobody_has_the_last_request_for_its_cause() -> None:
    """As that of a drain whose blocks are copied first, and of many workers."""
    asked = (
        event(HOURS - 90.0, "audit", "w2", action="drain"),
        event(HOURS - 90.0, "draining", "w2"),
        event(HOURS, "plan", message="generation 2 will replace 1 (drain): fill 5 blocks"),
        event(HOURS + 1.0, "begun", generation=2),
    )
    found = timeline([*TRAINED, *asked], 2, "drain")
    assert (found.events, found.noticed_by) == (asked, "an operator")


def test_a_join_begins_with_the_joiner_though_it_was_hours_before() -> None:
    joined = (
        event(HOURS, "joined", "w3"),
        event(2 * HOURS, "plan", message="generation 2 will replace 1 (join): add w3"),
        event(2 * HOURS, "begun", generation=2),
    )
    found = timeline([*TRAINED, *joined], 2, "join")
    assert (found.events, found.noticed_by) == (joined, "w3")


def test_the_first_world_has_all_that_led_to_it() -> None:
    first = (event(0.0, "audit", action="create"), event(HOURS, "prepare"), event(HOURS, "open"))
    found = timeline(first, 1, "start")
    assert (found.events, found.noticed_by) == (first, "an operator")
