"""Parameters of which several stages of a pipeline have a copy: an embedding that is the head, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel
import torch
from crew import Crew, Task, undisturbed
from pipeline_parallel import (
    HUBS,
    PIPELINE,
    SQUARE,
    THREE,
    Body,
    Fixed,
    Stage,
    Whole,
    in_stages,
)
from rule import Edit, holds, rule
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded, tied, ties
from shoal.cells.stages import Stages, built_stages
from shoal.checkpoint.catalogue import at
from shoal.checkpoint.fingerprint import verify
from shoal.core.ties import Tie, check_groups
from shoal.training.engine import Engine
from shoal.training.start import part_of
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, crew_of
from tiers import check
from torch import Tensor, nn

NAME, SEED, MICRO_BATCHES = "embedding", 7, 3


def copy_of(stage: Stage) -> nn.Parameter | None:
    """The parameter of a stage that is the embedding or the head."""
    for layer in (stage.embedding, stage.head):
        if not isinstance(layer, nn.Identity):
            return layer.weight  # type: ignore[return-value]
    return None


def give_values(weight: nn.Parameter, seed: int = SEED) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        weight.normal_(0, 0.3)


def stages_of(
    hub: CellHub, between: Callable[[], None], _: bool = False, dropout: float = 0.1, are_apart: bool = False
) -> Stages:
    places = hub.shape.pipeline

    def build(number: int) -> nn.Module:
        stage = Stage(number, places, dropout, hub, between)
        if (weight := copy_of(stage)) is not None:
            give_values(weight, SEED + number * are_apart)
            tied(weight, NAME)
        return stage

    found = built_stages(build, places, hub.shape.index(hub.coordinate)["pipeline"], places)
    HUBS[found] = hub
    return found


class WholeTied(Whole):
    """The same in one process, where both are one parameter."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        first, last = self.stages["0"], self.stages[str(count - 1)]
        assert isinstance(first, Stage) and isinstance(last, Stage)
        last.head.weight = first.embedding.weight
        give_values(first.embedding.weight)  # type: ignore[arg-type]


def task_of(shape: Shape, stage: int = 1, **options: Any) -> CellTask:
    given = {"stage": stage, "micro_batches_per_lane": MICRO_BATCHES, **options}
    return replace(in_stages(CellTask(given, shape=shape)), model=stages_of)


@cache
def one_cell(shape: Shape) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of("abcdef"[: shape.processes], task_of(shape)) as crew:
        return trained(crew)


def trained(crew: Crew) -> str:
    """And that what was planted has struck, and all copies have the same bits."""
    digest = tensor_parallel.trained(crew)
    engines = [worker.engine for worker in crew.workers.values() if not worker.killed]
    copies = [copy_of(stage) for engine in engines for stage in engine.module.values()]  # type: ignore[operator]
    found = [one.detach() for one in copies if one is not None]
    assert len(found) > 1 and all(torch.equal(one, found[0]) for one in found)
    return digest


def gradient_descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@rule(
    "Copies that stages have of a parameter get the sum of their gradients, which norms count once",
    "Cells",
    broken_by=[
        Edit("shoal.cells.marks", "            over_cell([gradient_of(slot)], tie.places)\n", "            pass\n"),
        Edit("shoal.exchange.finite", " * _is_counted(layout.buckets[stretch.bucket])\n", "\n"),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        PIPELINE,
        pytest.param(THREE, marks=check("as of two stages")),
        pytest.param(SQUARE, marks=check("as of a pipeline alone")),
    ],
    ids=str,
)
def test_losses_are_those_of_one_process_where_both_are_one_parameter(shape: Shape) -> None:
    found: list[float] = []
    trains = Body()

    def body(engine: Engine, batch: Any) -> None:
        if trains(engine, batch) and engine.context.link.worker == "a" and engine.loss is not None:
            found.append(engine.loss)

    options = {"micro_batches_per_lane": MICRO_BATCHES, "lanes": 4, "gradient_clipping": 0.3, "max_steps": 6}
    task = replace(task_of(shape, **options), body=body, model=partial(stages_of, dropout=0.0))
    names = "abcdefgh"[: 2 * shape.processes]
    with crew_of(names, replace(task, optimizer=gradient_descent, data=lambda: Fixed(40))) as crew:
        trained(crew)
    whole: list[float] = []

    def step(engine: Engine) -> None:
        if engine.step() and engine.loss is not None:
            whole.append(engine.loss)

    make = partial(WholeTied, shape.pipeline)
    undisturbed(Task(options, make, gradient_descent, lambda _: None, step=step, data=lambda: Fixed(40)))
    assert found == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "names", "stage"),
    [
        (PIPELINE, "abcde", 1),
        (PIPELINE, "abcd", 2),
        pytest.param(PIPELINE, "abcdef", 0, marks=check("as in stage 1")),
        pytest.param(SQUARE, "abcdefgh", 2, marks=check("as of a pipeline alone")),
        pytest.param(THREE, "abcdef", 1, marks=check("as of two stages")),
    ],
    ids=str,
)
def test_any_number_of_cells_ends_in_the_same_bits_with_copies(shape: Shape, names: str, stage: int) -> None:
    with crew_of(names, task_of(shape, stage)) as crew:
        assert trained(crew) == one_cell(shape)


MORE = [pytest.param(point, marks=check("as at the other points")) for point in ("backward", "exchange", "mirror")]


@pytest.mark.parametrize("point", ["between", "vote", *MORE])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=check("as in stage 1"))])
def test_a_process_that_is_killed_leaves_copies_equal(point: str, stage: int) -> None:
    with crew_of("abcde", task_of(PIPELINE, stage)) as crew:
        crew.train_to(2)
        crew.plant("c", 4, point)
        assert trained(crew) == one_cell(PIPELINE)


def test_any_number_of_cells_goes_on_from_a_checkpoint_of_copies(tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    with crew_of("abcd", task_of(PIPELINE, max_steps=2, shoal=place)) as crew:
        fingerprint = trained(crew)
    path = str(next(tmp_path.glob("step-000000000002-*")))
    assert verify(at(path, print).reader()).fingerprint == fingerprint
    with crew_of("ab", task_of(PIPELINE, 2, shoal={"checkpoint": {"path": str(tmp_path), "resume": path}})) as crew:
        assert trained(crew) == one_cell(PIPELINE)


# ---- what is refused


def places(*marked: dict[str, nn.Parameter]) -> list[nn.Module]:
    return [nn.ParameterDict(of_place) for of_place in marked]


def weight(*shape: int, name: str = NAME) -> nn.Parameter:
    return tied(nn.Parameter(torch.zeros(shape)), name)


def test_parameters_of_one_name_are_copies_of_each_other() -> None:
    found = ties(places({"a": weight(2)}, {}, {"b": sharded(weight(2)), "c": nn.Parameter(torch.zeros(2))}))
    assert found == {"a": Tie(NAME, (0, 2), 0), "b": Tie(NAME, (0, 2), 2)}
    assert [one.is_first for one in found.values()] == [True, False]
    assert ties(places({"a": weight(2)})) == {}, "one process has but one"


@pytest.mark.parametrize(
    ("of_places", "words"),
    [
        (places({"a": weight(2)}, {}), 'parameter "a" is tied as "embedding", and no other stage has a parameter of'),
        (places({"a": weight(2), "b": weight(2)}), '"a" and "b" are tied as "embedding", and one process has both;'),
        (places({"a": weight(2)}, {"b": weight(3)}), r'"a" of shape \(2,\) and "b" of shape \(3,\) .* expected one'),
    ],
)
def test_ties_that_cannot_be_are_refused(of_places: list[nn.Module], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ties(of_places)


def test_a_name_that_is_none_and_copies_in_two_groups_are_refused() -> None:
    with pytest.raises(UserError, match=r"shoal\.tied is given the name ''; expected a text that all copies have"):
        weight(2, name="")
    with pytest.raises(UserError, match='"a" and "b" are tied as "embedding", and the optimizer has them in different'):
        check_groups({"a": Tie(NAME, (0, 1), 0), "b": Tie(NAME, (0, 1), 1)}, {"a": 0, "b": 1})


@pytest.mark.parametrize(
    ("shape", "divide", "words"),
    [
        (SQUARE, sharded, 'common to all places, "1.b" cut along dimension 0 among the places of tensor:'),
        (Shape(expert=2, pipeline=2), partial(sharded, over="expert"), 'common to all places, "1.b" an expert\'s:'),
    ],
    ids=["over tensor", "over expert"],
)
@rule(
    "Parameters that are tied over stages are divided alike among the places of a cell; else the job is refused, and "
    "both are named",
    "Cells",
    broken_by=Edit("shoal.core.ties", "if of[one] != of[first]), None)", "if of[one] is first), None)"),
)
def test_copies_of_which_one_alone_is_divided_are_refused(shape: Shape, divide: Any, words: str) -> None:
    def build(number: int) -> nn.Module:
        return nn.ParameterDict({"b": divide(weight(2))} if number else {"a": weight(2)})

    found = re.escape(f'parameters "0.a" and "1.b" are tied as "embedding", and "0.a" is {words}')
    with pytest.raises(UserError, match=found):
        part_of(built_stages(build, 2, 0, 2), shape, 0)
    assert len(part_of(built_stages(build, 2, 0, 2), PIPELINE, 0).ties) == 2, "nothing is divided there"


@holds("Copies that stages have of a parameter")
def test_copies_that_begin_with_different_values_are_refused() -> None:
    task = replace(task_of(PIPELINE), model=partial(stages_of, are_apart=True))
    with crew_of("ab", task) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        reason = crew.job.durable.reason
    assert 'parameters "0.embedding.weight" and "1.head.weight" are tied as "embedding", and begin with different' in (
        reason
    )


class Unlike(Stage):
    """One whose scale, a copy of the other stages', gets another gradient on each place of `tensor`."""

    def __init__(self, number: int, count: int, hub: CellHub, between: Callable[[], None]) -> None:
        super().__init__(number, count, 0.0, hub, between)
        self.scale, self.times = tied(nn.Parameter(torch.ones(1)), "scale"), 1 + hub.coordinate % hub.shape.tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.times * self.scale - (self.times - 1) * self.scale.detach())


def of_unlike_copies(hub: CellHub, between: Callable[[], None], _: bool = False) -> Stages:
    places = hub.shape.pipeline
    build = partial(Unlike, count=places, hub=hub, between=between)
    found = built_stages(build, places, hub.shape.index(hub.coordinate)["pipeline"], places)
    HUBS[found] = hub
    return found


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=check("as in stage 1"))])
@rule(
    "Gradients of copies that are said to be equal over the tensor places of a cell are compared as all others are",
    "Cells",
    broken_by=Edit("shoal.training.equal_gradients", "layout.part.summed.intersection(names)", "bucket.is_summed"),
)
def test_copies_whose_gradients_differ_over_the_tensor_dimension_are_refused(stage: int) -> None:
    with crew_of("abcd", replace(task_of(SQUARE, stage), model=of_unlike_copies)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
    assert 'scale" is said to have equal gradients on both tensor coordinates, and they differ' in (
        crew.job.durable.reason
    )
