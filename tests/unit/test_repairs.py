"""Repair first: blocks that a loss has left one copy of get the second one soon, and people see it being made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from crew import Crew, Task, Worker
from machine_driver import MADE_OF, Driver, training
from reference import reference
from rule import Edit, holds, rule
from shoal.training.monitoring import show
from shoal_protos.acts import DrainWorker
from shoal_protos.messages import MemberState, Telemetry
from shoal_protos.plan import Reason


def timed(job: Driver, seconds: float) -> None:
    """All say how long their steps take."""
    for worker in tuple(job.connections):
        job.beat(worker, telemetry=Telemetry(step_seconds=seconds))


@rule(
    "Fills that bring second copies take half of a step's time, and begin at the first boundary after a loss, with 4 "
    "MiB of a source at most",
    "A change of the world",
    broken_by=(
        Edit(
            "shoal_controller.core.planning.planner",
            "    if not (terms.repair_blocks_per_step and plan.second_copies):",
            "    if True:",
        ),
        Edit(
            "shoal_controller.core.machine.phases.planner_questions",
            "FIRST_REPAIR_BYTES // max(1, description.state_bytes)",
            "0",
        ),
    ),
)
@pytest.mark.parametrize("mirrors", [0, 1, 2])
def test_after_a_loss_second_copies_come_first_and_fast(mirrors: int) -> None:
    """Of one mirror a loss leaves single copies; of two it leaves two copies, and without mirrors none is wanted."""
    made_of = replace(MADE_OF, blocks=1024, state_bytes=1 << 19)
    job = training(4, mirrors, made_of)
    timed(job, 0.4)
    if not mirrors:
        job.feed(DrainWorker("w3", 300.0))
        plan = job.job.durable.planned[-1]
        assert plan.second_copies and plan.fill_blocks_per_step == int(0.1 * 0.4 * 250e6) >> 19
        return
    job.die("w3")
    for worker, status in tuple(job.statuses.items()):
        if worker in job.connections:
            job.stop(worker, status)
            timed(job, 0.4)
    plan = job.planned()
    assert plan.recovery is not None and plan.fills
    share, first = (0.5, 8) if mirrors == 1 else (0.1, 0)
    assert plan.fill_blocks_per_step == int(share * 0.4 * 250e6) >> 19
    assert plan.recovery.first_fill_blocks == first
    for member in plan.members:
        job.beat(member.worker, state=MemberState.READY, promised=plan.generation)
    sentence = f"repairs: {len(plan.second_copies)} blocks with one copy, so steps may take half as long again"
    assert (sentence in job.view.reason) == (mirrors == 1)
    for member in plan.members:
        job.train(member.worker, plan, plan.boundaries)
    assert "repairs" not in job.view.reason


@holds("At the first boundary after a loss a source sends")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_repair_begins_beside_the_first_step_and_its_steps_say_so(
    stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice is a few of the blocks of each source."""
    lines: dict[str, Any] = {"precision": {"steps_per_print": 1}}
    options = {"max_steps": 12, "stage": stage, "shoal": {"fill_bytes_per_step": 100_000}}
    task = Task({**options, **lines}, prepare=show)
    slices: list[tuple[int, int, int]] = []
    """Of each slice of the repair: its boundary, the step then, and how many fills are in it."""

    def look(worker: Worker, point: str, step: int) -> None:
        context = worker.engine.context
        plan = context.world.plan if context.world is not None else None
        if plan is not None and plan.reason is Reason.KILL and point == "vote" and context.boundaries < plan.boundaries:
            slices.append((context.boundaries, step, len(plan.fill_slice(context.boundaries))))

    expected = reference(Task(options))
    with Crew("abc", task) as crew:
        crew.watchers.append(look)
        crew.train_to(3)
        crew.kill("c")
        assert crew.finish() == expected
    assert {boundary for boundary, _, fills in slices if fills} == {0, 1}, "the first is sent beside the first vote"
    logs = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [blocks] = {line["second_copies"] for line in logs if line["event"] == "world"} - {0}
    repairing = {line["step"]: line.get("repairs") for line in logs if line["event"] == "progress"}
    assert {repairing[step] for boundary, step, _ in slices if boundary} == {blocks}
    assert repairing[2] is None and repairing[12] is None
