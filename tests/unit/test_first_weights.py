"""Between `shoal.initialize` and the loop: the job's step and loss are there, and first weights pass for no others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, engine_of, train
from crew_saves import saved
from integration.scripts import Samples
from reference import reference
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError

LATER = "Do this at the top of the loop's body or after the loop; for the first values, before shoal.initialize."


def forward(engine: Engine) -> None:
    with torch.no_grad():
        engine.module(**torch.utils.data.default_collate([Samples(8)[0], Samples(8)[1]]))


def part(engine: Engine) -> None:
    engine.module.up(torch.zeros(1, engine.module.up.in_features))


def evaluating(engine: Engine) -> None:
    with engine.evaluating():
        pass


def gathered(engine: Engine) -> None:
    with engine.gathered(engine.module.up):
        pass


READS: dict[str, Callable[[Engine], None]] = {
    "the model was called": forward,
    "the model was called ": part,
    "engine.evaluating was called": evaluating,
    "engine.gathered was called": gathered,
}


def refuses(engine: Engine, why: str) -> None:
    for call, read in READS.items():
        sentence = f"{call.strip()} before the loop, when the model has its first values: {why}"
        with pytest.raises(UserError, match=re.escape(sentence)) as refusal:
            read(engine)
        assert str(refusal.value).endswith(LATER)


def reads(engine: Engine) -> None:
    for read in READS.values():
        read(engine)


def alone(folder: Path, steps: int, **checkpoint: Any) -> tuple[Engine, Task]:
    task = Task({"max_steps": steps, "shoal": {"checkpoint": {"path": str(folder), "every_steps": 3, **checkpoint}}})
    return engine_of(task, AloneLink(), Faults([])), task


@rule(
    "Between `shoal.initialize` and the loop step and loss are those that the job goes on from; and where that may be "
    "a checkpoint, or a job that trains already, a forward, `evaluating` and `gathered` are refused: they would find "
    "the script's first weights",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.training.checkpoint_loading",
            "            self._context.found = (step, _loss_of(found))\n",
            "            pass\n",
        ),
        Edit("shoal.data.seeds", "            raise UserError(self._refusal)\n", "            pass\n"),
        Edit("shoal.guards.loop_guards", "        if self._why:\n", "        if False:\n"),
        Edit(
            "shoal.training.checkpoint_loading",
            "        elif not self._context.link.alone:\n",
            "        elif False:\n",
            by="test_a_worker_that_joins_a_job_reads_none_of_its_first_weights",
        ),
    ],
)
def test_a_script_that_goes_on_alone_finds_the_jobs_step_and_loss_before_its_loop(tmp_path: Path) -> None:
    first, task = alone(tmp_path, 3)
    assert first.global_step == 0 and math.isnan(first.loss)
    reads(first)  # it surely begins at step 0
    train(first, task, lambda: None)
    first.fingerprint()  # and its save is there
    engine, task = alone(tmp_path, 6)
    before = engine.global_step, engine.loss
    assert before == (3, first.loss)
    refuses(engine, f"this job goes on from {tmp_path}")
    seen: list[tuple[int, float]] = []

    def look(engine: Engine) -> None:
        seen.append((engine.global_step, engine.loss))
        evaluating(engine)
        gathered(engine)

    train(engine, Task(task.options, in_loop=look), lambda: None)
    assert seen[0] == before
    assert engine.fingerprint() == reference(Task({"max_steps": 6}))
    reads(engine)


def test_a_job_that_takes_a_checkpoints_tensors_alone_begins_at_step_0_with_other_weights(tmp_path: Path) -> None:
    first, task = alone(tmp_path, 3)
    train(first, task, lambda: None)
    first.fingerprint()
    options = {"max_steps": 2, "shoal": {"checkpoint": {"path": str(tmp_path), "allow": ["new", "missing"]}}}
    other = Task(options, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    engine = engine_of(other, AloneLink(), Faults([]))
    assert engine.global_step == 0 and math.isnan(engine.loss)
    refuses(engine, f"this job goes on from {tmp_path}")


def test_a_job_that_is_not_to_go_on_from_its_checkpoint_may_read_what_it_begins_with(tmp_path: Path) -> None:
    first, task = alone(tmp_path, 3)
    train(first, task, lambda: None)
    first.fingerprint()
    engine, _ = alone(tmp_path, 6, resume=False)
    assert engine.global_step == 0
    reads(engine)


@holds("Between `shoal.initialize` and the loop step")
def test_a_worker_that_joins_a_job_reads_none_of_its_first_weights() -> None:
    """Nor does one of a job's first workers: the same script joins later, and must not fail then."""
    found: list[tuple[int, float]] = []

    def look(engine: Engine) -> None:
        refuses(engine, "with a controller any worker may join a job that trains already")
        found.append((engine.global_step, engine.loss))
        engine.on_step(evaluating)

    task = Task({"max_steps": 6}, prepare=look)
    with Crew("ab", task) as crew:
        crew.train_to(3)
        loss = crew.workers["a"].engine.loss
        crew.beat(2)  # a step is told with the next heartbeat
        crew.add("c")
        crew.until("c to look", lambda: len(found) == 3)
        assert crew.finish() == reference(Task({"max_steps": 6}))
    assert found[2] == (3, loss)
    assert [step for step, _ in found[:2]] == [0, 0]


def test_a_job_whose_workers_are_all_new_begins_where_its_checkpoint_is(tmp_path: Path) -> None:
    """Not where the controller has last seen the job that is gone."""
    found: list[int] = []
    options = {"max_steps": 12, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}}
    with Crew("ab", Task(options)) as crew:
        crew.train_to(2)
        saved(crew, 2)
        crew.train_to(crew.allowed + 1)
        crew.beat(2)
        seen = crew.job.durable.step
        crew.kill("a")
        crew.kill("b")
        crew.until("nobody to be left", lambda: crew.job.durable.current is None)
        for name in "cd":
            crew.add(name, Task(options, prepare=lambda engine: found.append(engine.global_step)))
        assert crew.finish() == reference(Task({"max_steps": 12}))
        begun = [resize.from_step for resize in crew.job.durable.history if resize.reason.value == "start"]
    assert 0 < begun[1] < seen and found == [begun[1], begun[1]]
