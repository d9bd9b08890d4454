"""Questions to the planner: one is out at a time, and its answer is an event, however long that takes.

What happens meanwhile makes no answer wrong by itself: whoever takes it (`recovery.py`, `planned_changes.py`) looks
whether it would be wrong now, and what has changed since is the next question. One without an answer is asked again,
and so is one whose answer is none that it can have: another process answers, and only a sound plan is stored.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.errors import PeerError
from shoal_protos.plan import Plan

from shoal_controller.core.machine.durable import Goal
from shoal_controller.core.machine.effects import AskPlanner
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import PlannerAnswered, PlannerBegan, PlannerFailed
from shoal_controller.core.machine.job import Job, PlannerState
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.question import Question, check_answer

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
"""Seconds between two questions where the planner fails; they double."""


def ask(turn: Turn, question: Question, goal: Goal | None = None) -> None:
    """Ask the planner, which must not be busy."""
    assert not is_busy(turn), "one question is out at a time"
    planner = turn.job.planner
    number = planner.asked + 1
    turn.change(planner=replace(planner, asked=number, asked_at=turn.now, begun_at=None))
    turn.do(AskPlanner(number, question, goal))


def is_busy(turn: Turn) -> bool:
    """Whether a question is out, or the planner has just failed."""
    planner = turn.job.planner
    return planner.asked_at is not None or turn.now < _not_before(planner)


def _not_before(planner: PlannerState) -> float:
    if not planner.failures:
        return 0.0
    return planner.failed_at + min(FIRST_PAUSE * 2.0 ** (planner.failures - 1), LONGEST_PAUSE)


def take(turn: Turn) -> PlannerAnswered | None:
    """The answer that came, once. It may be to an earlier question than the last one."""
    answer = turn.job.planner.answer
    if answer is not None:
        turn.change(planner=replace(turn.job.planner, answer=None))
    return answer


def has_lost_a_member(turn: Turn, plan: Plan) -> bool:
    """Whether somebody has gone since the plan was asked for."""
    roster = turn.durable.roster
    return any(member.worker not in roster or not roster[member.worker].serves for member in plan.members)


def sentence(job: Job) -> str:
    """What is waited for."""
    planner = job.planner
    if planner.failures:
        return f"waiting for the planner, which has failed ({planner.why})"
    in_line = planner.asked_at is not None and planner.begun_at is None
    return "waiting for the planner, which answers other jobs first" if in_line else "waiting for the planner"


def has_failed_for(turn: Turn, seconds: float, since: float) -> bool:
    """Whether nothing but failures has come of it for so long after a time."""
    planner = turn.job.planner
    return planner.failures > 0 and turn.now - max(planner.failing_since, since) > seconds


# ---- what comes of a question


def on_begun(turn: Turn, event: PlannerBegan) -> bool:
    """From now on the question's time counts."""
    planner = turn.job.planner
    if event.number == planner.asked and planner.asked_at is not None:
        turn.change(planner=replace(planner, begun_at=turn.now))
    return False


def on_answered(turn: Turn, event: PlannerAnswered) -> None:
    """Keep the answer for whoever asked; of two answers that come at once, the one to the later question. ● A plan that
    is unsound, or another one than was asked for, is a failure of the planner.
    """
    try:
        check_answer(event.asked.question, event.answer)
    except PeerError as error:
        return on_failed(turn, PlannerFailed(event.asked.number, str(error)))
    planner = turn.job.planner
    asked_at = None if event.asked.number == planner.asked else planner.asked_at
    later = planner.answer is not None and planner.answer.asked.number > event.asked.number
    answer = planner.answer if later else event
    return turn.change(planner=PlannerState(planner.asked, asked_at, planner.begun_at, answer))


def on_failed(turn: Turn, event: PlannerFailed) -> None:
    """The question is asked again after a pause, unless it was given up already."""
    if event.number == turn.job.planner.asked and turn.job.planner.asked_at is not None:
        _fail(turn, event.why)


def watch(turn: Turn) -> None:
    """An answer that does not come within `progress_seconds` is waited for no longer; it may still come. ● Not the time
    in which the question stood in line: all jobs have one planner, and who asks again would only make the line longer.
    """
    planner = turn.job.planner
    if planner.asked_at is None:
        return
    if planner.begun_at is None:
        if turn.now - planner.asked_at > turn.spec.stall_seconds:
            _fail(turn, f"it has not begun for {turn.now - planner.asked_at:.0f} s")
    elif turn.now - planner.begun_at > turn.spec.progress_seconds:
        _fail(turn, f"it has not answered for {turn.now - planner.begun_at:.0f} s")


def _fail(turn: Turn, why: str) -> None:
    """The question is asked again, after a pause that doubles."""
    planner = turn.job.planner
    failures = planner.failures + 1
    since = planner.failing_since if planner.failures else turn.now
    turn.change(
        planner=replace(planner, asked_at=None, failures=failures, failing_since=since, failed_at=turn.now, why=why),
        goal=None,
    )
    if failures & (failures - 1) == 0:
        times = f" ({failures} times in a row)" if failures > 1 else ""
        turn.note(EventKind.WAITING, f"the planner failed{times}: {why}; it is asked again")
