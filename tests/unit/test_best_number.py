"""What follows from the best number: a stop, an export, once, at the same step in every world and through kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, Worker, engine_of, train
from crew_saves import saved
from idle_members import answering
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.callbacks import EarlyStopping, SaveBest, best_number
from shoal.group.group import WorldChanged
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError

NUMBERS = {2: 0.5, 4: 0.25, 6: 0.75, 8: 0.3, 10: 0.1}
"""What evaluations find, by the step after which they take place."""


def step_and_evaluate(engine: Engine) -> None:
    if engine.step() and engine.global_step in NUMBERS:
        with engine.evaluating():
            for _ in engine.shard(range(8)):
                engine.report(score=NUMBERS[engine.global_step])


def task(*callbacks: Any, steps: int = 12) -> Task:
    def prepare(engine: Engine) -> None:
        for callback in callbacks:
            engine.on_step(callback())

    return Task({"max_steps": steps, "shoal": {"micro_batches_per_lane": 1}}, step=step_and_evaluate, prepare=prepare)


def alone(one: Task) -> Engine:
    with ONE_AT_A_TIME:
        engine = engine_of(one, AloneLink(), Faults([]))
        train(engine, one, lambda: None)
        return engine


def stops() -> EarlyStopping:
    return EarlyStopping("score", patience=2)


@rule(
    "What follows from the best number is decided on every worker, from numbers that all have, once for each "
    "step; how often it was no better is in checkpoints and given to joiners",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.callbacks.best_number",
            '        engine.register_state(f"{type(self).__name__} {self.number}", self)\n',
            "",
        ),
        Edit("shoal.callbacks.best_number", "        if step == self.step:\n            return\n", ""),
        Edit(
            "shoal.callbacks.best_number",
            '            self.load_state_dict({"step": 0, "best_step": 0, "worse": 0, "best": None})  # it '
            "started over\n",
            "            return\n",
        ),
        Edit(
            "shoal.callbacks.best_number",
            "_of_the_step(engine).get(self.number)",
            "engine.reports.get(self.number)",
            by="test_what_was_measured_after_a_step_counts_once_for_a_member_that_still_owes_the_step",
        ),
    ],
)
def test_a_job_stops_when_a_number_was_no_better_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    """0.25 after step 4 is the best; 0.75 and 0.3 follow. The second one is known at once, and the step
    that follows is the last.
    """
    assert alone(task(stops)).global_step == 9
    [line] = [line for line in capsys.readouterr().err.splitlines() if "early_stopping" in line]
    assert '"best": 0.25' in line and '"best_step": 4' in line


@holds("What follows from the best number")
@pytest.mark.parametrize(("victim", "step", "point"), [("a", 9, "vote"), ("a", 8, "hand_out"), ("b", 7, "exchange")])
def test_it_stops_at_the_same_step_through_a_kill_and_a_join(victim: str, step: int, point: str) -> None:
    right = alone(task(stops)).fingerprint()
    with Crew("abc", task(stops)) as crew:
        crew.train_to(5)
        crew.add("d")
        crew.plant(victim, step, point)
        assert crew.finish() == right
        assert crew.job.durable.step == 9


@holds("What follows from the best number")
def test_a_job_that_goes_on_from_a_checkpoint_knows_how_often_it_was_no_better(tmp_path: Path) -> None:
    checkpoint = {"checkpoint": {"path": str(tmp_path)}, "micro_batches_per_lane": 1}

    def once(steps: int) -> Engine:
        plain = task(stops)
        one = Task({"max_steps": steps, "shoal": checkpoint}, step=plain.step, prepare=plain.prepare)
        with ONE_AT_A_TIME:
            engine = engine_of(one, AloneLink(), Faults([]))
            train(engine, one, lambda: None)
            engine.save_checkpoint()
            return engine

    assert once(7).global_step == 7
    assert once(12).global_step == 9


@holds("What follows from the best number")
def test_a_checkpoint_has_the_judgement_of_its_own_steps_loss(tmp_path: Path) -> None:
    """Who goes on from it does not come by that step again."""
    callbacks: dict[str, EarlyStopping] = {}

    def prepare(engine: Engine) -> None:
        callbacks[engine.context.link.worker] = callback = EarlyStopping(patience=99, mode="max")
        engine.on_step(callback)

    def of(steps: int) -> Task:
        checkpoint = {"path": str(tmp_path), "every_steps": 3}
        return Task({"max_steps": steps, "shoal": {"checkpoint": checkpoint}}, prepare=prepare)

    with Crew("ab", of(9)) as crew:
        crew.train_to(4)
        saved(crew, 3)
        for name in "ab":
            crew.kill(name)
        crew.until("all to be lost", lambda: crew.job.durable.current is None)
        for name in "cd":
            crew.add(name)
        crew.finish()
    alone(Task({"max_steps": 9}, prepare=prepare))
    assert callbacks["c"].state_dict() == callbacks["d"].state_dict() == callbacks["w0"].state_dict()
    assert callbacks["w0"].worse > 5


@holds("What follows from the best number")
def test_what_was_measured_after_a_step_counts_once_for_a_member_that_still_owes_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member without lanes has not come to the boundary when the others measure; then one of them dies."""
    monkeypatch.setattr("crew.answer", answering({"d"}))
    callbacks: dict[str, EarlyStopping] = {}
    struck: list[int] = []

    def prepare(engine: Engine) -> None:
        callbacks[engine.context.link.worker] = callback = EarlyStopping("score", patience=99)
        engine.on_step(callback)

    def step(engine: Engine) -> None:
        if engine.step():
            with engine.evaluating():
                for _ in engine.shard(range(8)):
                    engine.report(score=1.0)

    def strike(worker: Worker, point: str, step: int) -> None:
        context = worker.engine.context
        is_standby = context.world is not None and not context.lanes and context.begins is None
        if (worker.name, point, struck) == ("d", "hand_out", []) and is_standby:
            struck.append(step)
            survivors = [crew.workers[name].engine.parts.evaluation for name in "ab"]
            worker.wait(lambda: all(one.measured.numbers for one in survivors))
            crew.workers["c"].killed = True
            raise WorldChanged("the connection to c broke")

    with Crew("abc", Task({"max_steps": 12}, step=step, prepare=prepare)) as crew:
        crew.watchers.append(strike)
        crew.train_to(2)
        crew.add("d")
        crew.finish()
    assert struck and callbacks["a"].worse == 11
    assert callbacks["d"].state_dict() == callbacks["b"].state_dict() == callbacks["a"].state_dict()


@holds("What follows from the best number")
def test_the_best_weights_are_exported_each_time_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[int] = []
    real = SaveBest.on_best

    def note(self: SaveBest, engine: Engine) -> None:
        if engine.rank == 0:
            exported.append(engine.global_step)
        real(self, engine)

    monkeypatch.setattr(SaveBest, "on_best", note)
    weights: dict[int, torch.Tensor] = {}

    def keep(engine: Engine) -> None:
        weights[engine.global_step] = engine.module.get_parameter("up.weight").detach().clone()

    path = tmp_path / "best.safetensors"
    with Crew("abc", task(lambda: SaveBest(path, "score"), lambda: keep)) as crew:
        crew.finish()
    assert exported == [2, 4, 10]
    assert torch.equal(load_file(path)["up.weight"], weights[10])


class Stand:
    """What a callback reads of an engine."""

    global_step, loss, rank = 0, 1.0, 1


@holds("What follows from the best number")
def test_a_step_whose_boundary_is_run_again_counts_once() -> None:
    stand, stopping = Stand(), EarlyStopping(patience=5)
    for step in (1, 2, 2, 3):
        stand.global_step = step
        stopping(stand)  # type: ignore[arg-type]
    assert stopping.worse == 2


@holds("What follows from the best number")
def test_a_job_that_starts_over_begins_anew() -> None:
    stand, stopping = Stand(), EarlyStopping(patience=5)
    for step in (1, 2, 3, 1):
        stand.global_step = step
        stopping(stand)  # type: ignore[arg-type]
    assert stopping.state_dict() == {"step": 1, "best_step": 1, "worse": 0, "best": 1.0}


def test_values_that_are_not_allowed_are_one_sentence() -> None:
    with pytest.raises(UserError, match="EarlyStopping: mode is 'low'; allowed are min, max"):
        EarlyStopping(mode="low")
    with pytest.raises(UserError, match="patience is 0; expected a number from 1"):
        EarlyStopping(patience=0)
    assert set(best_number.BETTER) == {"min", "max"}


def test_a_learning_rate_finder_is_refused() -> None:
    """It keeps the optimizer's state, and steps it itself."""

    def find(engine: Engine) -> None:
        optimizer = engine.context.state.optimizer
        numbers = torch.zeros(2, 16, dtype=torch.int64)
        engine.module(numbers, numbers).backward()
        optimizer.step()

    with pytest.raises(UserError, match=r"optimizer\.step"):
        alone(Task({"max_steps": 1}, prepare=find))
