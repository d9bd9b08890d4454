"""Lanes whose samples are divided in a cell, and layers of experts that exchange tokens in it: one fingerprint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from crew import Crew
from expert_parallel import (
    BOTH,
    EXPERT,
    FOUR,
    OF_CONTEXTS,
    Divided,
    gradient_descent,
    losses_of_the_whole,
    without_chance,
)
from rule import Edit, holds, rule
from shoal.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check
from torch import nn


class Undropped(Divided):
    """No token is left out."""

    options: ClassVar = {"drop_tokens": False}


class Unbalanced(Undropped):
    """Of the auxiliary loss, which is no mean over samples, nothing is added."""

    balance = 0.0


class Noisy(Divided):
    """Two experts for each token, the second one drawn, few of them kept, and an expert that all tokens go to."""

    options: ClassVar = {"k": 2, "noisy_gate_policy": "Jitter", "capacity_factor": 0.5, "use_residual": True}


def task_of(shape: Shape, stage: int = 1, model: Any = Divided, **options: Any) -> CellTask:
    return CellTask({"stage": stage, **options}, shape=shape, model=model)


@cache
def one_cell(shape: Shape, model: Any = Divided, steps: int = 6) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of("abcdefgh"[: shape.processes], task_of(shape, model=model, max_steps=steps)) as crew:
        return crew.finish()


@pytest.mark.parametrize(
    ("shape", "names", "stage", "model"),
    [
        (EXPERT, "abcde", 1, Divided),
        (EXPERT, "abcd", 2, Noisy),
        (BOTH, "abcdefgh", 2, Divided),
        (OF_CONTEXTS, "abcdefgh", 2, Divided),
        *(pytest.param(EXPERT, "abcdef", stage, Divided, marks=check("as two cells")) for stage in (0, 1, 2)),
        pytest.param(EXPERT, "abcde", 0, Noisy, marks=check("as in stage 2")),
        pytest.param(EXPERT, "abcd", 1, Undropped, marks=check("as with tokens that are dropped")),
        *(pytest.param(BOTH, "abcdefghijkl", stage, Divided, marks=check("as two cells")) for stage in (0, 1, 2)),
        pytest.param(OF_CONTEXTS, "abcdefgh", 1, Noisy, marks=check("as in stage 2")),
        pytest.param(FOUR, "abcdefghi", 2, Divided, marks=check("as two places")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@rule(
    "Each place of a cell's experts adds a gradient of its own to what is no expert's, and none to experts of others",
    "Cells",
    broken_by=[
        Edit("shoal.core.cell_part", "first : first + self.contexts] if division.by_expert", "::] if False"),
        Edit(
            "shoal.core.cell_part", "return (holders % count if division.by_expert else holders), count", "return 0, 1"
        ),
    ],
)
def test_any_number_of_cells_ends_in_the_same_bits(shape: Shape, names: str, stage: int, model: Any) -> None:
    with crew_of(names, task_of(shape, stage, model)) as crew:
        assert trained(crew) == one_cell(shape, model)


@pytest.mark.parametrize(
    ("shape", "model", "stage"),
    [
        (EXPERT, Undropped, 1),
        (EXPERT, Noisy, 2),
        (BOTH, Undropped, 2),
        pytest.param(OF_CONTEXTS, Unbalanced, 1, marks=check("as contexts alone")),
        pytest.param(FOUR, Noisy, 1, marks=check("as two places")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@rule(
    "A lane's micro-batches are dealt in turn to the places of a cell's experts, whose random numbers are those of the "
    "micro-batch",
    "Cells",
    broken_by=[
        Edit("shoal.training.lane_loop", "range(index, micro_batches * places, places)", "range(micro_batches)"),
        Edit("shoal.core.cell_part", "return self.contexts * self.experts", "return self.contexts"),
    ],
)
def test_losses_are_those_of_one_process_that_trains_all_micro_batches_of_a_lane(
    shape: Shape, model: type[Divided], stage: int
) -> None:
    found: dict[str, list[float]] = {}

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and engine.loss is not None:
            found.setdefault(engine.context.link.worker, []).append(engine.loss)

    options: ClassVar = {"stage": stage, "gradient_clipping": 0.0}
    task = CellTask(options, body=body, shape=shape, model=model, optimizer=gradient_descent)
    with crew_of("abcdefgh"[: 2 * shape.processes], task) as crew:
        crew.finish()
    assert len({tuple(losses) for losses in found.values()}) == 1, "all members know the loss"
    alone = {"micro_batches_per_lane": shape.expert}
    assert found["a"] == pytest.approx(losses_of_the_whole(alone, model), abs=1e-5)


def test_losses_without_dropping_are_those_of_one_process_on_the_whole_batch() -> None:
    found = list[float]()

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and engine.loss is not None and engine.context.link.worker == "a":
            found.append(engine.loss)

    task = CellTask(
        {"gradient_clipping": 0.0},
        body=body,
        shape=EXPERT,
        model=Unbalanced,
        optimizer=gradient_descent,
        data=without_chance,
    )
    with crew_of("abcd", task) as crew:
        crew.finish()
    whole = losses_of_the_whole({"micro_batch": 4}, Unbalanced, data=without_chance)
    assert found == pytest.approx(whole, abs=1e-5)


MORE = [pytest.param(point, marks=check("as at the other points")) for point in ("exchange", "mirror", "forward")]


@pytest.mark.parametrize("point", ["between", "backward", "vote", *MORE])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=check("as in stage 1"))])
def test_a_process_that_is_killed_changes_no_bit(point: str, stage: int) -> None:
    with crew_of("abcde", task_of(EXPERT, stage)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell(EXPERT)


def test_micro_batches_that_all_places_give_up_together_count_nowhere() -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss, loop = engine.module(**batch), engine.context.loop
        if engine.global_step == 2 and loop.lane == 1:
            engine.skip()
        elif engine.backward(loss) or engine.step():
            found.setdefault(loop.lanes, []).append(engine.loss)

    found: dict[tuple[int, ...], list[float | None]] = {}
    digests = set()
    for names in ("ab", "abcde"):
        with crew_of(names, replace(task_of(EXPERT), body=body)) as crew:
            if len(names) == 5:
                crew.train_to(2)
                crew.plant("d", 3, "meet")
            digests.add(trained(crew))
            record = crew.workers["a"].engine.context.state.record
        assert record is not None and record.skipped_micro_batches == 1
    assert len(digests) == 1


STEPS = 20


def cells(crew: Crew) -> int:
    world = crew.job.durable.current
    assert world is not None
    return len(world.cells)


def one_joins_for_one_that_is_killed(crew: Crew, add: Callable[[str], None]) -> None:
    crew.plant("d", 4, "between")
    crew.train_to(6)
    add("f")
    crew.train_until("two cells", lambda: cells(crew) == 2)


def half_of_a_cell_is_drained(crew: Crew, _: Callable[[str], None]) -> None:
    crew.request(DrainWorker("b"))
    crew.train_until("it to leave", lambda: cells(crew) == 1)


@pytest.mark.parametrize("befalls", [one_joins_for_one_that_is_killed, half_of_a_cell_is_drained])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=check("as in stage 1"))])
def test_joins_and_drains_change_no_bit(befalls: Callable[..., None], stage: int) -> None:
    task = task_of(EXPERT, stage, max_steps=STEPS)
    with crew_of("abcd", task) as crew:
        crew.train_to(2)
        befalls(crew, lambda name: crew.add(name, task.at(coordinate_of(name, EXPERT))))
        assert trained(crew) == one_cell(EXPERT, steps=STEPS)


@check("many processes and steps")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_process_of_both_dimensions_is_killed_and_another_joins_and_no_bit_changes(stage: int) -> None:
    task = task_of(BOTH, stage, max_steps=STEPS)
    with crew_of("abcdefgh", task) as crew:
        crew.train_to(2)
        crew.plant("g", 4, "between")
        crew.train_to(6)
        crew.add("k", task.at(coordinate_of("k", BOTH)))
        crew.train_until("two cells", lambda: cells(crew) == 2)
        assert trained(crew) == one_cell(BOTH, steps=STEPS)


@pytest.mark.parametrize(
    ("shape", "before", "after", "stage"),
    [
        (EXPERT, "abcd", "ab", 2),
        pytest.param(EXPERT, "ab", "abcdef", 0, marks=check("as fewer cells")),
        pytest.param(BOTH, "abcd", "abcdefgh", 1, marks=check("as experts alone")),
    ],
    ids=str,
)
@holds("A checkpoint has the blocks and buffers of every coordinate of a cell")
def test_any_number_of_cells_goes_on_from_a_checkpoint(
    shape: Shape, before: str, after: str, stage: int, tmp_path: Path
) -> None:
    def run(names: str, place: Path, steps: int, stage: int) -> str:
        shoal = {"checkpoint": {"path": str(place), "every_steps": 2}}
        with crew_of(names, task_of(shape, stage, max_steps=steps, shoal=shoal)) as crew:
            return crew.finish()

    run(before, tmp_path / "first", 2, 1)
    place = shutil.copytree(tmp_path / "first", tmp_path / "second")
    assert run(after, place, 6, stage) == one_cell(shape)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """As scripts for DeepSpeed give an optimizer its groups."""
    groups = split_params_into_different_moe_groups_for_optimizer({"params": model.parameters(), "name": "all"})
    assert [(group["name"], group.get("moe")) for group in groups] == [("all", None), ("ep_size_2", True)]
    return torch.optim.AdamW(groups, lr=1e-3)


def test_groups_of_experts_for_an_optimizer_train_through_the_death_of_a_place() -> None:
    task = replace(task_of(EXPERT, 2, max_steps=4), optimizer=grouped)
    with crew_of("ab", task) as crew:
        expected = crew.finish()
    with crew_of("abcde", task) as crew:
        crew.plant("b", 1, "backward")
        assert trained(crew) == expected
