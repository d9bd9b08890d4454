"""Every shape with contexts or stages, in one to three cells and ZeRO stages 0 to 2, whatever befalls: one fingerprint
per shape. `make cells` runs all cases, `make check` one of each kind.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from context_parallel import BOTH, CONTEXT, Divided
from crew import Crew
from matrices import shortened
from pipeline_parallel import PIPELINE, SQUARE, in_stages
from shoal_protos.acts import DrainWorker
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check

pytestmark = check("trains many small jobs")
SHAPES = (CONTEXT, BOTH, PIPELINE, SQUARE)
CELLS, STAGES = (1, 2, 3), (0, 1, 2)
POINTS = ("forward", "between", "meet", "backward", "exchange", "vote", "mirror")
BEFALLS = ("nothing", *POINTS, "joins", "drained")
CASES = list(product(SHAPES, CELLS, STAGES, BEFALLS))
KEPT = [
    (CONTEXT, 1, 0, "joins"), (CONTEXT, 2, 2, "vote"), (BOTH, 2, 1, "between"), (PIPELINE, 2, 0, "drained"),
    (PIPELINE, 3, 1, "backward"), (SQUARE, 1, 2, "nothing"), (SQUARE, 2, 1, "mirror"),
    (BOTH, 3, 0, "meet"),
]  # fmt: skip
LETTERS = "abcdefghijklmnop"


def task_of(shape: Shape, stage: int = 1) -> CellTask:
    given = CellTask({"stage": stage, "max_steps": 12}, shape=shape, model=Divided)
    return in_stages(given) if shape.pipeline > 1 else given


@cache
def one_cell(shape: Shape) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of(LETTERS[: shape.processes], task_of(shape)) as crew:
        return crew.finish()


def cells_of(crew: Crew) -> int:
    world = crew.job.durable.current
    assert world is not None
    return len(world.cells)


def befall(crew: Crew, event: str, task: CellTask, names: str) -> None:
    """It happens to the crew; a member of its last cell is the victim, or one with a spare."""
    processes = task.shape.processes
    victim = names[-processes] if len(names) % processes == 0 else names[0]
    if event in POINTS:
        crew.plant(victim, 4, event)
    elif event == "drained":
        crew.request(DrainWorker(victim))
    elif event == "joins":
        more = LETTERS[len(names) : len(names) + processes]
        before = cells_of(crew)
        for name in more:
            crew.add(name, task.at(coordinate_of(name, task.shape)))
        crew.train_until("another cell", lambda: cells_of(crew) > before)


@pytest.mark.parametrize(("shape", "cells", "stage", "event"), shortened(CASES, *KEPT), ids=str)
def test_whatever_befalls_cells_of_a_shape_they_end_in_one_fingerprint(
    shape: Shape, cells: int, stage: int, event: str
) -> None:
    has_spare = cells == 1 and event in (*POINTS, "drained")
    names, task = LETTERS[: cells * shape.processes + has_spare], task_of(shape, stage)
    with crew_of(names, task) as crew:
        crew.train_to(2)
        befall(crew, event, task, names)
        digest = trained(crew)
    assert digest == one_cell(shape)
