"""Stage 3 in cells: units are gathered within a coordinate, what is common from all, and the bits are those of stage 1.

What is freed is NaN, as in test_sharded_parameters.py, and units are seen in their owners' memory or copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shoal.blocks.sharded_memory
import shoal.blocks.unit_flats
import torch
from context_parallel import BOTH, CONTEXT, Divided, Ring
from crew import Worker
from expert_parallel import BOTH as EXPERT_AND_TENSOR
from expert_parallel import EXPERT
from expert_parallel import Divided as OfExperts
from integration.cell_scripts import Copied, Summed
from integration.scripts import VOCABULARY, WIDTH
from matrices import shortened
from pipeline_parallel import PIPELINE, SQUARE, in_stages
from rule import Edit, holds, rule
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.process_group import CellGroup
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from shoal_protos.shape import Shape
from tensor_parallel import TWO, CellTask, NormOfPart, coordinate_of, crew_of, trained
from tiers import check
from torch import Tensor, nn

HALF = {"precision": {"bf16": {"enabled": True}}}


@pytest.fixture(autouse=True, params=["copied", pytest.param("seen", marks=check("as by messages"))])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    if request.param == "copied":
        monkeypatch.setattr(shoal.blocks.sharded_memory, "can_lie_in_pages", lambda _: False)


class Layer(nn.Module):
    """A unit with own parameters and common ones, of some of which each process has a part of the gradient's sum."""

    def __init__(self, hub: CellHub, group: CellGroup) -> None:
        super().__init__()
        size, index, self.group = hub.shape.tensor, hub.coordinate, group
        up, down = torch.randn(8 * WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH, 8 * WIDTH) / WIDTH
        self.norm, self.bias = NormOfPart(nn.LayerNorm(WIDTH), group), nn.Parameter(torch.zeros(WIDTH))
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.up = sharded(nn.Parameter(up.chunk(size, 0)[index].clone()))
        self.down = sharded(nn.Parameter(down.chunk(size, 1)[index].clone()), dim=1)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(Copied.apply(self.norm(hidden) * self.frozen, self.group) @ self.up.T)
        return hidden + Summed.apply(inner @ self.down.T, self.group) + self.bias


class Layered(nn.Module):
    """Embeddings, layers of a unit each, one of them used twice, and a head. `between`: called behind each layer."""

    def __init__(self, hub: CellHub, between: Callable[[], None], _: bool = False) -> None:
        super().__init__()
        self.group, self.between = CellGroup(hub, tuple(hub.shape.coordinates), "tensor"), between
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(hub, self.group) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(tokens))
        for layer in [*self.layers, self.layers[0]]:
            hidden = layer(hidden)
            self.between()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def task_of(stage: int = 3, shape: Shape = TWO, model: Any = None, **options: Any) -> CellTask:
    chosen = model or {TWO: Layered, EXPERT: OfExperts}.get(shape, Divided)
    task = CellTask({"stage": stage, "mirrors": 0, **options}, shape=shape, model=chosen, optimizer=trained_by_adamw)
    return in_stages(task) if shape.pipeline > 1 else task


def trained_by_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


@cache
def one_cell(shape: Shape = TWO, model: Any = None, in_half: bool = False, max_steps: int = 6) -> str:
    """The fingerprint of a world of one cell in stage 1."""
    options = HALF if in_half else {}
    with crew_of("abcdefgh"[: shape.processes], task_of(1, shape, model, max_steps=max_steps, **options)) as crew:
        return crew.finish()


@pytest.mark.parametrize(
    ("names", "in_half", "mirrors"),
    [
        ("ab", False, 0),
        ("abcd", True, 0),
        ("abcdefg", False, 1),
        pytest.param("abcd", False, 0, marks=check("as in half precision")),
        pytest.param("abcdef", True, 1, marks=check("as in full precision")),
    ],
)
@holds("Any number of cells ends in the same bits")
@holds("Frozen blocks count in no sum")
@rule(
    "Of a unit a member of a cell gets its own part from its coordinate, and from others what is common to them alone",
    "Cells",
    broken_by=[Edit("shoal.exchange.traffic", "owned_by(owner) & self.asked[asker] -", "owned_by(owner) -")],
)
def test_sharded_parameters_end_in_the_bits_of_whole_ones(names: str, in_half: bool, mirrors: int) -> None:
    options = HALF if in_half else {}
    with crew_of(names, task_of(mirrors=mirrors, **options)) as crew:
        assert trained(crew) == one_cell(in_half=in_half)


MORE = ("forward", "exchange", "mirror", "optimizer", "in_vote")


@pytest.mark.parametrize(
    "point", ["between", "backward", "vote", *(pytest.param(point, marks=check("as the others")) for point in MORE)]
)
def test_a_process_that_is_killed_while_a_spare_is_there_changes_no_bit(point: str) -> None:
    with crew_of("abcdef", task_of(mirrors=1)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell()


@pytest.mark.parametrize("gathers", shortened(range(9), 2, 7))
@holds("Between a change that pairs a cell anew and the next batch")
@holds("A lane in which a member of a cell was lost")
def test_a_process_that_is_killed_at_any_gather_of_a_lane_changes_no_bit(gathers: int) -> None:
    """A forward that is made again is of a void lane: it gathers in the new world, and its collectives are answered."""
    count = 0

    def die(worker: Worker, point: str, step: int) -> None:
        nonlocal count
        if (worker.name, point, step) == ("d", "gather", 4):
            count += 1
            if count == gathers + 1:
                crew.plant("d", 4, "gather")

    with crew_of("abcdef", task_of(mirrors=1)) as crew:
        crew.watchers.append(die)
        assert trained(crew) == one_cell()
        assert count == gathers + 1
        others = [worker.engine.context.loop for worker in crew.workers.values() if worker.name != "d"]
        assert any(loop.void_lanes for loop in others)


def test_cells_that_were_broken_at_different_coordinates_are_paired_anew() -> None:
    with crew_of("abcd", task_of(mirrors=1)) as crew:
        crew.train_to(2)
        crew.kill("a")
        crew.kill("d")
        assert trained(crew) == one_cell()


@check("a join takes many steps")
def test_half_a_cell_joins_the_other_half_comes_and_one_is_drained() -> None:
    task = task_of(mirrors=1, max_steps=20)
    with crew_of("ab", task) as crew:
        crew.train_to(2)
        crew.add("c", task.at(coordinate_of("c")))
        crew.train_until("a spare", lambda: len(crew.job.durable.current.members) == 3)  # type: ignore[union-attr]
        crew.add("d", task.at(coordinate_of("d")))
        crew.train_until("two cells", lambda: len(crew.job.durable.current.cells) == 2)  # type: ignore[union-attr]
        crew.request(DrainWorker("b"))
        crew.train_until("it to leave", lambda: len(crew.job.durable.current.cells) == 1)  # type: ignore[union-attr]
        assert trained(crew) == one_cell(max_steps=20)


def test_an_evaluation_and_reading_of_parameters_in_a_body_change_no_bit_though_a_member_is_lost_in_it() -> None:
    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step():
            with engine.evaluating():
                engine.module(**batch)
            with engine.gathered():
                assert all(one.isfinite().all() for one in engine.module.parameters())

    def die(worker: Worker, point: str, step: int) -> None:
        if (worker.name, worker.engine.global_step, point) == ("d", 3, "between") and not worker.engine.module.training:
            worker.killed = True

    task = CellTask(task_of(mirrors=1).options, model=Layered, optimizer=trained_by_adamw, body=body)
    with crew_of("abcdef", task) as crew:
        crew.watchers.append(die)
        assert trained(crew) == one_cell()
        assert crew.workers["d"].killed


@pytest.mark.parametrize(("before", "after"), [("abcd", 3), ("ab", 1)])
def test_any_number_of_cells_goes_on_from_a_checkpoint_in_any_stage(before: str, after: int, tmp_path: Path) -> None:
    shoal = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    with crew_of(before, task_of(max_steps=2, shoal=shoal)) as crew:
        crew.finish()
    with crew_of("dcba"[: 6 - len(before)], task_of(after, shoal={"checkpoint": {"path": str(tmp_path)}})) as crew:
        assert trained(crew) == one_cell()
        assert crew.job.durable.history[0].from_step == 2


@pytest.mark.parametrize(
    ("shape", "model", "names"),
    [
        (CONTEXT, Divided, "abcde"),
        (PIPELINE, None, "abcde"),
        (EXPERT, OfExperts, "abcde"),
        pytest.param(EXPERT_AND_TENSOR, OfExperts, "abcdefgh", marks=check("as experts alone, with parts besides")),
        pytest.param(BOTH, Divided, "abcdefgh", marks=check("as contexts alone, with parts besides")),
        pytest.param(CONTEXT, Ring, "abcdef", marks=check("as by an exchange of heads")),
        pytest.param(SQUARE, None, "abcdefgh", marks=check("as a pipeline alone, with parts besides")),
    ],
    ids=str,
)
@pytest.mark.parametrize("point", [None, "between", pytest.param("vote", marks=check("as between collectives"))])
def test_sharded_parameters_of_other_shapes_end_in_the_bits_of_whole_ones(
    shape: Shape, model: Any, names: str, point: str | None
) -> None:
    with crew_of(names, task_of(3, shape, model, mirrors=1)) as crew:
        if point is not None:
            crew.train_to(2)
            crew.plant("d", 4, point)
        assert trained(crew) == one_cell(shape, model)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Their folder; a piece is two blocks, so that there are more pieces than buffers."""
    monkeypatch.setattr("shoal.offload.state_pieces.PIECE_ELEMENTS", 2 * 4096)
    return tmp_path


@pytest.mark.parametrize(
    ("shape", "names", "stage", "point"),
    [
        (TWO, "abcdef", 3, "optimizer"),
        (TWO, "abcd", 2, None),
        pytest.param(TWO, "abcdef", 1, "vote", marks=check("as in stage 3")),
        pytest.param(CONTEXT, "abcde", 2, "optimizer", marks=check("as where layers are divided")),
        pytest.param(PIPELINE, "abcde", 2, None, marks=check("as where layers are divided")),
        pytest.param(PIPELINE, "abcde", 3, "between", marks=check("as where layers are divided")),
        pytest.param(EXPERT, "abcde", 3, "between", marks=check("as where layers are divided")),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["files", pytest.param("cpu", marks=check("where the state of a process is anyway"))])
def test_optimizer_state_of_cells_that_is_offloaded_ends_in_the_same_bits(
    shape: Shape, names: str, stage: int, point: str | None, place: str, files: Path
) -> None:
    given = place if place == "cpu" else files
    with crew_of(names, task_of(stage, shape, mirrors=1, offload=given)) as crew:
        if point is not None:
            crew.train_to(2)
            crew.plant("d", 4, point)
        assert trained(crew) == one_cell(shape)
    assert list(files.iterdir()) == []
