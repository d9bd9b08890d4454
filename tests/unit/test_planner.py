"""The planner by example: what each kind of change moves, who is promoted, who may leave, what a plan says besides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import World, candidate, transfers
from rule import Edit, holds, rule
from shoal_controller.core.planning.planner import (
    BlocksLost,
    PlanRequest,
    Terms,
    plan_change,
    plan_recovery,
    plan_start,
    same_world,
)
from shoal_protos.plan import EVERYONE, Plan, Reason
from shoal_protos.runs import NO_BLOCKS, Runs, every, union

TERMS = Terms(lanes=8, blocks=24, mirrors=1, mirror_partners=4, fill_blocks_per_step=2)


def world(workers: str, mirrors: int = 1, blocks: int = 24, **domains: str) -> World:
    return World(replace(TERMS, mirrors=mirrors, blocks=blocks), workers, domains)


def owned(world: World) -> list[int]:
    return [len(share.owned) for share in world.plan.shares]


def mirrored(world: World) -> list[int]:
    return [len(share.mirrored) for share in world.plan.shares]


# ---- a start


def test_a_start_reaches_the_target_at_once() -> None:
    abc = world("abc")
    abc.check_at_rest()
    assert (owned(abc), mirrored(abc), transfers(abc.plan)) == ([8, 8, 8], [8, 8, 8], 0)
    assert (abc.plan.base, abc.plan.generation, abc.plan.builder) == (0, 1, 0)


def test_a_start_gives_long_runs() -> None:
    shares = world("abcd", blocks=2400).plan.shares
    assert [len(share.owned.spans) for share in shares] == [1, 1, 1, 1]
    assert all(len(share.mirrored.spans) <= 3 for share in shares)


def test_a_start_counts_everybody_and_a_restore_nobody() -> None:
    candidates = [candidate("a"), candidate("b")]
    start = plan_start(PlanRequest(TERMS, 1, Reason.START), candidates)
    assert start.recovery is not None
    assert start.recovery.counted == (True, True)
    restored = plan_start(PlanRequest(TERMS, 9, Reason.RESTORE), candidates, step=40, checkpoint="/checkpoints/40")
    assert restored.recovery is not None
    assert restored.recovery.counted == (False, False)
    assert (restored.recovery.step, restored.recovery.checkpoint) == (40, "/checkpoints/40")


def test_ranks_are_in_the_order_of_joining() -> None:
    plan = plan_start(PlanRequest(TERMS, 1, Reason.START), [candidate("c"), candidate("a"), candidate("b")])
    assert [member.worker for member in plan.members] == ["a", "b", "c"]


# ---- a loss


@holds("Only a worker that holds")
def test_mirrors_are_promoted_without_moving_a_byte_each_survivor_for_its_share() -> None:
    abcd = world("abcd")
    lost = abcd.plan.shares[3]
    before = {member.worker: share for member, share in zip(abcd.plan.members, abcd.plan.shares, strict=True)}
    plan = abcd.kill("d")
    promoted = [share.owned & lost.owned for share in plan.shares]
    assert [len(blocks) for blocks in promoted] == [2, 2, 2]
    for member, share, blocks in zip(plan.members, plan.shares, promoted, strict=True):
        assert blocks <= before[member.worker].mirrored
        assert before[member.worker].owned <= share.owned, "owners that are here stay owners"


def test_a_loss_is_refilled_with_exactly_the_copies_that_were_lost() -> None:
    abcd = world("abcd")
    assert transfers(abcd.kill("d")) == 12
    abcd.fill()
    assert transfers(abcd.promote()) == 0
    abcd.check_at_rest()


def test_with_two_mirrors_two_may_be_lost_at_once() -> None:
    abcd = world("abcd", mirrors=2)
    plan = abcd.kill("a", "b")
    assert union(share.owned for share in plan.shares) == every(24)
    abcd.settle()
    abcd.check_at_rest()


def test_blocks_without_a_live_copy_are_named() -> None:
    abcd = world("abcd")
    share = {member.worker: share for member, share in zip(abcd.plan.members, abcd.plan.shares, strict=True)}
    lost = (share["a"].owned & share["b"].mirrored) | (share["b"].owned & share["a"].mirrored)
    with pytest.raises(BlocksLost, match="4 of 24 blocks have no live copy") as failure:
        abcd.kill("a", "b")
    assert failure.value.blocks == lost


def test_who_does_not_count_keeps_nothing_and_gets_all_parameters_again() -> None:
    abc = world("abc")
    survivors = [replace(known, current=every(24)) for known in abc.here.values()]
    survivors[1] = replace(survivors[1], counted=False)
    plan = plan_recovery(PlanRequest(TERMS, 2, Reason.KILL), survivors, abc.plan, step=5, record=b"vote")
    assert plan.recovery is not None
    assert (plan.recovery.counted, plan.recovery.record) == ((True, False, True), b"vote")
    assert (plan.shares[1].keeps, plan.recovery.stale[1]) == (NO_BLOCKS, every(24))


def test_parameters_are_handed_out_again_where_neither_they_nor_the_state_are_right() -> None:
    abc = world("abc")
    survivors = [replace(known, current=known.holds) for known in abc.here.values()]
    survivors[0] = replace(survivors[0], current=every(20))
    plan = plan_recovery(PlanRequest(TERMS, 2, Reason.KILL), survivors, abc.plan, step=5, record=b"")
    assert plan.recovery is not None
    for survivor, share, stale in zip(survivors, plan.shares, plan.recovery.stale, strict=True):
        assert stale == every(24) - survivor.current - share.keeps


def test_a_lane_in_flight_stays_with_its_worker() -> None:
    plan = world("abcd").kill("a", lanes={"b": 7, "d": 0})
    assert [7 in plan.shares[0].lanes, 0 in plan.shares[2].lanes] == [True, True]


def test_the_group_is_built_over_the_oldest_that_stays_and_has_not_failed() -> None:
    here = [candidate(worker, every(24)) for worker in "abc"]
    base = plan_start(PlanRequest(TERMS, 1, Reason.START), here)
    leaving = [replace(here[0], leaving=True), *here[1:]]
    builders = [
        plan_change(PlanRequest(TERMS, 2, Reason.BALANCE, frozenset(avoid)), candidates, base).builder
        for candidates, avoid in ((here, ""), (here, "a"), (here, "ab"), (here, "abc"), (leaving, ""))
    ]
    assert builders == [0, 1, 2, 0, 0]


# ---- a join


def test_a_joiner_gets_lanes_at_once_and_is_filled_with_exactly_its_share() -> None:
    abc = world("abc")
    plan = abc.join("d")
    assert [share.lanes for share in plan.shares] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert plan.shares[3].keeps == NO_BLOCKS
    assert {fill.target for fill in plan.fills} == {3}
    assert transfers(plan) == 12
    abc.fill()
    assert transfers(abc.promote()) == 0
    assert (owned(abc), mirrored(abc)) == ([6, 6, 6, 6], [6, 6, 6, 6])
    assert abc.settle() is abc.plan


def test_all_send_their_part_of_what_a_joiner_is_filled_with() -> None:
    abc = world("abc")
    plan = abc.join("d")
    sent = [sum(len(fill.blocks) for fill in plan.fills if fill.source == rank) for rank in range(3)]
    assert sent == [4, 4, 4]


def test_two_joiners_at_once_are_filled_with_no_more_than_their_shares() -> None:
    ab = world("ab", blocks=60)
    assert transfers(ab.join("c", "d")) == 60
    ab.settle()
    ab.check_at_rest()
    assert ab.unevenness() <= 1


def test_what_has_been_filled_is_not_filled_again_by_the_next_plan() -> None:
    abc = world("abc")
    whole = transfers(abc.join("d"))
    abc.fill(boundaries=1)
    arrived = len(abc.here["d"].holds)
    assert 0 < arrived < whole
    assert transfers(abc.promote()) == whole - arrived


# ---- a drain


@rule(
    "Who leaves trains as long as its blocks have not all their copies elsewhere, and no longer; where lanes are few, "
    "those who stay have them",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.planner",
            "[worker for worker in leaving if worker in needed]",
            "leaving",
        ),
        Edit(
            "shoal_controller.core.planning.planner",
            "[: max(0, most - len(trainers))]",
            "",
            by="test_who_leaves_has_no_lane_that_another_could_have",
        ),
    ],
)
def test_a_leaving_worker_stays_and_trains_until_its_blocks_have_all_their_copies_elsewhere() -> None:
    abcd = world("abcd")
    lanes = [share.lanes for share in abcd.plan.shares]
    plan = abcd.drain("d")
    assert (plan.world_size, [share.lanes for share in plan.shares], plan.shares[3].owned) == (4, lanes, NO_BLOCKS)
    assert plan.shares[3].mirrored == abcd.plans[0].shares[3].keeps, "it mirrors what has no other mirror yet"
    assert transfers(plan) == 12
    abcd.fill(boundaries=1)
    assert abcd.promote().world_size == 4
    abcd.fill()
    plan = abcd.promote()
    assert [member.worker for member in plan.members] == ["a", "b", "c"]
    assert sorted(len(share.lanes) for share in plan.shares) == [2, 3, 3]
    abcd.check_at_rest()


@holds("Who leaves trains as long as")
def test_who_leaves_has_no_lane_that_another_could_have() -> None:
    many = World(replace(TERMS, lanes=3), "abc")
    many.drain("a")
    assert [len(share.lanes) for share in many.plan.shares] == [1, 1, 1]
    assert [len(share.lanes) for share in many.join("d").shares] == [0, 1, 1, 1]


def test_a_leaving_worker_goes_at_once_where_everybody_mirrors_everything() -> None:
    assert world("abc", mirrors=EVERYONE).drain("b").world_size == 2


def test_a_joiner_that_leaves_before_it_is_filled_goes_at_once() -> None:
    abc = world("abc")
    abc.join("d")
    assert abc.drain("d").world_size == 3


def test_the_last_one_stays_though_it_is_leaving() -> None:
    alone = world("ab")
    alone.kill("b")
    plan = alone.drain("a")
    assert (plan.world_size, plan.shares[0].owned, len(plan.shares[0].lanes)) == (1, every(24), 8)


def test_the_last_one_is_relieved_by_a_joiner() -> None:
    alone = world("a")
    alone.drain("a")
    plan = alone.join("b")
    assert (plan.shares[0].owned, [share.lanes for share in plan.shares]) == (
        every(24), [(0, 1, 2, 3), (4, 5, 6, 7)],
    )  # fmt: skip
    assert transfers(plan) == 24
    alone.fill()
    assert [member.worker for member in alone.promote().members] == ["b"]


def test_two_may_leave_at_once() -> None:
    abcd = world("abcd")
    abcd.drain("a", "b")
    abcd.settle()
    assert [member.worker for member in abcd.plan.members] == ["c", "d"]
    abcd.check_at_rest()


def test_one_who_must_not_leave_yet_cannot_be_left_out() -> None:
    alone = world("a")
    base = alone.plan
    with pytest.raises(BlocksLost):
        plan_change(PlanRequest(TERMS, 2, Reason.DRAIN), [candidate("b")], base)


# ---- wishes


def test_copies_lie_in_other_failure_domains() -> None:
    four = world("abcd", a="left", b="left", c="right", d="right")
    four.check_at_rest()
    four.join("e")
    four.settle()
    four.check_at_rest()


def test_a_worker_alone_in_its_domain_mirrors_all_that_others_own() -> None:
    three = world("abc", a="left", b="left", c="right")
    assert (owned(three), mirrored(three)) == ([8, 8, 8], [4, 4, 16])


def test_a_plan_says_who_shares_a_host_and_gives_it_lanes_that_add_up() -> None:
    plan = World(replace(TERMS, lanes=4), "abcd", {"a": "left", "b": "right", "c": "left", "d": "right"}).plan
    assert plan.hosts == (0, 1, 0, 1)
    assert [share.lanes for share in plan.shares] == [(0,), (2,), (1,), (3,)]


def test_a_plan_names_no_hosts_where_all_workers_share_one_or_none_do() -> None:
    assert World(TERMS, "abc").plan.hosts == ()
    assert World(TERMS, "abc", dict.fromkeys("abc", "one")).plan.hosts == ()


def test_mirrors_are_never_more_than_there_are_others() -> None:
    assert mirrored(world("ab", mirrors=5)) == [12, 12]
    assert mirrored(world("a", mirrors=5)) == [0]
    assert mirrored(world("abc", mirrors=0)) == [0, 0, 0]


def test_more_workers_than_lanes_or_blocks_are_standbys_or_own_nothing() -> None:
    plan = World(replace(TERMS, lanes=2, blocks=3), "abcd").plan
    assert [len(share.lanes) for share in plan.shares] == [1, 1, 0, 0]
    assert sorted(len(share.owned) for share in plan.shares) == [0, 1, 1, 1]


def test_pausing_changes_nothing_but_whether_steps_run() -> None:
    abc = world("abc")
    paused = plan_change(PlanRequest(replace(TERMS, steps=False), 2, Reason.BALANCE), list(abc.here.values()), abc.plan)
    assert paused.shares == abc.plan.shares
    assert (paused.steps, same_world(paused, abc.plan)) == (False, False)
    assert same_world(replace(paused, steps=True), abc.plan)


def _base() -> Plan:
    return plan_start(PlanRequest(TERMS, 1, Reason.START), [candidate("z")])


def test_blocks_with_the_fewest_copies_are_filled_first() -> None:
    here = [candidate("a", every(24)), candidate("b", Runs(((0, 12),))), candidate("c")]
    plan = plan_change(PlanRequest(TERMS, 2, Reason.KILL), here, _base())
    first = next(fill for fill in plan.fills if fill.source == 0)
    assert first.blocks <= Runs(((12, 24),))
