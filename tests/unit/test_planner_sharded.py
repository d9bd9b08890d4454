"""Sharded parameters (stage 3): nothing is handed out; in all stages a joiner trains at once and is filled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_driver import MADE_OF, training
from matrices import examples
from planning import World, candidate
from rule import Edit, holds, rule
from shoal_controller.core.planning.planner import PlanRequest, Terms, plan_recovery, plan_start
from shoal_protos.description import Description
from shoal_protos.messages import MemberState
from shoal_protos.plan import Reason
from shoal_protos.runs import NO_BLOCKS, every

TERMS = Terms(lanes=8, blocks=24, mirrors=1, mirror_partners=4, fill_blocks_per_step=4, rounds=True, sharded=True)
WHOLE = replace(TERMS, rounds=False, sharded=False)


@pytest.mark.parametrize(("terms", "handed_out"), [(TERMS, False), (WHOLE, True)])
def test_a_world_from_a_checkpoint_hands_out_parameters_only_where_all_keep_them(
    terms: Terms, handed_out: bool
) -> None:
    workers = [candidate(worker) for worker in "abc"]
    plan = plan_start(PlanRequest(terms, 1, Reason.RESTORE), workers, 7, "checkpoint-7")
    assert plan.recovery is not None
    assert [bool(stale) for stale in plan.recovery.stale] == [handed_out] * 3


def test_in_a_recovery_who_has_nothing_is_handed_nothing_and_trains() -> None:
    world = World(TERMS, "abc")
    left = [replace(world.here["a"], holds=every(24)), replace(world.here["b"], counted=False)]
    plan = plan_recovery(PlanRequest(TERMS, 2, Reason.KILL), left, world.plan, step=7, record=b"")
    assert plan.recovery is not None
    assert plan.recovery.stale == (NO_BLOCKS, NO_BLOCKS)
    assert [len(share.lanes) for share in plan.shares] == [4, 4]
    assert plan.fills, "the blocks that it is to keep"


@rule(
    "Where parameters are sharded nothing is handed out when a world opens",
    "A change of the world",
    broken_by=Edit("shoal_controller.core.planning.planner", "    if terms.sharded:\n", "    if not terms.lanes:\n"),
)
@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.data())
def test_no_recovery_ever_hands_anything_out(workers: int, lost: int, data: st.DataObject) -> None:
    names = "abcdef"[:workers]
    world = World(TERMS, names)
    left = [
        replace(world.here[name], current=data.draw(st.sampled_from((NO_BLOCKS, every(24)))))
        for name in names
        if name != names[lost % workers]
    ]
    plan = plan_recovery(PlanRequest(TERMS, 2, Reason.KILL), left, world.plan, step=7, record=b"")
    assert plan.recovery is not None
    assert not any(plan.recovery.stale)


# ---- what the machine asks


def made_of(stage: int) -> Description:
    return replace(MADE_OF, stage=stage)


@holds("Lanes of a round are consecutive")
@pytest.mark.parametrize(
    ("stage", "rounds", "sharded"), [(0, False, False), (1, False, False), (2, True, False), (3, True, True)]
)
def test_the_jobs_stage_is_in_the_terms_of_every_plan(stage: int, rounds: bool, sharded: bool) -> None:
    job = training(2, made_of=made_of(stage))
    terms = job.questions[-1].question.request.terms
    assert (terms.rounds, terms.sharded) == (rounds, sharded)


@holds("A joiner has lanes")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_joiner_has_lanes_and_is_filled_in_its_first_world(stage: int) -> None:
    job = training(2, made_of=made_of(stage), max_workers=3)
    job.hello("w2")
    job.beat("w2", state=MemberState.WAITING)
    job.wait(1)
    plan = job.job.durable.planned[-1]
    assert [member.worker for member in plan.members] == ["w0", "w1", "w2"]
    assert plan.shares[2].lanes
    assert any(fill.target == 2 for fill in plan.fills)


def test_who_has_joined_is_not_planned_for_again_before_it_has_said_so() -> None:
    job = training(2, made_of=made_of(3), max_workers=3)
    job.hello("w2")
    job.beat("w2", state=MemberState.WAITING)
    job.wait(1)
    plan = job.job.durable.planned[-1]
    for worker in ("w0", "w1"):
        job.train(worker, plan)
    job.beat("w2", generation=plan.generation, state=MemberState.TRAINING, promised=plan.generation, step=1)
    before = len(job.questions)
    job.tick()
    assert job.job.durable.current == plan
    assert len(job.questions) == before
