"""Optimizers that update whole tensors, in cells whose processes have whole tensors: contexts, stages and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import expert_parallel
import pytest
import torch
from context_parallel import CONTEXT, Divided
from matrices import shortened
from pipeline_parallel import PIPELINE, Body, Fixed, in_stages, losses_of_the_whole, stages_of
from rule import Edit, rule
from shoal.core.anchors import anchors
from shoal.core.cell_part import COMMON, CellPart, Division
from shoal.core.laying_out import lay_out
from shoal.core.layout import SMALLEST_BLOCK, Trainable
from shoal.optim.elementwise import check_optimizer
from shoal.optim.several import several
from shoal.training.engine import Engine
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check
from torch import nn
from torch.optim import Optimizer

EXPERT = Shape(expert=2)
SIZE = 8 * SMALLEST_BLOCK
LETTERS = "abcdefghijklmnop"
Make = Callable[[nn.Module], Optimizer]


def muon(model: nn.Module) -> Optimizer:
    """Matrices by Muon. A module without any has its group all the same."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in parameters if one.ndim == 2]
    rest = [one for one in parameters if one.ndim != 2]
    return several([torch.optim.Muon([{"params": matrices}], lr=0.02), torch.optim.AdamW([{"params": rest}], lr=1e-2)])


def adafactor(model: nn.Module) -> Optimizer:
    made = torch.optim.Adafactor([one for one in model.parameters() if one.requires_grad], lr=0.1)
    check_optimizer(made, False)
    return made


def task_of(shape: Shape, make: Make, stage: int = 1, **options: Any) -> CellTask:
    model = expert_parallel.Divided if shape.expert > 1 else Divided
    given = CellTask({"stage": stage, **options}, shape=shape, model=model)
    return replace(in_stages(given) if shape.pipeline > 1 else given, optimizer=make)


@cache
def one_cell(shape: Shape, make: Make) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of(LETTERS[: shape.processes], task_of(shape, make)) as crew:
        return crew.finish()


CASES = [
    (shape, make, stage, point)
    for shape in (CONTEXT, PIPELINE, EXPERT)
    for make in (muon, adafactor)
    for stage in (0, 1, 2, 3)
    for point in ("shape", "exchange", "vote", "joins")
]
KEPT = [
    (CONTEXT, muon, 1, "shape"),
    (PIPELINE, muon, 2, "vote"),
    (PIPELINE, adafactor, 1, "joins"),
    (EXPERT, adafactor, 0, "shape"),
]


@pytest.mark.parametrize(
    ("shape", "make", "stage", "point"), shortened(CASES, *KEPT), ids=lambda one: getattr(one, "__name__", str(one))
)
def test_whatever_befalls_cells_they_end_in_the_bits_of_one(shape: Shape, make: Make, stage: int, point: str) -> None:
    task = task_of(shape, make, stage)
    with crew_of("abcde", task) as crew:
        crew.train_to(2)
        if point == "joins":
            crew.add("f", task.at(coordinate_of("f", shape)))
        else:
            crew.plant("c", 4, point)
        digest = trained(crew)
    assert digest == one_cell(shape, make)


@check("as other checkpoints of cells")
@pytest.mark.parametrize("make", [muon, adafactor])
@pytest.mark.parametrize("shape", [CONTEXT, PIPELINE, EXPERT], ids=str)
def test_another_number_of_cells_goes_on_from_a_checkpoint(shape: Shape, make: Make, tmp_path: Path) -> None:
    saving = {"path": str(tmp_path), "every_steps": 2}
    with crew_of("abcd", task_of(shape, make, 2, max_steps=2, shoal={"checkpoint": saving})) as crew:
        crew.finish()
    resumed = task_of(shape, make, shoal={"checkpoint": {"path": str(tmp_path), "resume": "latest"}})
    with crew_of("ab", resumed) as crew:
        assert crew.finish() == one_cell(shape, make)
        assert crew.job.durable.history[0].from_step == 2


@rule(
    "What is common to coordinates of a cell and updated whole has one home for all of them",
    "Cells",
    broken_by=Edit("shoal.core.anchors", "by_division[bucket.division]", "by_division[Division()]"),
)
def test_places_of_experts_find_the_same_homes_of_what_they_have_in_common() -> None:
    divisions = [Division(by_expert=True)] * 2 + [COMMON] * 3
    shapes = [Trainable(f"p{n}", (SIZE,), torch.float32, 0, division=one) for n, one in enumerate(divisions)]
    found = list[list[int]]()
    for coordinate in range(4):
        layout = lay_out(shapes, part=CellPart(4, coordinate, experts=4))
        places = [(bucket, slot) for bucket in layout.buckets for slot in bucket.slots]
        numbers = anchors(layout, places, [1] * len(places))
        found.append([number for number, (bucket, _) in zip(numbers, places, strict=True) if bucket.division == COMMON])
    assert len(found[0]) == 3 and found == [found[0]] * 4


def muon_of_the_last(stages: nn.Module) -> Optimizer:
    """Other stages have no tensor of its group."""
    matrices = [one for name, one in stages.named_parameters() if "head" in name]
    rest = [one for name, one in stages.named_parameters() if "head" not in name]
    return several([torch.optim.Muon([{"params": matrices}], lr=0.02), torch.optim.AdamW(rest, lr=1e-2)])


@rule(
    "A stage without a tensor that is updated whole takes part in all that members find out before such updates",
    "Cells",
    broken_by=[Edit("shoal.training.step", "whole.are_trained", "whole.places")],
)
def test_a_stage_without_such_tensors_trains_beside_one_with_some() -> None:
    with crew_of("abcde", task_of(PIPELINE, muon_of_the_last)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, "shape")
        assert trained(crew) == one_cell(PIPELINE, muon_of_the_last)


@pytest.mark.parametrize("make", [muon, adafactor])
def test_losses_of_stages_are_those_of_the_whole_model_in_one_process(make: Make) -> None:
    found: dict[str, list[float]] = {}
    trains = Body()

    def body(engine: Engine, batch: Any) -> None:
        if trains(engine, batch) and engine.loss is not None:
            found.setdefault(engine.context.link.worker, []).append(engine.loss)

    options = {"micro_batches_per_lane": 2, "lanes": 4, "stage": 1, "gradient_clipping": 0.5}
    model = partial(stages_of, dropout=0.0)
    task = CellTask(options, body=body, shape=PIPELINE, model=model, optimizer=make, data=lambda: Fixed(40))
    with crew_of("abcd", task) as crew:
        crew.finish()
    assert found["a"] == pytest.approx(losses_of_the_whole({**options, "max_steps": 6}, make), abs=1e-4)
