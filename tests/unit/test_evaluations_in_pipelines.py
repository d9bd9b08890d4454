"""Evaluations by a pipeline's schedule: forwards alone, whose loss all stages get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from crew import Task, Worker, undisturbed
from pipeline_parallel import (
    MICRO_BATCHES,
    PIPELINE,
    SQUARE,
    Body,
    Fixed,
    Whole,
    in_stages,
    made_for,
    stages_of,
)
from rule import Edit, holds, rule
from shoal.cells.stages import Stages
from shoal.training.engine import Engine
from shoal.training.evaluation import batches_of
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, crew_of
from tiers import check
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SAMPLES = 11
"""Of which lanes have three or two: no multiple of the micro-batches, and other shapes than in training."""


class Evaluates(Body):
    """Trains a lane, and evaluates by the same schedule: after each step, or at the top of each batch."""

    def __init__(self, kind: Any = Schedule1F1B, at_the_top: bool = False) -> None:
        super().__init__(kind)
        self._at_the_top = at_the_top
        self.losses: dict[tuple[int, int], set[float]] = {}
        """What all members have got, by step and first sample."""
        self.reports: dict[str, list[float]] = {}
        """By worker, of each evaluation."""

    def __call__(self, engine: Engine, batch: Any) -> bool:
        if self._at_the_top:
            self.evaluate(engine)
        stepped = super().__call__(engine, batch)
        if stepped and not self._at_the_top:
            self.evaluate(engine)
            if "evaluated" in engine.reports:
                self.reports.setdefault(engine.context.link.worker, []).append(engine.reports["evaluated"])
        return stepped

    def evaluate(self, engine: Engine) -> None:
        schedule = self.schedule(engine)
        part = engine.context.state.layout.part
        with engine.evaluating():
            for batch in engine.shard(Fixed(SAMPLES)):
                inputs = (batch["tokens"],) if part.place == 0 else ()
                target = batch["targets"] if part.place == part.stages - 1 else None
                found = engine.run(schedule.eval, *inputs, target=target)
                assert found is not None
                engine.report(evaluated=found.loss)
                if engine.context.is_cell_whole:
                    first = engine.parts.evaluation.samples[0]
                    self.losses.setdefault((engine.global_step, first), set()).add(found.loss.item())
                    assert (found.output is not None) == (part.place == part.stages - 1)
                if found.output is not None:
                    engine.gather(logits=found.output.mean((1, 2)))


def task_of(shape: Shape, body: Body, turns: int = 1, **options: Any) -> CellTask:
    return replace(in_stages(CellTask({"stage": 1, **options}, shape=shape), body.kind, turns), body=body)


@cache
def undisturbed_cell(shape: Shape) -> tuple[str, tuple[float, ...]]:
    """The fingerprint of a world of one cell, and its evaluations' numbers."""
    body = Evaluates()
    with crew_of("abcdef"[: shape.processes], task_of(shape, body)) as crew:
        digest = crew.finish()
    return digest, tuple(body.reports["a"])


def test_a_short_batch_is_each_of_its_micro_batches_where_it_is_not_divided_equally() -> None:
    assert list(batches_of(range(7), 2, 2)) == [(0, [0, 1, 2, 3]), (4, [4, 5, 6, 4, 5, 6])]
    assert list(batches_of(range(6), 2, 2)) == [(0, [0, 1, 2, 3]), (4, [4, 5])]
    assert list(batches_of(range(3), 2, 1)) == [(0, [0, 1]), (2, [2])]


def gradient_descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("shape", "kind", "turns"),
    [
        (PIPELINE, Schedule1F1B, 1),
        pytest.param(PIPELINE, ScheduleGPipe, 1, marks=check("as by 1F1B")),
        pytest.param(PIPELINE, ScheduleInterleaved1F1B, 2, marks=check("as by 1F1B")),
        pytest.param(SQUARE, Schedule1F1B, 1, marks=check("as a pipeline alone")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_an_evaluation_by_a_schedule_has_the_numbers_of_the_whole_model(shape: Shape, kind: Any, turns: int) -> None:
    body = Evaluates(kind)
    options = {"micro_batches_per_lane": MICRO_BATCHES, "lanes": 4, "gradient_clipping": 0.0, "max_steps": 3}
    model = partial(stages_of, turns=turns, dropout=0.0)
    task = replace(task_of(shape, body, turns, **options), model=model, optimizer=gradient_descent)
    names = "abcdefgh"[: 2 * shape.processes]
    with crew_of(names, replace(task, data=lambda: Fixed(40))) as crew:
        crew.finish()
    assert [body.reports[name] for name in names] == [body.reports["a"]] * len(names), "all know the numbers"
    assert {len(losses) for losses in body.losses.values()} == {1}, "all stages get the loss"
    whole: list[float] = []

    def step(engine: Engine) -> None:
        if engine.step():
            with engine.evaluating():
                lanes = [engine.context.loop.collate(Fixed(SAMPLES), list(range(n, SAMPLES, 4))) for n in range(4)]
                whole.append(sum(engine.module(**batch).item() for batch in lanes) / 4)

    one = Task(options, lambda: Whole(2 * turns), gradient_descent, lambda _: None, step=step, data=lambda: Fixed(40))
    undisturbed(one)
    assert body.reports["a"] == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("at_the_top", [False, True])
@pytest.mark.parametrize("victim", ["c", pytest.param("d", marks=check("as of the first stage"))])
@pytest.mark.parametrize("names", ["abcd", pytest.param("abcdef", marks=check("as without spares"))])
@rule(
    "A schedule's evaluation ends at once where its cell breaks, and its stages shake hands anew for other shapes",
    "Cells",
    broken_by=[
        Edit("shoal.training.pipeline", "            with hub.raising():\n", "            if True:\n"),
        Edit("shoal.cells.pipelining", "known != (generation, samples)", "known is None or known[0] != generation"),
    ],
)
def test_a_process_that_is_killed_in_a_schedules_evaluation_changes_no_bit(
    names: str, victim: str, at_the_top: bool
) -> None:
    body = Evaluates(at_the_top=at_the_top)
    with crew_of(names, task_of(PIPELINE, body)) as crew:
        crew.train_to(2)
        crew.plant(victim, 4, "between")
        digest = crew.finish()
        assert not crew.workers[victim].planned, "it was killed"
    expected, reports = undisturbed_cell(PIPELINE)
    assert digest == expected
    assert {len(losses) for losses in body.losses.values()} == {1}, "all who got one got the right one"
    if not at_the_top:
        assert body.reports["a"][:2] == list(reports[:2]) and body.reports["a"][-1] == reports[-1]


@holds("A schedule's evaluation ends at once")
def test_a_process_that_is_killed_while_an_evaluations_stages_shake_hands_changes_no_bit() -> None:
    killed: list[str] = []

    def look(worker: Worker, point: str, _: int) -> None:
        pipeline = worker.engine.training.pipeline
        if worker.name == "c" and point == "between" and pipeline._evaluates and pipeline._schedules.is_shaking_hands:
            killed.append(worker.name)
            worker.killed = True

    crew = crew_of("abcd", task_of(PIPELINE, Evaluates()))
    crew.watchers.append(look)
    with crew:
        assert (crew.finish(), killed) == (undisturbed_cell(PIPELINE)[0], ["c"])


@holds("A spare is told what passes between stages")
def test_what_is_told_of_shapes_is_of_training_alone_since_evaluations_may_have_other_lengths_in_each_cell() -> None:
    with crew_of("ab", task_of(PIPELINE, Evaluates())) as crew:
        crew.finish()
        for worker in crew.workers.values():
            assert isinstance(worker.engine.module, Stages)
            assert {has_backward for _, has_backward in worker.engine.module.shapes.found} == {True}


def refused(act: Callable[[Engine], object]) -> str:
    def body(engine: Engine, _: Any) -> None:
        act(engine)

    with crew_of("ab", replace(in_stages(CellTask(shape=PIPELINE)), body=body)) as crew:
        crew.until("a refusal", lambda: any(worker.failure for worker in crew.workers.values()))
        return next(worker.failure for worker in crew.workers.values() if worker.failure)


def evaluates_outside(engine: Engine) -> None:
    engine.run(made_for(engine, Schedule1F1B).eval)


def trains_inside(engine: Engine) -> None:
    with engine.evaluating():
        engine.run(made_for(engine, Schedule1F1B).step)


def calls_it_by_itself(engine: Engine) -> None:
    with engine.evaluating():
        engine.loss_fn(lambda: torch.zeros(()))()


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (evaluates_outside, "expected the method `step` of a pipeline schedule of torch: `step` trains a lane, and `e"),
        (trains_inside, "expected the method `eval` of a pipeline schedule of torch: `step` trains a lane, and `eval`"),
        (calls_it_by_itself, "engine.loss_fn got a loss outside of training; in an evaluation call engine.run(s"),
    ],
)  # fmt: skip
def test_a_schedule_called_in_another_way_in_an_evaluation_is_refused(
    act: Callable[[Engine], object], sentence: str
) -> None:
    assert sentence in (failure := refused(act)), failure


@rule(
    "Members of a cell meet before each call of a schedule in an evaluation, too: one that only some of them enter "
    "fails the job with the places of both",
    "Cells",
    broken_by=Edit("shoal.training.pipeline", "                hub.meet(LoopPlace.EVALUATION)\n", ""),
)
def test_an_evaluation_by_one_stage_alone_fails_the_job_with_both_sentences() -> None:
    body = Evaluates()
    trains = Body()

    def of_stage_0(engine: Engine, batch: Any) -> None:
        if trains(engine, batch) and engine.global_step == 3 and engine.context.state.layout.part.place == 0:
            body.evaluate(engine)

    task = replace(in_stages(CellTask(shape=PIPELINE)), body=of_stage_0)
    with crew_of("abcd", task) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        reason, phase = crew.job.durable.reason, crew.job.durable.phase
    assert phase.value == "failed"
    assert "coordinate 0 is in an evaluation, and coordinate 1 is in engine.run;" in reason
