"""A small model in stages, and what a crew trains with it by torch's schedules; with tensor parallelism and experts
besides where the cell has these dimensions. `losses_of_the_whole` are those of the same stages in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from crew import Task, undisturbed
from expert_parallel import group_of
from integration.cell_scripts import Copied, Summed
from integration.scripts import VOCABULARY, WIDTH, Samples
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.process_group import CellGroup
from shoal.cells.stages import Stages, built_stages
from shoal.deepspeed.moe.layer import MoE
from shoal.training.engine import Engine
from shoal_protos.shape import Shape
from tensor_parallel import CellTask
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

PIPELINE, THREE = Shape(pipeline=2), Shape(pipeline=3)
SQUARE = Shape(tensor=2, pipeline=2)
OF_EXPERTS = Shape(expert=2, pipeline=2)
CUBE = Shape(expert=2, pipeline=2, tensor=2)
ALL = Shape(expert=2, pipeline=2, context=2, tensor=2)
MICRO_BATCHES = 2
DROPOUT = 0.1


class Fixed(Samples):
    """Samples that draw no random numbers: a lane reads them at once, and without a pipeline by micro-batches."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.manual_seed(index)
        return super().__getitem__(index)


class Stage(nn.Module):
    """Tokens to activations, activations to activations, or activations to logits. `between`: called in a forward."""

    def __init__(
        self, number: int, count: int, dropout: float, hub: CellHub | None, between: Callable[[], None]
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else nn.Identity()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        wide = 8 * WIDTH if number else 12 * WIDTH  # stages of other sizes
        self.up = nn.Parameter(torch.randn(wide, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, wide) / WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == count - 1 else nn.Identity()
        self.counted = nn.BatchNorm1d(WIDTH)
        self.between, self.group = between, None
        if hub is not None and hub.shape.tensor > 1:
            size, part = hub.shape.tensor, hub.shape.index(hub.coordinate)["tensor"]
            self.group = CellGroup(hub, hub.shape.alike(hub.coordinate), "tensor")
            self.up = sharded(nn.Parameter(self.up.detach().chunk(size, 0)[part].clone()))
            self.down = sharded(nn.Parameter(self.down.detach().chunk(size, 1)[part].clone()), dim=1)
        self.moe = None
        if hub is not None and (places := hub.shape.expert) > 1:
            expert = nn.Linear(WIDTH, WIDTH)
            self.moe = MoE(WIDTH, expert, 2 * places, places, group=group_of(hub, "expert"), k=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(x))
        hidden = self.dropout(self.counted(hidden.flatten(0, 1)).view_as(hidden))
        self.between()
        if self.group is None:
            hidden = hidden + torch.relu(hidden @ self.up.T) @ self.down.T
        else:
            inner = torch.relu(Copied.apply(hidden, self.group) @ self.up.T)
            hidden = hidden + Summed.apply(inner @ self.down.T, self.group)
        return self.head(hidden if self.moe is None else hidden + self.moe(hidden)[0])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stages_of(
    hub: CellHub, between: Callable[[], None], _: bool = False, turns: int = 1, dropout: float = DROPOUT
) -> Stages:
    """Those of a process."""
    places = hub.shape.pipeline
    build = partial(_built, count=places * turns, dropout=dropout, hub=hub, between=between)
    found = built_stages(build, places * turns, hub.shape.index(hub.coordinate)["pipeline"], places)
    HUBS[found] = hub
    return found


def without_buffers(hub: CellHub, between: Callable[[], None], _: bool = False) -> Stages:
    """The same without what places of experts have unlike."""
    found = stages_of(hub, between)
    for stage in (stage for place in found.places for stage in place.values()):  # type: ignore[operator]
        stage.counted = nn.Identity()
    return found


def _built(number: int, count: int, dropout: float, hub: CellHub | None, between: Callable[[], None]) -> Stage:
    return Stage(number, count, dropout, hub, between)


HUBS: WeakKeyDictionary[Stages, CellHub] = WeakKeyDictionary()


@contextmanager
def as_default(hub: CellHub) -> Iterator[Any]:
    """The process's default group is this member's cell meanwhile, whose pipeline is registered as torch does it."""
    before = _world.default_pg
    whole = CellGroup(hub, hub.shape.coordinates, "default")
    index = hub.shape.index(hub.coordinate)
    line = [
        one for one in hub.shape.coordinates if all(
            hub.shape.index(one)[name] == place for name, place in index.items() if name != "pipeline"
        )
    ]  # fmt: skip
    group = CellGroup(hub, line, "pipeline")
    _world.pg_group_ranks[group] = {coordinate: rank for rank, coordinate in enumerate(line)}
    _world.pg_group_ranks[whole] = {coordinate: coordinate for coordinate in hub.shape.coordinates}
    _world.default_pg = whole
    try:
        yield group
    finally:
        _world.default_pg = before


class Body:
    """What a loop does with a batch, by a schedule of this kind."""

    def __init__(self, kind: Any = Schedule1F1B) -> None:
        self.kind = kind
        self._schedules: WeakKeyDictionary[Engine, Any] = WeakKeyDictionary()

    def schedule(self, engine: Engine) -> Any:
        """That of a worker."""
        schedule = self._schedules.get(engine)
        if schedule is None:
            schedule = self._schedules[engine] = made_for(engine, self.kind)
        return schedule

    def __call__(self, engine: Engine, batch: Any) -> bool:
        schedule = self.schedule(engine)
        part = engine.context.state.layout.part
        inputs = (batch["tokens"],) if part.place == 0 else ()
        target = batch["targets"] if part.place == part.stages - 1 else None
        engine.run(schedule.step, *inputs, target=target)
        return engine.step()


def made_for(engine: Engine, kind: Any, activations: Tensor | None = None, **named: Any) -> Any:
    """`activations`: of the form of those that pass between stages, which are told by them where it is None."""
    module = engine.module
    assert isinstance(module, Stages)
    given = {"loss_fn": engine.loss_fn(loss_of), "scale_grads": False, **named}
    with as_default(HUBS[module]) as group:
        stages = [
            PipelineStage(
                stage,
                int(number),
                module.count,
                torch.device("cpu"),
                activations if number != "0" else None,
                group=group,
            )
            for number, stage in module.items()
        ]
        several = issubclass(kind, ScheduleInterleaved1F1B)
        return kind(stages if several else stages[0], engine.micro_batches, **given)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def in_stages(task: CellTask, kind: Any = Schedule1F1B, turns: int = 1) -> CellTask:
    """A task of a shape, with this file's model."""
    options = {"micro_batches_per_lane": MICRO_BATCHES, "lanes": 4, **task.options}
    model = partial(stages_of, turns=turns)
    return replace(task, options=options, model=model, body=Body(kind), optimizer=adam)


class Whole(nn.Module):
    """All stages, one after the other."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        build = partial(_built, count=count, dropout=0.0, hub=None, between=lambda: None)
        self.stages = built_stages(build, count, 0, 1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = tokens
        for stage in self.stages.values():
            hidden = stage(hidden)
        return loss_of(hidden, targets)


def losses_of_the_whole(options: dict[str, Any], optimizer: Callable[[nn.Module], Any], count: int = 2) -> list[float]:
    """Those of the same model in one process, step by step."""
    found: list[float] = []

    def step(engine: Engine) -> None:
        if engine.step() and engine.loss is not None:
            found.append(engine.loss)

    task = Task(options, lambda: Whole(count), optimizer, lambda _: None, step=step, data=lambda: Fixed(40))
    undisturbed(task)
    return found
