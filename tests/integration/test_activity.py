"""What heartbeats of a real link tell of its training thread, and of the groups that it builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from integration.linked_workers import at, begin_a_world, workers
from integration.small_controller import PATIENCE_SECONDS, SmallController
from shoal_protos.activity import StepPhase
from shoal_protos.messages import Heartbeat, Ping, PlanMessage
from worlds import planned


def beats(controller: SmallController, worker: str, matching: Callable[[Heartbeat], Any]) -> Heartbeat:
    """Asks until it says so."""
    for number in range(1, 10_000):
        controller.sends(worker, Ping(number))
        beat = controller.receives(Heartbeat, lambda beat, number=number: beat.echo == number, by=worker)
        if matching(beat):
            return beat
    raise AssertionError(f"{worker} said {beat} at last")


def test_a_heartbeat_says_for_whom_the_training_thread_waits_and_then_that_it_waits_no_more() -> None:
    with workers("ab") as (controller, (a, b)):
        begin_a_world(controller, [a, b])
        waits = a.does(a.gathers)
        beat = beats(controller, "a", lambda beat: beat.activity.waits_for)
        assert (beat.activity.generation, beat.activity.waits_for) == (1, ("b",))
        b.does(b.gathers).result(PATIENCE_SECONDS)
        waits.result(PATIENCE_SECONDS)
        assert beats(controller, "a", lambda beat: not beat.activity.waits_for).activity.generation == 1


def test_a_heartbeat_says_for_whom_a_group_that_is_being_built_waits() -> None:
    with workers("abc") as (controller, (a, b, c)):
        begin_a_world(controller, [a, b])
        change = at(planned(2, 1, "abC"), [a, b, c])
        controller.sends("a", PlanMessage(change))
        beats(controller, "a", lambda beat: [build.waits_for for build in beat.builds] == [("b", "c")])
        controller.sends("b", PlanMessage(change))
        beats(controller, "a", lambda beat: [build.waits_for for build in beat.builds] == [("c",)])
        controller.sends("c", PlanMessage(change))
        built = beats(controller, "a", lambda beat: [build.phase for build in beat.builds] == [StepPhase.BUILT])
        assert built.builds[0].waits_for == ()
        beats(controller, "c", lambda beat: [build.waits_for for build in beat.builds] == [("a",)])
