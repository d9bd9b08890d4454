"""Checkpoints of jobs whose lanes are trained by cells of two workers: real engines in one process, real files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import fresh, save, trained
from context_parallel import BOTH, CONTEXT, Divided
from crew import Crew, Task
from pipeline_parallel import PIPELINE, SQUARE, Body, in_stages
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import Found, at
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.restore import fits
from shoal.checkpoint.storage import open_storage
from shoal.core.cell_part import CellPart
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, crew_of
from tiers import check

STEP = 2


def task_of(place: Path, max_steps: int = 6, stage: int = 1, **checkpoint: Any) -> CellTask:
    """With buffers."""
    options = {"max_steps": max_steps, "stage": stage, "shoal": {"checkpoint": {"path": str(place), **checkpoint}}}
    return CellTask(options, buffers=True)


@cache
def undisturbed() -> str:
    """The fingerprint of one cell that saves nothing."""
    with crew_of("ab", CellTask(buffers=True)) as crew:
        return crew.finish()


@pytest.mark.parametrize(("before", "after", "stage"), [("ab", "abcd", 1), ("dcba", "ba", 0)])
@rule(
    "A checkpoint has the blocks and buffers of every coordinate of a cell, and any number of cells goes on from it",
    "Cells",
    broken_by=[
        Edit("shoal.checkpoint.reader", "if buckets[piece.bucket].division in shared", "if file.coordinate == 0"),
        Edit("shoal.checkpoint.reader", "buffer_tensor(name, self.coordinate)", "buffer_tensor(name)"),
    ],
)
def test_any_number_of_cells_goes_on_from_a_checkpoint(before: str, after: str, stage: int, tmp_path: Path) -> None:
    with crew_of(before, task_of(tmp_path, STEP, every_steps=STEP)) as crew:
        fingerprint = crew.finish()
    path = str(next(tmp_path.glob(f"step-{STEP:012d}-*")))
    assert verify(at(path, print).reader()).fingerprint == fingerprint
    with crew_of(after, task_of(tmp_path, stage=stage)) as crew:
        assert crew.finish() == undisturbed()
        assert crew.job.durable.history[0].from_step == STEP


@pytest.mark.parametrize(
    ("shape", "before", "after", "stage"),
    [
        (CONTEXT, "abcd", "ab", 2),
        pytest.param(BOTH, "abcd", "abcdefgh", 2, marks=check("as contexts alone, with parts besides")),
        (PIPELINE, "abcd", "ab", 1),
        pytest.param(SQUARE, "abcd", "abcdefgh", 1, marks=check("as a pipeline alone, with parts besides")),
    ],
    ids=str,
)
def test_any_number_of_cells_of_other_shapes_goes_on_from_a_checkpoint(
    shape: Shape, before: str, after: str, stage: int, tmp_path: Path
) -> None:
    def task(max_steps: int = 6, stage: int = 1, **checkpoint: Any) -> CellTask:
        shoal = {"checkpoint": {"path": str(tmp_path), **checkpoint}} if checkpoint else {}
        given = CellTask({"max_steps": max_steps, "stage": stage, "shoal": shoal}, shape=shape, model=Divided)
        return in_stages(given) if shape.pipeline > 1 else given

    with crew_of(before, task(STEP, every_steps=STEP)) as crew:
        fingerprint = crew.finish()
    path = str(next(tmp_path.glob(f"step-{STEP:012d}-*")))
    assert verify(at(path, print).reader()).fingerprint == fingerprint
    with crew_of(after, task(stage=stage, resume=path)) as crew:
        resumed = crew.finish()
    with crew_of(before, task()) as crew:
        assert crew.finish() == resumed


@pytest.mark.parametrize("place", [0, 1])
@holds("All members train in the same modes")
def test_stages_go_on_from_a_checkpoint_in_the_modes_that_each_of_them_had(place: int, tmp_path: Path) -> None:
    trains = Body()

    def body(engine: Engine, batch: Any) -> None:
        if engine.global_step == STEP - 1 and engine.context.state.layout.part.place == place:
            engine.module[str(place)].dropout.eval()
        trains(engine, batch)

    def task(max_steps: int = 6, **checkpoint: Any) -> CellTask:
        shoal = {"checkpoint": {"path": str(tmp_path), **checkpoint}} if checkpoint else {}
        return replace(in_stages(CellTask({"max_steps": max_steps, "shoal": shoal}, shape=PIPELINE)), body=body)

    with crew_of("abcd", task(STEP, every_steps=STEP)) as crew:
        crew.finish()
    with crew_of("ab", task(resume="latest")) as crew:
        resumed = crew.finish()
        assert crew.job.durable.history[0].from_step == STEP
    with crew_of("ab", task()) as crew:
        assert crew.finish() == resumed


# ---- what is refused


@pytest.fixture(scope="module")
def of_cells(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A checkpoint of cells of two."""
    place = tmp_path_factory.mktemp("cells")
    with crew_of("ab", task_of(place, STEP, every_steps=STEP)) as crew:
        crew.finish()
    return at(str(next(place.glob(f"step-{STEP:012d}-*"))), print)


def test_a_checkpoint_of_another_shape_is_refused_in_a_sentence(of_cells: Found) -> None:
    alone, of_one = fresh(), save(trained(1), open_storage("memory://of one"))[1]
    in_cells = fresh()
    in_cells.layout = replace(in_cells.layout, part=CellPart(2))
    for manifest, state, found, expected, sizes in (
        (of_cells.manifest, alone, "cells of 2 processes", "one process", "--tensor 1"),
        (of_one, in_cells, "one process", "cells of 2 processes", "--tensor 2"),
    ):
        with pytest.raises(UserError) as refusal:
            fits(manifest, state, ("new", "missing"), "A PLACE")
        assert str(refusal.value) == (
            f"A PLACE is of {found}, and this job's lanes are trained by {expected}; make one of this shape, `shoal "
            f"reshape 'A PLACE' NEW {sizes}`, and give `resume` the folder NEW."
        )
    assert not fits(of_one.model_copy(update={"kind": "model"}), in_cells, ("new", "missing"), "PLACE")
    with pytest.raises(UserError, match="Taking what matches by name is not supported yet where a cell has several"):
        fits(of_cells.manifest, in_cells, ("new", "missing"), "PLACE")


def test_a_worker_alone_does_not_go_on_from_a_checkpoint_of_cells(of_cells: Found, tmp_path: Path) -> None:
    shoal = {"checkpoint": {"path": str(tmp_path), "resume": of_cells.path}}
    with Crew("a", Task({"max_steps": 6, "shoal": shoal})) as crew:
        crew.until("its error", lambda: bool(crew.workers["a"].failure))
        assert f"`shoal reshape {of_cells.path} NEW --tensor 1`" in crew.workers["a"].failure
