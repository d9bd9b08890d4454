"""Evaluations of lanes that are trained by cells of two workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crew import Task, undisturbed
from integration.scripts import Samples
from rule import Edit, rule
from shoal.training.engine import Engine
from tensor_parallel import CellTask, Whole, crew_of, partners
from tiers import check

Found = dict[str, list[dict[str, float]]]
"""By worker, what it has seen of each evaluation."""


def worker_of(engine: Engine) -> str:
    return engine.context.link.worker


def evaluate(engine: Engine) -> None:
    with engine.evaluating():
        for batch in engine.shard(Samples(11)):
            loss = engine.module(**batch)
            engine.report(evaluated=loss)
            engine.gather(loss=loss.expand(len(batch["tokens"])).clone())


def after_each_step(engine: Engine, batch: Any, evaluate: Callable[[Engine], None]) -> None:
    engine.backward(engine.module(**batch))
    if engine.step():
        evaluate(engine)


def test_evaluations_have_the_numbers_of_the_whole_model_in_one_process() -> None:
    found: Found = {}

    def look(engine: Engine) -> None:
        evaluate(engine)
        found.setdefault(worker_of(engine), []).append(dict(engine.reports))

    def after(engine: Engine) -> None:
        look(engine)
        assert engine.gathers["sample"].tolist() == list(range(11))

    seen = {}
    for names in ("ab", "abcde"):
        found.clear()
        with crew_of(names, CellTask(body=lambda e, b: after_each_step(e, b, look), after=after)) as crew:
            crew.finish()
        assert [numbers[-1] for numbers in found.values()] == [found["a"][-1]] * len(names), "after the loop all know"
        assert found["a"] == found["b"] and len(found["a"]) == 7
        seen[names] = [one["evaluated"] for one in found["a"]]
    assert seen["ab"] == seen["abcde"]
    whole: list[float] = []

    def one_process(engine: Engine) -> None:
        if engine.step():
            evaluate(engine)
            whole.append(engine.reports["evaluated"])

    undisturbed(Task({"lanes": 4, "max_steps": 6}, Whole, scheduler=lambda _: None, step=one_process))
    assert seen["ab"][:6] == pytest.approx(whole, abs=1e-5)


PARTNERS = 2.0


def count_partners(engine: Engine) -> None:
    """Reports how many have taken part in its collectives, which an answer from here has wrong."""
    with engine.evaluating():
        for batch in engine.shard(Samples(16)):
            engine.module(**batch)
            count = partners(engine)
            engine.report(partners=count)
            engine.gather(partners=count.expand(len(batch["tokens"])).clone())


def counts(engine: Engine, found: list[float]) -> None:
    count_partners(engine)
    found.append(engine.reports.get("partners", PARTNERS))


def at_the_top(engine: Engine, batch: Any, evaluate: Callable[[Engine], None]) -> None:
    evaluate(engine)
    engine.backward(engine.module(**batch))
    engine.step()


@pytest.mark.parametrize("body", [after_each_step, at_the_top])
@pytest.mark.parametrize("names", ["abcd", pytest.param("abcdef", marks=check("as without spares"))])
@pytest.mark.parametrize("killed", ["c", "d"])
@rule(
    "What a member of a cell has found in an evaluation after its cell broke is in no result",
    "Cells",
    broken_by=[
        Edit(
            "shoal.training.evaluation",
            "        if self._context.is_cell_whole:\n            for",
            "        if True:\n            for",
        ),
        Edit(
            "shoal.training.evaluation",
            "        if self._context.is_cell_whole:\n            self",
            "        if True:\n            self",
        ),
    ],
)
def test_what_is_answered_here_in_an_evaluation_is_in_no_result(
    body: Callable[[Engine, Any, Callable[[Engine], None]], None], names: str, killed: str
) -> None:
    found: list[float] = []

    def look(engine: Engine) -> None:
        counts(engine, found)
        found.extend(engine.gathers.get("partners", torch.full((1,), PARTNERS)).tolist())

    task = CellTask(body=lambda engine, batch: body(engine, batch, look), after=look)
    with crew_of(names, task) as crew:
        crew.train_to(2)
        crew.plant(killed, 4, "between")
        crew.finish()
        assert not crew.workers[killed].planned
    assert set(found) == {PARTNERS}


@pytest.mark.parametrize(
    "point", ["vote", *(pytest.param(one, marks=check("as vote")) for one in ("in_vote", "mirror"))]
)
@pytest.mark.parametrize("killed", ["d", pytest.param("a", marks=check("as d"))])
def test_a_callback_of_evaluations_hears_each_once_on_every_member(killed: str, point: str) -> None:
    """A spare one too, which is told at another place of its loop than those who have evaluated."""
    hearings: dict[str, list[tuple[int, float]]] = {}

    def prepare(engine: Engine) -> None:
        def look(now: Engine) -> None:
            hearings.setdefault(worker_of(now), []).append((now.global_step, now.reports["evaluated"]))

        engine.on_evaluation(look)

    task = CellTask(body=lambda engine, batch: after_each_step(engine, batch, evaluate), prepare=prepare)
    with crew_of("ab", task) as crew:
        digest = crew.finish()
    expected = hearings["a"]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6] and hearings["b"] == expected
    hearings.clear()
    with crew_of("abcde", task) as crew:
        crew.train_to(2)
        crew.plant(killed, 4, point)
        assert crew.finish() == digest
        assert not crew.workers[killed].planned
    del hearings[killed]
    assert hearings == dict.fromkeys(set("abcde") - {killed}, expected)


@pytest.mark.parametrize("verb", ["on_evaluation", "on_step", "on_commit"])
@rule(
    "A collective in a function that members of a cell call at different places of their loops is refused",
    "Cells",
    broken_by=Edit("shoal.cells.hub", "        if self._callbacks:\n", "        if False:\n"),
)
def test_a_collective_in_a_callback_fails_the_job_with_one_sentence(verb: str) -> None:
    """A spare that takes a lost member's place hears of an evaluation before its vote, its partner at the end of it."""

    def prepare(engine: Engine) -> None:
        getattr(engine, verb)(forward)

    task = CellTask(body=lambda engine, batch: after_each_step(engine, batch, evaluate), prepare=prepare)
    with crew_of("abcde", task) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
    reason = crew.job.durable.reason
    assert crew.job.durable.phase.value == "failed"
    assert "a collective (all_reduce) is made in a function that engine.on_step, on_evaluation or on_commit" in reason


@rule(
    "After the loop an evaluation that no member had entered when a cell broke has its numbers",
    "Cells",
    broken_by=[
        Edit(
            "shoal.training.evaluation",
            "            if self._entered > self._broken:\n                context.hub.begin_lane()",
            "            pass",
        ),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_a_process_that_is_killed_in_an_evaluation_after_the_loop_spoils_that_one_alone(waits: bool) -> None:
    """Where one had not seen the end of a vote it spoils all: nothing hangs."""
    found: dict[str, list[float]] = {}
    come = set[str]()

    def after(engine: Engine) -> None:
        with crew.changed:
            come.add(worker_of(engine))
            if waits:
                crew.workers[worker_of(engine)].wait(lambda: len(come) == 6)
        for name in ("first", "second"):
            with engine.evaluating():
                for batch in engine.shard(Samples(16)):
                    engine.module(**batch)
                    engine.report(**{name: partners(engine)})
        found[worker_of(engine)] = [engine.reports.get("first", PARTNERS), engine.reports.get("second", 0.0)]

    with crew_of("abcdef", CellTask(after=after)) as crew:
        crew.train_to(5)
        crew.plant("d", 7, "between")
        crew.finish()
        assert not crew.workers["d"].planned
    assert {first for first, _ in found.values()} == {PARTNERS} and len(found) == 5
    assert {second for _, second in found.values()} <= ({PARTNERS} if waits else {PARTNERS, 0.0})


def forward(engine: Engine) -> None:
    with torch.no_grad():
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        engine.module(tokens, tokens)  # of the shapes that lanes have


@pytest.mark.parametrize(
    ("act", "where"), [(evaluate, "in an evaluation"), (forward, "between engine.step and the next batch")]
)
@rule(
    "Collectives that only some members of a cell make between two micro-batches fail the job in any step, with the "
    "sentences of both",
    "Cells",
    broken_by=[
        Edit("shoal.cells.hub", "        return is_first or self", "        return self"),
        Edit(
            "shoal.training.context",
            "self.hub.evaluating() if self.hub is not None else NOTHING",
            "nullcontext()",
        ),
    ],
)
def test_an_evaluation_by_one_coordinate_alone_fails_the_job_in_a_later_step_too(
    act: Callable[[Engine], None], where: str
) -> None:
    """As `if dist.get_rank() == 0:` has it, where the shapes are those of the next lane."""

    def of_coordinate_0(engine: Engine) -> None:
        if engine.global_step == 4 and worker_of(engine) in "ac":
            act(engine)

    with crew_of("abcd", CellTask(body=lambda e, b: after_each_step(e, b, of_coordinate_0))) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        reason, step = crew.job.durable.reason, crew.job.durable.step
    assert crew.job.durable.phase.value == "failed" and step == 4
    assert re.search(rf"coordinate 0 makes all_reduce .*, {where}, and coordinate 1 all_reduce .*, in a lane;", reason)
