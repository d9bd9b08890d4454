"""Cells whose model is a list of layers, DeepSpeed's `PipelineModule`: sharded in stage 3, and beside tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import Task, undisturbed
from integration.cell_scripts import Copied, Summed
from integration.scripts import VOCABULARY, WIDTH
from pipeline_parallel import PIPELINE, SQUARE, Fixed, as_default, loss_of
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.process_group import CellGroup
from shoal.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.deepspeed.pipeline_engine import PipelineEngine
from shoal.training.engine import Engine
from shoal_protos.shape import ONE, Shape
from tensor_parallel import CellTask, crew_of, trained
from tiers import check
from torch import Tensor, nn

STEPS = 6
OPTIONS = {"micro_batches_per_lane": 2, "lanes": 4, "gradient_clipping": 0.0, "max_steps": STEPS}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that are not gathered are NaN."""
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


class Place:
    """Of a cell in a crew."""

    def __init__(self, hub: CellHub) -> None:
        self.hub, self.shape = hub, hub.shape
        self.line: Any = None

    def index(self, dimension: str) -> int:
        return self.shape.index(self.hub.coordinate)[dimension]

    def group(self, dimension: str) -> Any:
        """Within `as_default`."""
        assert dimension == "pipeline"
        return self.line


class Layer(nn.Module):
    """A perceptron, divided where there is a group."""

    def __init__(self, hub: CellHub | None, between: Callable[[], None]) -> None:
        super().__init__()
        self.norm, self.between, self.group = nn.LayerNorm(WIDTH), between, None
        self.up = nn.Parameter(torch.randn(8 * WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, 8 * WIDTH) / WIDTH)
        if hub is not None and hub.shape.tensor > 1:
            size, part = hub.shape.tensor, hub.shape.index(hub.coordinate)["tensor"]
            self.group = CellGroup(hub, hub.shape.alike(hub.coordinate), "tensor")
            self.up = sharded(nn.Parameter(self.up.detach().chunk(size, 0)[part].clone()))
            self.down = sharded(nn.Parameter(self.down.detach().chunk(size, 1)[part].clone()), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        self.between()
        hidden = self.norm(x)
        if self.group is None:
            return x + torch.relu(hidden @ self.up.T) @ self.down.T
        return x + Summed.apply(torch.relu(Copied.apply(hidden, self.group) @ self.up.T) @ self.down.T, self.group)


def logits(embedding: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(embedding, nn.Embedding)
    return nn.functional.linear(x, embedding.weight)


def layered(
    hub: CellHub | None, between: Callable[[], None] = lambda: None, _: bool = False, interval: int = 0
) -> PipelineModule:
    """Three layers between an embedding and a head that share a weight. `interval`: of checkpointed activations."""
    words = partial(TiedLayerSpec, "words", nn.Embedding, VOCABULARY, WIDTH)
    layers = [words(), *(LayerSpec(Layer, hub, between) for _ in range(3)), words(forward_fn=logits)]
    place: Any = Whole() if hub is None else Place(hub)
    options = {"partition_method": "uniform", "activation_checkpoint_interval": interval}
    return PipelineModule(layers, loss_fn=loss_of, cell=place, **options)


class Whole:
    """The place of a process that has all layers."""

    shape = ONE

    def index(self, _: str) -> int:
        return 0


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loop(engine: Engine, before: Callable[[], None], found: dict[str, list[float]]) -> None:
    """A script for DeepSpeed."""
    module = engine.module
    assert isinstance(module, PipelineModule)
    if isinstance(module.cell, Place):
        with as_default(module.cell.hub) as module.cell.line:
            pipeline = PipelineEngine(engine)
    else:
        pipeline = PipelineEngine(engine)
    pipeline.set_batch_fn(lambda batch: (batch["tokens"], batch["targets"]))
    for step in range(1, STEPS + 1):
        before()
        loss = pipeline.train_batch()
        assert pipeline.global_steps >= step
        found.setdefault(engine.context.link.worker, []).append(loss.item())


def ended(names: str, shape: Shape, stage: int, interval: int = 0, kill: tuple[str, str] | None = None) -> Any:
    """The fingerprint of a crew, and the losses by worker. `kill`: who, and where in step 4."""
    found: dict[str, list[float]] = {}
    task = CellTask(
        {**OPTIONS, "stage": stage}, shape=shape, model=partial(layered, interval=interval), optimizer=adamw,
        data=lambda: Fixed(40), loop=partial(loop, found=found),
    )  # fmt: skip
    with crew_of(names, task) as crew:
        if kill is not None:
            crew.train_to(2)
            crew.plant(kill[0], 4, kill[1])
        return trained(crew), found


@cache
def one_cell(shape: Shape) -> Any:
    """Of stage 1, of a world of one cell."""
    return ended("abcd"[: shape.processes], shape, 1)


@cache
def whole_losses() -> list[float]:
    """Of all layers in one process."""
    found: dict[str, list[float]] = {}
    script = partial(loop, found=found)
    undisturbed(Task(OPTIONS, partial(layered, None), adamw, lambda _: None, data=lambda: Fixed(40), script=script))
    (losses,) = found.values()
    return losses


@pytest.mark.parametrize("shape", [PIPELINE, SQUARE], ids=str)
def test_losses_are_those_of_all_layers_in_one_process(shape: Shape) -> None:
    _, found = one_cell(shape)
    assert all(losses == pytest.approx(whole_losses(), abs=1e-5) for losses in found.values())


@pytest.mark.parametrize(
    ("shape", "names", "stage", "interval", "kill"),
    [
        (PIPELINE, "ab", 3, 0, None),
        (PIPELINE, "abcd", 3, 2, ("d", "between")),
        pytest.param(PIPELINE, "abcde", 3, 0, ("c", "backward"), marks=check("as at the other point")),
        pytest.param(SQUARE, "abcdefgh", 1, 0, ("g", "between"), marks=check("as in stage 3")),
        pytest.param(SQUARE, "abcd", 3, 0, None, marks=check("as in two cells")),
        (SQUARE, "abcdefgh", 3, 0, ("f", "backward")),
    ],
)
def test_layers_in_cells_end_in_the_bits_of_one_cell_of_stage_1(
    shape: Shape, names: str, stage: int, interval: int, kill: tuple[str, str] | None
) -> None:
    fingerprint, found = ended(names, shape, stage, interval, kill)
    assert fingerprint == one_cell(shape)[0]
    others = [losses for name, losses in found.items() if kill is None or name != kill[0]]
    assert all(losses == others[0] for losses in others)
