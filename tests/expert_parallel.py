"""A small model with a layer of experts, divided among the places of a cell, with tensor parallelism besides where the
cell has that dimension. `Whole` is the same in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from crew import Task, undisturbed
from integration.cell_scripts import Copied, Summed
from integration.scripts import VOCABULARY, WIDTH
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.process_group import CellGroup
from shoal.deepspeed.moe.layer import MoE
from shoal.training.engine import Engine
from shoal_protos.shape import Shape
from torch import Tensor, nn

EXPERT, FOUR = Shape(expert=2), Shape(expert=4)
BOTH = Shape(expert=2, tensor=2)
OF_CONTEXTS = Shape(expert=2, context=2)
EXPERTS = 4


def group_of(hub: CellHub, dimension: str) -> CellGroup:
    """Those of its cell who differ from a process in one dimension alone."""

    def others(one: int) -> list[int]:
        return [index for name, index in hub.shape.index(one).items() if name != dimension]

    mine = [one for one in hub.shape.coordinates if others(one) == others(hub.coordinate)]
    assert hub.index(dimension) == mine.index(hub.coordinate)
    return CellGroup(hub, mine, dimension)


class Inner(nn.Module):
    """Two matrices of which a place of the tensor dimension has a part."""

    def __init__(self, group: CellGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH)
        if group is not None and group.size() > 1:
            size, part = group.size(), group.rank()
            self.up = sharded(nn.Parameter(self.up.detach().chunk(size, 0)[part].clone()))
            self.down = sharded(nn.Parameter(self.down.detach().chunk(size, 1)[part].clone()), dim=1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.group is None:
            return torch.relu(hidden @ self.up.T) @ self.down.T
        return Summed.apply(torch.relu(Copied.apply(hidden, self.group) @ self.up.T) @ self.down.T, self.group)


class Whole(nn.Module):
    """Tokens to the mean cross entropy of the next ones."""

    balance = 0.01
    """So much of the auxiliary loss is added."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.inner = self.make_inner()
        self.moe = self.make_experts(self.make_inner(), **options)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def make_inner(self) -> Inner:
        return Inner()

    def make_experts(self, expert: nn.Module, **options: Any) -> MoE:
        return MoE(WIDTH, expert, EXPERTS, **options)

    def between(self) -> None:
        """Two collectives of a forward."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.inner(hidden)
        made, imbalance, _ = self.moe(self.norm(hidden))
        self.between()
        loss = nn.functional.cross_entropy(self.head(hidden + made).flatten(0, 1), targets.flatten())
        return loss + self.balance * imbalance


class Divided(Whole):
    """A process's part. `between`: called between two collectives of a forward."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, hub: CellHub, between: Callable[[], None], _: bool = False) -> None:
        self.__dict__["groups"] = {name: group_of(hub, name) for name in ("expert", "tensor", "context")}
        super().__init__(**self.options)
        self.__dict__["between"] = between

    def make_inner(self) -> Inner:
        return Inner(self.groups["tensor"])

    def make_experts(self, expert: nn.Module, **options: Any) -> MoE:
        group = self.groups["expert"]
        return MoE(WIDTH, expert, EXPERTS, group.size(), group=group, **options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        context = self.groups["context"]
        cut = partial(torch.chunk, chunks=context.size(), dim=1)
        return super().forward(cut(tokens)[context.rank()], cut(targets)[context.rank()])


class Counted(Inner):
    """Which keeps a running mean of what it has seen, unlike that of any other expert."""

    def __init__(self, group: CellGroup | None = None) -> None:
        super().__init__(group)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(hidden.mean(0), 0.5)
        return super().forward(hidden)


class Counting(Divided):
    """Whose experts have a buffer each."""

    def make_experts(self, _: nn.Module, **options: Any) -> MoE:
        return super().make_experts(Counted(self.groups["tensor"]), **options)


def gradient_descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def without_chance() -> list[dict[str, Tensor]]:
    """Samples that draw nothing when they are read."""
    tokens = torch.randint(VOCABULARY, (40, 9), generator=torch.Generator().manual_seed(5))
    return [{"tokens": row[:-1], "targets": row[1:]} for row in tokens]


def losses_of_the_whole(options: dict[str, Any], divided: type[Divided], **more: Any) -> list[float]:
    """Those of the same model in one process, step by step."""
    found: list[float] = []

    def model() -> Whole:
        made = Whole(**divided.options)
        made.balance = divided.balance
        return made

    def step(engine: Engine) -> None:
        if engine.step() and engine.loss is not None:
            found.append(engine.loss)

    given = {"lanes": 4, "max_steps": 6, "gradient_clipping": 0.0, **options}
    undisturbed(Task(given, model, gradient_descent, scheduler=lambda _: None, step=step, **more))
    return found
