"""No generation opens before every world that may still train has stopped: who has to answer, with plain values."""

from dataclasses import replace

from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Durable, Standing, WorkerRecord
from shoal_controller.core.machine.job import Attempt, Job, Process
from shoal_controller.core.machine.phases.fencing import may_still_train as first_that_may_train
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.core.machine.turn import Turn
from shoal_protos.messages import Inventory, MemberState, Status
from shoal_protos.plan import Plan, Reason
from shoal_protos.runs import NO_BLOCKS
from worlds import planned, recovery

CURRENT = recovery(1, "abc")
PLANNED = planned(2, 1, "abD")
"""It may have begun without anyone having said so."""
STOPPED = Status(sequence=1, generation=1, state=MemberState.STOPPED, promised=3, step=5, committed_in=1)
ANSWER = Inventory(3, 1, 5, 1, b"", NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)


def may_still_train(
    answered: str, dead: str = "", plans: tuple[Plan, ...] = (PLANNED,), answer: Inventory = ANSWER
) -> Plan | None:
    """Generation 3 is being prepared; these have answered, those are confirmed dead."""
    roster = {w: WorkerRecord(w, order, incarnation=f"{w}.1", address=f"{w}:1") for order, w in enumerate("abcd")}
    roster |= {worker: replace(roster[worker], standing=Standing.DEAD) for worker in dead}
    world = {"current": CURRENT, "planned": plans, "roster": roster}
    durable = Durable(JobSpec("job", 3), 3, phase=Phase.RESIZING, last_generation=3, **world)
    processes = {worker: Process(worker, 1, STOPPED, last_message_at=0.0, inventory=answer) for worker in answered}
    attempt = Attempt(3, Reason.KILL, "", 0.0, 0.0)
    return first_that_may_train(Turn(Job(durable, 0.0, processes=processes, attempt=attempt), 0.0))


@rule(
    "No generation opens before, in every world that may still train, one living member has answered or all "
    "members are confirmed dead",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.fencing",
        "    return next((plan for plan in worlds(turn) if not _has_stopped(turn, plan)), None)",
        "    return None",
    ),
)
def test_one_answer_of_a_world_stops_it_because_a_vote_needs_all():
    assert may_still_train("c", plans=()) is None
    assert may_still_train("", plans=()) is CURRENT


@holds("No generation opens before, in")
def test_a_planned_world_that_may_have_begun_must_have_stopped_too():
    assert may_still_train("c") is PLANNED
    assert may_still_train("a") is None
    assert may_still_train("cd") is None


@holds("No generation opens before, in")
def test_a_world_whose_members_are_all_confirmed_dead_trains_no_more():
    assert may_still_train("c", dead="abd") is None
    assert may_still_train("c", dead="ab") is PLANNED
    assert may_still_train("", dead="abcd") is None


def test_an_answer_to_an_older_prepare_is_none():
    assert may_still_train("abc", plans=(), answer=replace(ANSWER, answers=2)) is CURRENT
