"""`shoal.cell`: which shape is meant, and what a cell of one process leaves alone. Of several: tests/integration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import shoal
import torch
import torch.distributed as dist
from shoal.session import cell_opening, seat
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no seat yet, and no controller."""
    monkeypatch.setattr(seat, "_taken", [])
    monkeypatch.setattr(cell_opening, "_opened", [])
    monkeypatch.delenv("SHOAL_CONTROLLER", raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Shape]]:
    """The shapes for which a seat was taken, at whose coordinate 1 this process is."""
    shapes: list[Shape] = []
    monkeypatch.setattr(cell_opening, "take_seat", lambda shape: shapes.append(shape) or SimpleNamespace(coordinate=1))
    monkeypatch.setattr(cell_opening, "Cell", lambda shape, coordinate: (shape, coordinate))
    yield shapes


CONFIG = {"shoal": {"cell": {"tensor": 2, "tight": ["tensor"]}}}


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: shoal.cell(tensor=2), Shape(tensor=2)),
        (lambda: shoal.cell(tensor_model_parallel_size=4), Shape(tensor=4)),
        (lambda: shoal.cell(tensor=4, tensor_model_parallel_size=4, pipeline=1), Shape(tensor=4)),
        (lambda: shoal.cell(tensor=2, tight=["tensor"]), Shape(tensor=2, tight=("tensor",))),
        (lambda: shoal.cell(CONFIG), Shape(tensor=2, tight=("tensor",))),
        (lambda: shoal.cell(CONFIG, tensor=2), Shape(tensor=2, tight=("tensor",))),
        (lambda: shoal.cell({"tensor_parallel": {"autotp_size": 2}}), Shape(tensor=2)),
    ],
)
def test_the_shape_is_that_of_arguments_and_config_and_a_seat_is_taken_for_it(
    asked: list[Shape], call: Callable[[], Any], shape: Shape
) -> None:
    assert call() == (shape, 1)
    assert asked == [shape]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shoal.cell(CONFIG, tensor=4), "the argument `tensor` is 4, and the config's `shoal.cell.tensor` is 2"),
        (lambda: shoal.cell(tensor=2, tensor_model_parallel_size=4), "is 2, and `tensor_model_parallel_size` is 4"),
        (lambda: shoal.cell(tensr=2), "no argument 'tensr'; expected pipeline, expert, context, tensor, tight"),
        (lambda: shoal.cell(tensor=0), "`shoal.cell.tensor` is 0; expected a whole number from 1 to 1024"),
        (lambda: shoal.cell(tensor="two"), "`shoal.cell.tensor` is .two.; expected a whole number from 1 to 1024"),
        (lambda: shoal.cell(expert=0), "`shoal.cell.expert` is 0; expected a whole number from 1 to 1024"),
        (lambda: shoal.cell(expert_model_parallel_size=0), "`shoal.cell.expert` is 0; expected a whole number"),
        (lambda: shoal.cell(tensor=2, tight=["tensr"]), "expected a list of pipeline, expert, context, tensor"),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused_by_a_sentence_before_a_seat_is_asked_for(
    asked: list[Shape], call: Callable[[], Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        call()
    assert asked == []


def test_a_cell_of_several_processes_needs_a_controller() -> None:
    with pytest.raises(UserError, match=r"this script's cell has 2 processes .*start it with .shoal run --workers 2"):
        shoal.cell(tensor=2)


def test_a_process_has_one_cell_for_its_life() -> None:
    assert shoal.cell() is shoal.cell(tensor=1)
    with pytest.raises(UserError, match="called for cells of one process before, and now for cells of tensor 2"):
        shoal.cell(tensor=2)


def test_a_cell_of_one_process_initializes_torchs_own_groups_only_where_they_are_wanted() -> None:
    cell = shoal.cell()
    assert (cell.coordinate, cell.index("tensor"), cell.size("tensor"), cell.shape) == (0, 0, 1, Shape())
    assert cell.is_first_stage and cell.is_last_stage
    with pytest.raises(UserError, match="'tensr' is no dimension of a cell"):
        cell.size("tensr")
    with cell.sharded_random("tensor"):
        torch.rand(1)
    assert not dist.is_initialized()
    try:
        assert cell.mesh["tensor"].size() == 1
        dist.all_reduce(values := torch.ones(2), group=cell.group("tensor"))
        assert values.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
