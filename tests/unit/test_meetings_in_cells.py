"""Members of a cell meet where a script says what becomes of a micro-batch: `engine.backward` or `engine.skip`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import context_parallel
import expert_parallel
import pytest
from context_parallel import CONTEXT
from expert_parallel import EXPERT
from rule import Edit, holds, rule
from shoal.training.engine import Engine
from shoal_protos.shape import Shape
from tensor_parallel import TWO, CellTask, Parallel, crew_of

Act = Callable[[Engine, Any], object]
MODELS: dict[Shape, Any] = {
    TWO: Parallel, CONTEXT: context_parallel.Divided, context_parallel.BOTH: context_parallel.Divided,
    EXPERT: expert_parallel.Divided,
}  # fmt: skip


def trains(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch))
    engine.step()


def skips(engine: Engine, batch: Any) -> None:
    engine.module(**batch)
    engine.skip()


def adds_a_loss(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch), more=True)
    trains(engine, batch)


def failure(shape: Shape, act: Act, step: int, others: Act = trains) -> str:
    """Why the job ends where the last process of the first cell does something else with a lane of a step."""
    last = "abcdefgh"[shape.processes - 1]

    def body(engine: Engine, batch: Any) -> None:
        is_other = engine.global_step == step and engine.context.link.worker == last and not engine.warming_up
        (act if is_other else others)(engine, batch)

    with crew_of("abcdefgh"[: 2 * shape.processes], CellTask(body=body, shape=shape, model=MODELS[shape])) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed" and crew.job.durable.step == step
        return crew.job.durable.reason


@pytest.mark.parametrize("step", [0, 3], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize("shape", MODELS, ids=str)
@rule(
    "Members of a cell meet before each backward and each micro-batch that is given up: where some are at another "
    "place, the job fails at once with the places of both",
    "Cells",
    broken_by=[
        Edit("shoal.training.training_loop", "                context.hub.meet(place)\n", ""),
        Edit("shoal.cells.hub", "        self.come_to(place)\n        with", "        with"),
    ],
)
def test_a_micro_batch_that_one_member_alone_gives_up_fails_the_job_with_both_places(shape: Shape, step: int) -> None:
    found, last = failure(shape, skips, step), shape.processes - 1
    assert re.search(
        rf"the members of a cell are at different places of their loops: coordinate \d is in engine.backward, and "
        rf"coordinate {last} is in engine.skip; all of them must skip the same micro-batches",
        found,
    )


@holds("Members of a cell meet before each backward")
def test_a_micro_batch_that_one_member_alone_trains_fails_the_job_with_both_places() -> None:
    def others(engine: Engine, batch: Any) -> None:
        (skips if engine.global_step == 3 else trains)(engine, batch)

    found = failure(CONTEXT, trains, 3, others)
    assert "coordinate 0 is in engine.skip, and coordinate 1 is in engine.backward;" in found


@holds("Members of a cell meet before each backward")
def test_a_loss_that_one_member_alone_adds_fails_the_job_with_both_places() -> None:
    found = failure(CONTEXT, adds_a_loss, 3)
    assert "coordinate 0 is in engine.backward, and coordinate 1 is in engine.backward(more=True);" in found
