"""Whose rendezvous server builds a planned change's group: somebody who can send joiners their first message."""

from __future__ import annotations

from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_change, plan_start
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import NO_BLOCKS, every

TERMS = Terms(lanes=2, blocks=4, mirrors=1, mirror_partners=4, fill_blocks_per_step=4)


def candidate(worker: str, *, member: bool, leaving: bool = False) -> Candidate:
    holds = every(4) if member else NO_BLOCKS
    return Candidate(Member(worker, worker * 2, "h:1"), "h", int(worker[1:]), holds, leaving=leaving)


def start(worker: str) -> Plan:
    return plan_start(PlanRequest(TERMS, 1, Reason.START), [candidate(worker, member=True)])


def test_a_joiner_never_builds_even_where_all_others_are_leaving() -> None:
    last, joiner = candidate("w1", member=True, leaving=True), candidate("w2", member=False)
    plan = plan_change(PlanRequest(TERMS, 2, Reason.DRAIN), [last, joiner], start("w1"))
    assert plan.members[plan.builder].worker == "w1"


def test_a_member_whose_store_failed_is_still_better_than_a_joiner() -> None:
    member, joiner = candidate("w1", member=True), candidate("w2", member=False)
    plan = plan_change(PlanRequest(TERMS, 2, Reason.JOIN, avoid=frozenset({"w1"})), [member, joiner], start("w1"))
    assert plan.members[plan.builder].worker == "w1"
