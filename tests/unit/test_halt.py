"""A job that halts: the vote that says so commits nothing, so it ends with the step before, on all members alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from rule import Edit, holds, rule
from shoal.exchange.ballot import HALT
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine


def halting(*askers: str) -> Callable[[Engine], None]:
    """Asks after the third step; on all workers where none is named."""

    def in_loop(engine: Engine) -> None:
        if engine.global_step == 3 and (not askers or engine.context.link.worker in askers):
            engine.training.ask(HALT, "this test")

    return in_loop


def values(task: Task) -> dict[str, Any]:
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        assert engine.global_step == 3
        rates = [group["lr"] for group in engine.context.state.optimizer.param_groups]
        return {**{name: value.clone() for name, value in engine.module.state_dict().items()}, "rates": rates}


THREE = {"max_steps": 3}
HALTING = Task({"max_steps": 9}, in_loop=halting())


def test_parameters_buffers_and_rates_are_those_of_the_step_before() -> None:
    before, after = values(Task(THREE)), values(HALTING)
    assert after.pop("rates") == before.pop("rates")
    assert all(torch.equal(after[name], value) for name, value in before.items())


@rule(
    "A vote that says that the job is over before its step commits nothing, and a member that has not passed it "
    "hears of the end in the next world: so all end with the same step",
    "A step",
    broken_by=[
        Edit("shoal.training.step", "        if halts(record):\n", "        if halts(record) and not record:\n"),
        Edit(
            "shoal.training.resize",
            "        self._agree_on_the_end(world)\n",
            "",
            by="test_a_member_that_has_not_passed_the_vote_ends_with_the_same_step",
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("point", ["exchange", "vote", "hand_out"])
def test_it_is_so_in_every_world_and_through_a_kill(stage: int, point: str) -> None:
    task = Task({"max_steps": 9, "stage": stage}, in_loop=halting())
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.plant("b", 4, point)
        assert crew.finish() == undisturbed(Task(THREE))
        assert {worker.engine.global_step for worker in crew.workers.values() if worker.name != "b"} == {3}


@holds("A vote that says that the job is over")
@pytest.mark.parametrize("asker", ["a", "b", "c"])
def test_a_member_that_has_not_passed_the_vote_ends_with_the_same_step(asker: str) -> None:
    """b dies in the vote when a has its ballot, and c has not."""
    with Crew("abc", Task({"max_steps": 9}, in_loop=halting(asker))) as crew:
        crew.train_to(2)
        crew.plant("b", 4, "in_vote")
        assert crew.finish() == undisturbed(Task(THREE))
        assert {crew.workers[name].engine.global_step for name in "ac"} == {3}


@holds("A vote that says that the job is over")
def test_a_joiner_in_its_first_world_has_the_parameters_of_the_last_step() -> None:
    """It waits for those of a step's hand-out, and no step follows."""

    def halts_with_three(engine: Engine) -> None:
        if engine.world_size == 3:
            engine.training.ask(HALT, "this test")

    with Crew("ab", Task({"max_steps": 99}, in_loop=halts_with_three)) as crew:
        crew.train_to(2)
        crew.add("c")
        crew.finish()
        engines = [worker.engine for worker in crew.workers.values()]
        assert len({engine.global_step for engine in engines}) == 1 and engines[0].global_step < 99
        first = engines[0].module.state_dict()
        assert all(
            torch.equal(first[name], value) for one in engines for name, value in one.module.state_dict().items()
        )
