"""A job that halts: its last step is committed without an update, so that what it ends with is the step before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from shoal.exchange.ballot import Request
from shoal.faults import Faults
from shoal.session.alone import AloneLink
from shoal.training.engine import Engine


def halts_before_the_fourth(engine: Engine) -> None:
    if engine.global_step == 3:
        engine.training.ask(Request("halt"), "this test")


def values(task: Task) -> dict[str, Any]:
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        rates = [group["lr"] for group in engine.context.state.optimizer.param_groups]
        return {**{name: value.clone() for name, value in engine.module.state_dict().items()}, "rates": rates}


HALTING = Task({"max_steps": 9}, in_loop=halts_before_the_fourth)


def test_parameters_buffers_and_rates_are_those_of_the_step_before() -> None:
    before, after = values(Task({"max_steps": 3})), values(HALTING)
    assert after.pop("rates") == before.pop("rates")
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("point", ["exchange", "vote", "hand_out"])
def test_it_is_so_in_every_world_and_through_a_kill(stage: int, point: str) -> None:
    task = Task({"max_steps": 9, "stage": stage}, in_loop=halts_before_the_fourth)
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.plant("b", 4, point)
        assert crew.finish() == undisturbed(HALTING)
        assert {worker.engine.global_step for worker in crew.workers.values() if worker.name != "b"} == {4}
