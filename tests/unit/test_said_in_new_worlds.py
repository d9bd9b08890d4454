"""What a worker says again in a new world, or only until one comes: how it ended, and which members have died."""

from __future__ import annotations

import pytest
from shoal_protos.messages import PlanMessage, Prepare, Result
from unit.test_session_dialogue import heartbeat, kinds_sent, member_of
from worlds import recovery


@pytest.mark.parametrize("step", [10, 4])
def test_how_it_ended_is_said_again_in_a_new_world_but_where_that_goes_back_to_a_step_before(step: int) -> None:
    """A controller that knew no such member has not taken it."""
    dialogue, world = member_of(1, "ab"), recovery(2, "ab", step)
    dialogue.report(Result(10, "beef"))
    assert "Result" in kinds_sent(dialogue)
    dialogue.on_message(Prepare(2))
    dialogue.on_message(PlanMessage(world))
    kinds_sent(dialogue)
    dialogue.begin(world)
    assert ("Result" in kinds_sent(dialogue)) is (step == 10)
    dialogue.say_hello()
    assert ("Result" in kinds_sent(dialogue)) is (step == 10)


def test_a_death_is_said_at_once_and_until_a_plan_comes_that_was_made_after_it() -> None:
    dialogue, members = (
        member_of(1, "abc"),
        {member.worker: member.incarnation for member in recovery(2, "abc").members},
    )
    dialogue.on_death(members["c"])
    dialogue.on_death(members["b"])
    assert heartbeat(dialogue).status.dead == tuple(sorted((members["b"], members["c"])))
    dialogue.on_message(Prepare(2))
    dialogue.on_message(PlanMessage(recovery(2, "ac")))
    assert heartbeat(dialogue).status.dead == (members["c"],)


def test_a_death_is_said_before_the_training_thread_says_where_it_stands_in_a_new_world() -> None:
    """It may wait for the dead process there."""
    dialogue, world = member_of(1, "ab"), recovery(2, "ab")
    dialogue.on_message(Prepare(2))
    dialogue.on_message(PlanMessage(world))
    dialogue.begin(world)
    kinds_sent(dialogue)
    dialogue.on_death(world.members[1].incarnation)
    assert heartbeat(dialogue).status.dead == (world.members[1].incarnation,)
