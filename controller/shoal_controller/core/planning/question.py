"""Questions to the planner: all that one plan is made from, as plain data, so that another process can answer them.

Made by the job machine (`machine/phases/planner_questions.py`), answered by `answer`, wherever that runs, and judged by
`check_answer` where the answer comes in. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_protos.errors import PeerError
from shoal_protos.plan import Member, Plan, Recovery, WorkerId, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, every, union

from shoal_controller.core.planning.planner import (
    BlocksLost,
    Candidate,
    PlanRequest,
    Terms,
    fill_pace,
    plan_change,
    plan_recovery,
    plan_start,
)


@dataclass(frozen=True, slots=True)
class StartQuestion:
    """A world in which nothing that its members hold counts."""

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    step: int = 0
    checkpoint: str = ""
    """Where all begin; empty: with the initial state."""

    @property
    def everyone(self) -> tuple[Candidate, ...]:
        """All who may become members."""
        return self.candidates


@dataclass(frozen=True, slots=True)
class RecoveryQuestion:
    """A world after a loss, from inventories."""

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    before: Plan
    step: int
    record: bytes
    otherwise: RecoveryQuestion | None = None
    """What is asked instead where these candidates lack a block: with others too, who should rather stay outside."""

    @property
    def everyone(self) -> tuple[Candidate, ...]:
        """All who may become members."""
        return self.otherwise.everyone if self.otherwise is not None else self.candidates


@dataclass(frozen=True, slots=True)
class ChangeQuestion:
    """What the world of `before` should be next."""

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    before: Plan

    @property
    def everyone(self) -> tuple[Candidate, ...]:
        """All who may become members."""
        return self.candidates


_BUG = "This is a bug in Shoal; please report it."

Question = StartQuestion | RecoveryQuestion | ChangeQuestion

Answer = Plan | Runs
"""The plan, or the blocks of which no candidate of a recovery has a copy."""


def answer(question: Question) -> Answer:
    """Ask the planner. Whatever it raises is a bug in Shoal."""
    request, candidates = question.request, question.candidates
    match question:
        case StartQuestion():
            return plan_start(request, candidates, question.step, question.checkpoint)
        case ChangeQuestion():
            return plan_change(request, candidates, question.before)
        case RecoveryQuestion():
            try:
                return plan_recovery(request, candidates, question.before, question.step, question.record)
            except BlocksLost as lost:
                return answer(question.otherwise) if question.otherwise is not None else lost.blocks


def check_answer(question: Question, answer: Answer) -> None:
    """Whatever answered: raises `PeerError` where a plan is unsound, or is none that this question can have, and where
    other blocks are said to be lost than those that no candidate holds.
    """
    if not isinstance(answer, Plan):
        _check_lost_blocks(question, answer)
        return
    check_plan(answer)
    asked, terms = _questions_in(question), question.request.terms
    if (found := _terms_of(answer)) not in (expected_terms := [_terms_asked(one, answer) for one in asked]):
        why = "generation, base, lanes, blocks, reason, steps"
        raise _unfit(answer, f"its {why} are {found}; expected {expected_terms[0]}")
    if answer.homes != terms.homes:
        raise _unfit(answer, "its homes are not those of the job")
    known = {candidate.member: candidate for candidate in question.everyone}
    for member, share in zip(answer.members, answer.shares, strict=True):
        if (candidate := known.get(member)) is None:
            raise _unfit(answer, f"its member {member.worker} was no candidate")
        if not isinstance(question, StartQuestion) and (lacking := share.keeps - _usable(candidate)):
            raise _unfit(answer, f"it has {member.worker} keep {lacking}, which it does not hold")
    if (rate := fill_pace(terms, answer)) != (found := _pace_of(answer)):
        raise _unfit(answer, f"its fills move {found[0]} blocks a step and {found[1]} at the first; expected {rate}")
    if spare := _spare_cell(terms, answer, known):
        raise _unfit(answer, f"it leaves {', '.join(spare)} without lanes, which are a cell")
    if answer.recovery is not None:
        members = [known[member] for member in answer.members]
        begins, expected = _beginning_of(answer.recovery), [_beginning_asked(one, members) for one in asked]
        if begins not in expected:
            raise _unfit(answer, f"it begins with {begins!r:.200}; expected {expected[0]!r:.200}")


def _pace_of(plan: Plan) -> tuple[int, int]:
    return plan.fill_blocks_per_step, plan.recovery.first_fill_blocks if plan.recovery is not None else 0


def _spare_cell(terms: Terms, plan: Plan, known: Mapping[Member, Candidate]) -> list[WorkerId]:
    """Members without lanes who could train as one cell more."""
    if not terms.homes or len(plan.cells) >= terms.lanes:
        return []
    spare: dict[str, dict[int, WorkerId]] = {}
    for member, share in zip(plan.members, plan.shares, strict=True):
        candidate = known[member]
        if not share.lanes and not candidate.leaving:
            spare.setdefault(candidate.host or candidate.domain, {})[member.coordinate] = member.worker
    cell: list[WorkerId] = []
    for part in terms.tight_parts or [(coordinate,) for coordinate in range(len(terms.homes))]:
        there = next((host for host in spare.values() if host.keys() >= set(part)), None)
        if there is None:
            return []
        cell += (there[coordinate] for coordinate in part)
    return cell


def _check_lost_blocks(question: Question, answer: Runs) -> None:
    lost, homes = NO_BLOCKS, question.request.terms.homes
    if isinstance(question, RecoveryQuestion):
        held = (_usable(c) & homes[c.member.coordinate] if homes else _usable(c) for c in question.everyone)
        lost = every(question.request.terms.blocks) - union(held)
    if not lost or answer != lost:
        raise PeerError(f"the planner says that nobody holds {answer!r:.100}; expected {lost or 'a plan'}. {_BUG}")


def _questions_in(question: Question) -> list[Question]:
    """The question, and what is asked instead where it has no answer."""
    instead = question.otherwise if isinstance(question, RecoveryQuestion) else None
    return [question, *(_questions_in(instead) if instead is not None else ())]


def _terms_of(plan: Plan) -> tuple[object, ...]:
    return plan.generation, plan.base, plan.lanes, plan.blocks, plan.reason.value, plan.steps


def _terms_asked(question: Question, answer: Plan) -> tuple[object, ...]:
    """Steps run where they are wanted, and somebody trains."""
    request, base = question.request, question.before.generation if isinstance(question, ChangeQuestion) else 0
    terms = request.terms
    return (
        request.generation, base, terms.lanes, terms.blocks, request.reason.value,
        terms.steps and bool(answer.trainers),
    )  # fmt: skip


_Beginning = tuple[int, bytes, str, tuple[bool, ...]]
"""Step, record, checkpoint, and whose state counts, by rank."""


def _beginning_of(recovery: Recovery) -> _Beginning:
    return recovery.step, recovery.record, recovery.checkpoint, recovery.counted


def _beginning_asked(question: Question, members: Sequence[Candidate]) -> _Beginning | None:
    """Where a world of these is to begin."""
    match question:
        case StartQuestion():
            return question.step, b"", question.checkpoint, (not question.checkpoint,) * len(members)
        case RecoveryQuestion():
            return question.step, question.record, "", tuple(candidate.counted for candidate in members)
        case ChangeQuestion():
            return None


def _usable(candidate: Candidate) -> Runs:
    """The blocks that it may own or mirror: ownership changes only by promotion."""
    return candidate.holds if candidate.counted else NO_BLOCKS


def _unfit(plan: Plan, why: str) -> PeerError:
    return PeerError(f"plan {plan.generation} is no answer to its question: {why}. {_BUG}")
