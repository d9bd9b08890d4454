"""Members of a crew that have no lanes, though they could train: as a plan gives them to spare members of cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal_controller.core.planning.question import Question
from shoal_controller.core.planning.question import answer as planned
from shoal_protos.plan import Plan
from shoal_protos.runs import Runs


def answering(idle: set[str]) -> Callable[[Question], Plan | Runs]:
    """What answers a crew's questions (`crew.answer`): lanes of these workers go to the first member that is none."""

    def answer(question: Question) -> Plan | Runs:
        plan = planned(question)
        if not isinstance(plan, Plan):
            return plan
        of = [() if member.worker in idle else plan.lanes_of(rank) for rank, member in enumerate(plan.members)]
        first = next(rank for rank, lanes in enumerate(of) if lanes)
        of[first] = tuple(sorted({*range(plan.lanes)} - {lane for lanes in of for lane in lanes} | {*of[first]}))
        shares = (replace(share, lanes=lanes) for share, lanes in zip(plan.shares, of, strict=True))
        return replace(plan, shares=tuple(shares))

    return answer
