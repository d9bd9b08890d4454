"""A thousand workers, and as many blocks as a job can have: planned quickly, and small on the wire.

The bounds are for a machine that does other things meanwhile: an idle one takes a fortieth of them.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from planning import transfers
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_change, plan_recovery, plan_start
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import every
from shoal_protos.wire import plan_to_bytes

pytestmark = pytest.mark.xdist_group("a large plan")

WORKERS, BLOCKS, RACK = 1000, 65536, 100
MOST_SECONDS = 20.0
TERMS = Terms(lanes=WORKERS, blocks=BLOCKS, mirrors=1, mirror_partners=4, fill_blocks_per_step=4)


def candidates(first: int, count: int) -> list[Candidate]:
    """A hundred to a rack."""
    return [
        Candidate(Member(f"w{number}", f"w{number}.1", f"10.0.0.1:{number}"), f"rack {number // RACK}", number)
        for number in range(first, first + count)
    ]


def filled(plan: Plan, here: list[Candidate]) -> list[Candidate]:
    """Who is in the plan, once all its fills are done."""
    by_member = {known.member: known for known in here}
    given = {rank: plan.shares[rank].keeps for rank in range(plan.world_size)}
    for fill in plan.fills:
        given[fill.target] |= fill.blocks
    return [replace(by_member[member], holds=given[rank]) for rank, member in enumerate(plan.members)]


@pytest.fixture(scope="module")
def start() -> Plan:
    return plan_start(PlanRequest(TERMS, 1, Reason.START), candidates(0, WORKERS))


@pytest.fixture
def clock() -> object:
    begun = time.process_time()
    yield
    assert time.process_time() - begun < MOST_SECONDS


def test_a_whole_rack_is_lost_and_its_share_promoted_and_filled_again(start: Plan, clock: object) -> None:
    here = filled(start, candidates(0, WORKERS))
    survivors = [replace(known, current=every(BLOCKS)) for known in here if known.domain != "rack 3"]
    plan = plan_recovery(PlanRequest(TERMS, 2, Reason.KILL), survivors, start, step=7, record=b"")
    lost = sum(len(share.keeps) for share, known in zip(start.shares, here, strict=True) if known.domain == "rack 3")
    assert lost <= transfers(plan) <= 1.5 * lost
    assert len(plan_to_bytes(plan)) < 1 << 18
    here = filled(plan, survivors)
    again = plan_change(PlanRequest(TERMS, 3, Reason.BALANCE), here, plan)
    assert transfers(plan) + transfers(again) <= 1.5 * lost, "mirrors that only had to move have waited"
    here = filled(again, here)
    again = plan_change(PlanRequest(TERMS, 4, Reason.BALANCE), here, again)
    assert again.fills == ()
    owned = [len(share.owned) for share in again.shares]
    assert max(owned) - min(owned) == 1


def test_one_joins_and_gets_its_share(start: Plan, clock: object) -> None:
    here = filled(start, candidates(0, WORKERS)) + candidates(WORKERS, 1)
    plan = plan_change(PlanRequest(TERMS, 2, Reason.JOIN), here, start)
    assert BLOCKS // (WORKERS + 1) <= transfers(plan) <= 2 * BLOCKS // WORKERS
    joiner = plan.world_size - 1
    assert {fill.target for fill in plan.fills} <= {joiner, *plan.shares[joiner].partners}


def test_members_are_found_without_going_through_them(start: Plan) -> None:
    """Of each of a thousand members it is asked at every event who is a member, and at which rank."""
    begun = time.process_time()
    for member in start.members:
        for _ in range(100):
            assert member.worker in start.workers
            assert start.rank_of(member.worker, member.incarnation) is not None
    assert time.process_time() - begun < 2.0
