"""The worker's side of the generation protocol, as a transcript of what is heard and what follows from it."""

from __future__ import annotations

import pytest
from rule import Edit, holds, rule
from shoal.core.membership import Membership
from shoal_protos.messages import MemberState
from shoal_protos.runs import NO_BLOCKS, every
from worlds import BLOCKS, planned, recovery, share_of

ALL = every(BLOCKS)


def joiner(worker: str = "a") -> Membership:
    membership = Membership(worker, f"{worker}.1")
    membership.end_warm_up()
    return membership


def member_of(generation: int, workers: str, worker: str = "a") -> Membership:
    """Through PREPARE, PLAN, READY and OPEN."""
    membership = joiner(worker)
    plan = recovery(generation, workers)
    assert membership.on_prepare(generation)
    assert membership.on_recovery(plan)
    assert membership.report_ready(generation)
    assert membership.on_open(generation)
    membership.begin(plan)
    assert membership.state is MemberState.TRAINING
    return membership


# ---- loss


def test_a_worker_stops_once_for_each_prepare() -> None:
    membership = member_of(1, "ab")
    assert membership.on_prepare(2)
    assert membership.state is MemberState.STOPPED
    assert not membership.on_prepare(2)
    assert not membership.on_prepare(1)
    assert (membership.promised, membership.generation) == (2, 1)


def test_a_plan_is_carried_out_only_for_the_last_prepare_and_once() -> None:
    membership = member_of(1, "ab")
    membership.on_prepare(2)
    membership.on_prepare(3)
    assert not membership.on_recovery(recovery(2, "ab"))
    assert membership.on_recovery(recovery(3, "ab"))
    assert not membership.on_recovery(recovery(3, "ab"))
    assert membership.state is MemberState.BUILDING


def test_a_plan_that_leaves_this_process_out_is_not_its_business() -> None:
    membership = member_of(1, "ab")
    membership.on_prepare(2)
    assert not membership.on_recovery(recovery(2, "bc"))


def test_a_ready_that_comes_after_another_prepare_is_none() -> None:
    membership = member_of(1, "ab")
    membership.on_prepare(2)
    membership.on_recovery(recovery(2, "ab"))
    membership.on_prepare(3)
    assert not membership.report_ready(2)
    assert not membership.on_open(2)
    assert not membership.on_open(3)


def test_a_worker_opens_only_what_it_is_ready_for() -> None:
    membership = member_of(1, "ab")
    membership.on_prepare(2)
    membership.on_recovery(recovery(2, "ab"))
    assert not membership.on_open(2)
    membership.report_ready(2)
    assert membership.on_open(2)


def test_a_world_that_begins_after_a_later_prepare_begins_stopped() -> None:
    membership = member_of(1, "ab")
    plan = recovery(2, "ab")
    membership.on_prepare(2)
    membership.on_recovery(plan)
    membership.report_ready(2)
    membership.on_prepare(3)
    membership.begin(plan)
    assert (membership.generation, membership.state, membership.promised) == (2, MemberState.STOPPED, 3)
    assert membership.on_recovery(recovery(3, "ab"))


# ---- planned


def test_a_member_votes_the_old_number_until_it_is_ready_and_then_the_new_one() -> None:
    membership = member_of(1, "ab")
    plan = planned(2, 1, "abC")
    assert membership.on_planned(plan) and membership.builds(plan)
    assert membership.enter_vote(ALL) == 1
    membership.leave_vote([1, 1])
    membership.on_built(2)
    assert membership.enter_vote(ALL) == 2
    assert membership.leave_vote([2, 2]) is plan
    membership.begin(plan)
    assert (membership.generation, membership.state) == (2, MemberState.TRAINING)


@rule(
    "A planned generation begins only when all members vote for it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.core.membership",
        "        if min(voted) == max(voted) > self.generation:\n",
        "        if max(voted) > self.generation:\n",
    ),
)
def test_a_planned_generation_begins_only_when_all_vote_it() -> None:
    membership = member_of(1, "ab")
    membership.on_planned(planned(2, 1, "abC"))
    membership.on_built(2)
    membership.enter_vote(ALL)
    assert membership.leave_vote([2, 1]) is None
    membership.enter_vote(ALL)
    assert membership.leave_vote([2, 3]) is None


@rule(
    "A worker does not report ready for a plan that needs a block it lacks",
    "A change of the world",
    broken_by=Edit(
        "shoal.core.membership",
        "            if rank is None or self.next.kept_by(rank) <= holds:\n",
        "            if True:\n",
    ),
)
def test_a_member_is_not_ready_for_a_plan_that_needs_a_block_it_lacks() -> None:
    membership = member_of(1, "ab")
    plan = planned(2, 1, "ab")
    membership.on_planned(plan)
    assert membership.enter_vote(NO_BLOCKS) == 1
    membership.leave_vote([1, 1])
    assert membership.enter_vote(share_of(plan, "a")) == 2


@rule(
    "A member keeps what it voted for until that vote is over",
    "A change of the world",
    broken_by=Edit(
        "shoal.core.membership", "        elif self.voting and self.voted > self.generation:\n", "        elif False:\n"
    ),
)
def test_what_a_member_voted_it_keeps_until_the_vote_is_over() -> None:
    membership = member_of(1, "ab")
    plan = planned(2, 1, "ab")
    membership.on_planned(plan)
    membership.enter_vote(ALL)
    assert not membership.on_planned(planned(3, 1, "abC"))
    assert membership.leave_vote([2, 2]) is plan


def test_a_vote_that_named_no_new_generation_leaves_room_for_a_newer_plan() -> None:
    membership = member_of(1, "ab")
    membership.on_planned(planned(2, 1, "abC"))
    membership.enter_vote(ALL)
    newer = planned(3, 1, "ab")
    assert membership.on_planned(newer)
    membership.leave_vote([1, 1])
    assert membership.enter_vote(ALL) == 3


def test_a_plan_that_begins_is_not_replaced_by_a_newer_one() -> None:
    membership = member_of(1, "ab")
    plan = planned(2, 1, "ab")
    membership.on_planned(plan)
    membership.enter_vote(ALL)
    membership.leave_vote([2, 2])
    assert not membership.on_planned(planned(3, 1, "abC"))


def test_a_plan_on_another_base_is_void() -> None:
    membership = member_of(4, "ab")
    assert not membership.on_planned(planned(6, 3, "abC"))
    assert not membership.on_planned(planned(4, 3, "abC"))
    assert membership.on_planned(planned(5, 4, "abC"))


@rule(
    "A group survives a change of generation only if its members stay the same",
    "Groups",
    broken_by=Edit(
        "shoal.core.membership",
        "        return self.plan is None or self.is_joiner or plan.members != self.plan.members",
        "        return self.plan is None or self.is_joiner",
    ),
)
def test_no_group_is_built_for_the_same_members_nor_by_one_that_is_left_out() -> None:
    membership = member_of(1, "ab")
    same, without = planned(2, 1, "ab"), planned(3, 1, "b")
    assert membership.on_planned(same) and not membership.builds(same)
    assert membership.on_planned(without) and not membership.builds(without)
    assert membership.enter_vote(NO_BLOCKS) == 3


@holds("A group survives a change")
@pytest.mark.parametrize("members", ["abc", "ac"])
def test_a_group_is_built_for_other_members(members: str) -> None:
    membership = member_of(1, "ab")
    plan = planned(2, 1, members)
    assert membership.on_planned(plan)
    assert membership.builds(plan)
    assert membership.enter_vote(ALL) == 1


def test_a_worker_that_is_left_out_has_left_and_still_stops_when_told() -> None:
    membership = member_of(1, "ab")
    plan = planned(2, 1, "b")
    membership.on_planned(plan)
    membership.enter_vote(ALL)
    membership.leave_vote([2, 2])
    membership.begin(plan)
    assert (membership.state, membership.generation) == (MemberState.LEFT, 1)
    assert membership.on_prepare(3)
    assert membership.state is MemberState.STOPPED


def test_prepare_voids_a_plan_that_was_voted_and_not_yet_begun() -> None:
    membership = member_of(1, "ab")
    membership.on_planned(planned(2, 1, "ab"))
    membership.enter_vote(ALL)
    membership.leave_vote([2, 2])
    assert membership.newest_known == 2
    assert membership.on_prepare(3)
    assert membership.begins is None and membership.generation == 1


def test_a_stopped_worker_takes_no_planned_change() -> None:
    membership = member_of(1, "ab")
    membership.on_prepare(2)
    assert not membership.on_planned(planned(3, 1, "abC"))


# ---- joiners


def test_a_joiner_that_is_not_warmed_up_is_given_no_plan() -> None:
    membership = Membership("c", "c.1")
    assert not membership.on_planned(planned(2, 1, "abC"))
    membership.on_prepare(3)
    assert not membership.on_recovery(recovery(3, "abC"))
    membership.end_warm_up()
    assert membership.on_recovery(recovery(3, "abC"))


@rule(
    "A joiner keeps every planned generation until one begins or all are void",
    "A change of the world",
    broken_by=Edit(
        "shoal.core.membership",
        "            self.kept[self.next.generation] = self.next\n",
        "            self.kept.clear()\n",
    ),
)
def test_a_joiner_keeps_every_plan_that_may_begin() -> None:
    membership = joiner("c")
    first, second = planned(2, 1, "abC"), planned(3, 1, "aC")
    assert membership.on_planned(first)
    membership.on_built(2)
    assert (membership.state, membership.promised) == (MemberState.JOINING, 2)
    assert membership.on_planned(second)
    assert membership.live == {0, 2, 3}
    membership.begin(first)
    assert (membership.generation, membership.state) == (2, MemberState.TRAINING)
    assert membership.live == {2}


def test_a_joiner_drops_the_plans_whose_base_is_no_longer_current() -> None:
    membership = joiner("c")
    membership.on_planned(planned(2, 1, "abC"))
    membership.on_planned(planned(3, 1, "aC"))
    membership.on_planned(planned(5, 2, "abC"))
    assert membership.live == {0, 2, 5}  # 2 may have begun without our having heard its first message


@holds("A group survives a change")
def test_prepare_voids_all_that_a_joiner_has_built() -> None:
    membership = joiner("c")
    membership.on_planned(planned(2, 1, "abC"))
    membership.on_built(2)
    assert membership.on_prepare(3)
    assert membership.state is MemberState.WAITING
    assert membership.live == {0}


def test_a_group_that_is_built_for_a_replaced_plan_counts_for_nothing() -> None:
    membership = member_of(1, "ab")
    membership.on_planned(planned(2, 1, "abC"))
    membership.on_planned(planned(3, 1, "abD"))
    membership.on_built(2)
    assert membership.enter_vote(ALL) == 1


def test_a_worker_that_starts_over_is_a_joiner_whose_numbers_still_grow() -> None:
    membership = member_of(7, "ab")
    membership.start_over()
    assert membership.is_joiner and membership.generation == 0 and membership.plan is None
    assert not membership.on_prepare(7)
    assert membership.newest_known == 7


@pytest.mark.parametrize("worker", ["a", "b"])
def test_another_process_with_the_same_id_is_not_in_the_plan(worker: str) -> None:
    membership = Membership(worker, "another")
    membership.end_warm_up()
    membership.on_prepare(1)
    assert not membership.on_recovery(recovery(1, "ab"))
