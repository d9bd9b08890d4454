"""What a job asks the planner, and what it does with an answer that comes late, comes twice or never comes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from machine_driver import MADE_OF, Driver, notes, training
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import AskPlanner
from shoal_controller.core.machine.events import Exited, PlannerAnswered, PlannerBegan, PlannerFailed
from shoal_controller.core.machine.job import AttemptPhase
from shoal_controller.core.machine.machine import step
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.planning.question import ChangeQuestion, RecoveryQuestion, answer, check_answer
from shoal_protos.activity import StepPhase
from shoal_protos.acts import DrainWorker
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.errors import PeerError
from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan
from shoal_protos.runs import Runs, every


def answered(job: Driver, asked: AskPlanner) -> None:
    """The answer to a question comes."""
    job.feed(PlannerAnswered(asked, answer(asked.question)))


def trains_with_a_slow_planner(workers: int = 3, mirrors: int = 1, **spec: Any) -> Driver:
    job = training(workers, mirrors, **spec)
    job.planner_answers = False
    job.questions.clear()
    return job


def all_stop(job: Driver) -> None:
    """Everybody who is here answers PREPARE."""
    for worker in list(job.connections):
        job.stop(worker, job.statuses[worker])


def lose(job: Driver, worker: str) -> AskPlanner:
    """The question after a worker's death, once all others have stopped."""
    before = len(job.questions)
    job.exit(worker)
    job.statuses.pop(worker)
    all_stop(job)
    assert len(job.questions) == before + 1
    return job.questions[-1]


def test_a_recovery_waits_for_its_plan_and_asks_for_it_once() -> None:
    job = trains_with_a_slow_planner()
    asked = lose(job, "w2")
    job.wait(3)
    assert job.questions == [asked]
    assert job.job.attempt is not None and job.job.attempt.phase is AttemptPhase.PREPARE
    assert "waiting for the planner" in job.view.reason
    answered(job, asked)
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


@rule(
    "One question to the planner is out at a time, and its answer is used unless it would be wrong now: another "
    "base generation, number or attempt, a member that has gone, an unsound plan, or one that begins elsewhere "
    "than was asked; then it is asked again",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.planner_questions",
            "    return any(member.worker not in roster or not roster[member.worker].serves for member in "
            "plan.members)\n",
            "    return any(member.worker not in roster for member in plan.members)\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.planned_changes",
            "    next_one = plan.base == world.generation and plan.generation == turn.durable.last_generation + 1\n",
            "    next_one = plan.generation > turn.durable.last_generation\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.planner_questions",
            "        check_answer(event.asked.question, event.answer)\n",
            "        pass\n",
        ),
        Edit(
            "shoal_controller.core.planning.question",
            "        if begins not in expected:\n",
            "        if not begins:\n",
        ),
    ],
)
def test_a_recovery_asks_again_where_a_member_of_the_answer_has_gone_meanwhile() -> None:
    job = trains_with_a_slow_planner(4, mirrors=2)
    first = lose(job, "w3")
    job.exit("w2")
    assert job.questions == [first], "one question is out at a time"
    answered(job, first)
    second = job.questions[-1]
    assert second is not first
    assert job.job.attempt is not None and job.job.attempt.plan is None
    answered(job, second)
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


@holds("One question to the planner")
def test_who_comes_while_a_change_is_being_planned_is_the_next_question() -> None:
    job = trains_with_a_slow_planner(2)
    job.hello("w2")
    (first,) = job.questions
    job.hello("w3")
    assert job.questions == [first]
    answered(job, first)
    assert [sorted(plan.workers) for plan in job.job.durable.planned] == [["w0", "w1", "w2"]]
    answered(job, job.questions[1])
    assert sorted(job.job.durable.planned[-1].workers) == ["w0", "w1", "w2", "w3"]


@holds("One question to the planner")
def test_a_planned_change_whose_joiner_has_gone_meanwhile_is_dropped_and_asked_for_again() -> None:
    job = trains_with_a_slow_planner(2)
    job.hello("w2")
    job.hello("w3")
    job.exit("w2")
    answered(job, job.questions[0])
    assert job.job.durable.planned == ()
    answered(job, job.questions[1])
    assert [sorted(plan.workers) for plan in job.job.durable.planned] == [["w0", "w1", "w3"]]


def test_a_planned_change_of_a_world_that_broke_meanwhile_is_dropped_and_the_recovery_is_the_next_question() -> None:
    job = trains_with_a_slow_planner(3)
    job.hello("w3")
    (first,) = job.questions
    assert isinstance(first.question, ChangeQuestion)
    job.exit("w2")
    all_stop(job)
    assert job.questions == [first]
    answered(job, first)
    assert job.job.durable.planned == ()
    assert isinstance(job.questions[1].question, RecoveryQuestion)
    answered(job, job.questions[1])
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


@holds("One question to the planner")
def test_a_planned_change_of_another_base_generation_is_dropped() -> None:
    job = training(2)
    job.hello("w2")
    (plan,) = job.job.durable.planned
    job.planner_answers = False
    job.hello("w3")
    asked = job.questions[-1]
    for worker in ("w0", "w1", "w2"):
        job.train(worker, plan)
    answered(job, asked)
    assert job.job.durable.current == plan
    assert job.job.durable.planned == ()
    assert job.questions[-1].question.request.generation == plan.generation + 1


@holds("A question without an answer")
def test_a_question_over_which_the_planner_died_is_asked_again_after_a_pause_that_doubles() -> None:
    job = trains_with_a_slow_planner()
    lose(job, "w2")
    pauses = []
    for _ in range(4):
        begun, before = job.now, len(job.questions)
        job.feed(PlannerFailed(job.questions[-1].number, "the planner's process has ended (exit status -9)"))
        assert len(job.questions) == before
        while len(job.questions) == before:
            job.now += 0.1
            job.tick()
        pauses.append(round(job.now - begun, 1))
    assert pauses == [0.1, 0.2, 0.4, 0.8]
    assert "which has failed (the planner's process has ended (exit status -9))" in job.view.reason
    answered(job, job.questions[-1])
    assert job.planned().world_size == 2


@holds("A question without an answer")
def test_a_lost_answer_is_waited_for_as_long_as_a_change_may_stand_still_and_used_though_it_is_late() -> None:
    job = trains_with_a_slow_planner()
    first = lose(job, "w2")
    effects = job.wait(job.spec.progress_seconds + 1)
    assert "the planner failed: it has not answered for 10 s; it is asked again" in notes(effects, "waiting")
    assert len(job.questions) == 2
    answered(job, first)
    assert job.planned().world_size == 2
    plan = job.planned()
    answered(job, job.questions[1])
    assert job.planned() is plan, "the second answer comes too late"


@holds("A question without an answer")
def test_a_question_that_stands_in_line_behind_other_jobs_is_not_called_failed() -> None:
    job = trains_with_a_slow_planner()
    job.planner_begins = False
    asked = lose(job, "w2")
    job.wait(3 * job.spec.progress_seconds)
    assert job.questions == [asked], "nobody asks again for what was not taken up"
    assert not job.job.planner.failures
    assert "waiting for the planner, which answers other jobs first" in job.view.reason
    job.feed(PlannerBegan(asked.number))
    job.wait(job.spec.progress_seconds)
    assert "other jobs" not in job.view.reason
    assert job.questions == [asked]
    effects = job.wait(1)
    assert "the planner failed: it has not answered for 10 s; it is asked again" in notes(effects, "waiting")


def test_a_question_that_is_never_taken_up_is_asked_again_after_stall_seconds() -> None:
    job = trains_with_a_slow_planner(stall_seconds=60.0)
    job.planner_begins = False
    asked = lose(job, "w2")
    job.wait(59)
    assert job.questions == [asked]
    effects = job.wait(2)
    assert "the planner failed: it has not begun for 60 s; it is asked again" in notes(effects, "waiting")


def test_what_is_told_of_an_earlier_question_does_not_count_for_the_one_that_is_out() -> None:
    job = trains_with_a_slow_planner()
    job.planner_begins = False
    first = lose(job, "w2")
    job.feed(PlannerBegan(first.number))
    job.wait(job.spec.progress_seconds + 1)
    _, second = job.questions
    job.feed(PlannerFailed(first.number, "the planner's process had no answer after 60 s"))
    job.wait(1)
    job.feed(PlannerBegan(first.number))
    job.wait(2 * job.spec.progress_seconds)
    assert job.questions == [first, second], "it still stands in line"
    answered(job, second)
    assert job.planned().world_size == 2


def test_a_job_whose_planner_fails_for_stall_seconds_fails_with_the_reason() -> None:
    job = trains_with_a_slow_planner()
    lose(job, "w2")
    for _ in range(200):
        job.feed(PlannerFailed(job.questions[-1].number, "MemoryError"))
        job.wait(20)
    assert job.job.durable.phase is Phase.FAILED
    assert "the planner has failed for 1800 s (stall_seconds): MemoryError" in job.view.reason


def test_a_planner_that_failed_while_steps_ran_has_all_of_stall_seconds_for_a_recovery() -> None:
    job = trains_with_a_slow_planner(stall_seconds=60.0)
    job.hello("w3")
    for boundary in range(10):
        for worker in ("w0", "w1", "w2"):
            job.does(worker, boundary, StepPhase.LANES)
        job.feed(PlannerFailed(job.questions[-1].number, "MemoryError"))
        job.wait(11)
    assert job.job.durable.phase is Phase.RUNNING
    job.exit("w2")
    job.statuses.pop("w2")
    all_stop(job)
    job.feed(PlannerFailed(job.questions[-1].number, "MemoryError"))
    job.wait(11)
    assert job.job.durable.phase is Phase.RESIZING
    answered(job, job.questions[-1])
    assert job.planned().world_size == 2


def test_questions_are_not_durable_another_controller_asks_its_own() -> None:
    job = trains_with_a_slow_planner()
    old = lose(job, "w2")
    statuses = dict(job.statuses)
    job.restart()
    job.questions.clear()
    for worker, status in statuses.items():
        job.hello(worker, status=status)
    job.wait(1)
    all_stop(job)
    assert job.questions[0].question.request.generation > old.question.request.generation
    answered(job, old)
    assert job.job.attempt is not None and job.job.attempt.plan is None


def test_a_drain_that_comes_while_a_world_is_being_planned_or_built_is_the_next_question() -> None:
    for drained_first in (True, False):
        job = trains_with_a_slow_planner()
        asked = lose(job, "w2")
        if drained_first:
            job.feed(DrainWorker("w1"))
        answered(job, asked)
        if not drained_first:
            job.feed(DrainWorker("w1"))
        plan = job.planned()
        for worker in ("w0", "w1"):
            job.beat(worker, state=MemberState.READY, promised=plan.generation)
        for worker in ("w0", "w1"):
            job.train(worker, plan)
        assert [known.leaving for known in job.questions[-1].question.candidates] == [False, True]


def test_a_broken_connection_counts_once_however_often_a_plan_is_asked_for() -> None:
    job = Driver(wanted=4, made_of=replace(MADE_OF, mirrors=1))
    job.start(4)
    job.wait(1)
    job.planner_answers = False
    job.questions.clear()
    job.beat("w0", broken=("w1",))
    all_stop(job)
    job.exit("w3")
    answered(job, job.questions[-1])
    assert len(job.questions) == 2
    assert {fault.times for fault in job.job.durable.link_faults.values()} == {1}
    assert not any(record.quarantined for record in job.job.durable.roster.values())


def stalled_until_a_holder_is_back() -> tuple[Driver, AskPlanner]:
    """A job whose lost blocks w1 holds, which was silent and has now told of them; and the question before it did."""
    job = trains_with_a_slow_planner()
    connection = job.connections.pop("w1")
    job.exit("w2")
    job.stop("w0", job.statuses["w0"])
    job.wait(5)
    (without_it,) = job.questions
    answered(job, without_it)
    assert job.job.durable.phase is Phase.STALLED
    job.connections["w1"] = connection
    job.stop("w1", job.statuses["w1"])
    assert len(job.questions) == 2
    return job, without_it


def test_blocks_are_not_given_up_where_the_planner_fails_over_the_question_with_their_holder() -> None:
    job, _ = stalled_until_a_holder_is_back()
    job.feed(PlannerFailed(job.questions[-1].number, "the planner's process has ended (exit status -9)"))
    job.wait(1)
    answered(job, job.questions[-1])
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


def test_blocks_are_not_given_up_by_a_late_answer_to_a_question_without_their_holder() -> None:
    job, without_it = stalled_until_a_holder_is_back()
    answered(job, without_it)
    assert job.job.durable.phase is not Phase.FAILED
    answered(job, job.questions[-1])
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


def test_of_two_answers_at_once_the_one_to_the_later_question_counts() -> None:
    job, without_it = stalled_until_a_holder_is_back()
    batch = [PlannerAnswered(asked, answer(asked.question)) for asked in (job.questions[-1], without_it)]
    job.job, job.effects = step(job.job, batch, job.now)
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


def test_nobody_goes_back_to_a_checkpoint_where_the_last_one_dies_as_the_blocks_are_found_lost() -> None:
    job = trains_with_a_slow_planner(launcher="local", made_of=replace(MADE_OF, can_checkpoint=True))
    job.beat("w0", checkpoint=CheckpointRef(1, 1, "/c/step-1", 1))
    job.exit("w1")
    asked = lose(job, "w2")
    lost = answer(asked.question)
    assert isinstance(lost, Runs)
    job.job, job.effects = step(job.job, [PlannerAnswered(asked, lost), Exited("w0", -9, "killed", "")], job.now)
    assert not job.of(AskPlanner), "there is nobody to plan for"
    assert any("nobody is left; starting again from step 1" in note for note in notes(job.effects, "anew"))


def wrong_answers(asked: AskPlanner) -> dict[str, Plan]:
    """Plans that a planner of another version, or with a defect, might give, by what is wrong with each."""
    plan = answer(asked.question)
    assert isinstance(plan, Plan)
    first, *others = plan.shares
    lost = replace(first, owned=first.owned - first.owned.first(1))
    (foreign, *rest) = plan.members
    return {
        "is unsound: .* have no owner": replace(plan, shares=(lost, *others)),
        "its generation, base, lanes, .* are": replace(plan, generation=plan.generation + 1),
        "its member w9 was no candidate": replace(plan, members=(replace(foreign, worker="w9"), *rest)),
        "keep .*, which it does not hold": replace(plan, shares=(*reversed(plan.shares),), fills=()),
        "its fills move .* blocks a step": replace(plan, fill_blocks_per_step=plan.fill_blocks_per_step + 1),
    }


@holds("One question to the planner")
@pytest.mark.parametrize("field", ["step", "record", "checkpoint", "counted"])
def test_an_answer_that_has_all_begin_elsewhere_is_dropped_and_the_question_asked_again(field: str) -> None:
    job = trains_with_a_slow_planner(3)
    asked = lose(job, "w2")
    plan = answer(asked.question)
    assert isinstance(plan, Plan) and plan.recovery is not None
    elsewhere = {"step": plan.recovery.step + 1, "record": b"another", "checkpoint": "/c/1", "counted": (True, False)}
    job.feed(PlannerAnswered(asked, replace(plan, recovery=replace(plan.recovery, **{field: elsewhere[field]}))))
    assert job.job.attempt is not None and job.job.attempt.plan is None
    assert "it begins with" in job.job.planner.why
    job.wait(1)
    answered(job, job.questions[1])
    assert job.planned().world_size == 2


def test_lost_blocks_are_no_answer_where_nobody_was_asked_for_any() -> None:
    job = trains_with_a_slow_planner(3)
    job.hello("w3")
    (asked,) = job.questions
    job.feed(PlannerAnswered(asked, every(4)))
    assert "expected a plan" in job.job.planner.why
    assert len(job.questions) == 1, "it is asked again after a pause, not at once"


@pytest.mark.parametrize("wrong", [Runs(), every(8)])
def test_blocks_are_not_given_up_that_somebody_holds_whatever_the_planner_says(wrong: Runs) -> None:
    job = trains_with_a_slow_planner(3)
    asked = lose(job, "w2")
    job.feed(PlannerAnswered(asked, wrong))
    assert "the planner says that nobody holds" in job.job.planner.why
    assert job.job.attempt is not None and not job.job.attempt.lost_blocks
    job.wait(1)
    answered(job, job.questions[1])
    assert job.planned().world_size == 2


def test_no_other_blocks_are_given_up_than_those_that_nobody_holds() -> None:
    job = trains_with_a_slow_planner()
    job.connections.pop("w1")
    job.exit("w2")
    job.stop("w0", job.statuses["w0"])
    job.wait(5)
    (asked,) = job.questions
    lost = answer(asked.question)
    assert isinstance(lost, Runs)
    job.feed(PlannerAnswered(asked, every(asked.question.request.terms.blocks)))
    assert f"expected {lost}" in job.job.planner.why
    assert job.job.attempt is not None and not job.job.attempt.lost_blocks


def test_who_does_not_count_holds_nothing_that_a_plan_may_have_it_keep() -> None:
    job = trains_with_a_slow_planner()
    question = lose(job, "w2").question
    plan = answer(question)
    candidates = [replace(one, counted=one.member.worker != "w1") for one in question.candidates]
    with pytest.raises(PeerError, match=r"it has w1 keep .*, which it does not hold"):
        check_answer(replace(question, candidates=tuple(candidates)), plan)


@holds("One question to the planner")
@pytest.mark.parametrize("wrong", range(5))
def test_a_wrong_answer_is_dropped_said_and_the_question_asked_again(wrong: int) -> None:
    job = trains_with_a_slow_planner(3)
    first = lose(job, "w2")
    sentence, plan = list(wrong_answers(first).items())[wrong]
    job.feed(PlannerAnswered(first, plan))
    assert job.job.attempt is not None and job.job.attempt.plan is None
    assert re.search(sentence, job.job.planner.why)
    job.wait(1)
    assert len(job.questions) == 2
    answered(job, job.questions[1])
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


def test_a_planner_that_gives_nothing_but_wrong_answers_is_asked_after_pauses_that_double() -> None:
    job = trains_with_a_slow_planner(3)
    job.hello("w3")
    pauses = []
    for _ in range(3):
        begun, before = job.now, len(job.questions)
        job.feed(PlannerAnswered(job.questions[-1], wrong_answers(job.questions[-1])["its member w9 was no candidate"]))
        assert job.job.durable.planned == ()
        while len(job.questions) == before:
            job.now += 0.1
            job.tick()
        pauses.append(round(job.now - begun, 1))
    assert pauses == [0.1, 0.2, 0.4]
