"""Small models that divide a sequence among the places of a cell as examples/context_parallel.py does, with tensor
parallelism besides where the cell has that dimension. `Whole` is the same in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from crew import Task, undisturbed
from integration.cell_scripts import Copied, Summed
from integration.scripts import VOCABULARY, WIDTH
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.process_group import CellGroup
from shoal.training.engine import Engine
from shoal_protos.shape import Shape
from torch import Tensor, nn

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/context_parallel.py"
CONTEXT, FOUR = Shape(context=2), Shape(context=4)
BOTH = Shape(tensor=2, context=2)
HEADS = 2
DEPTH = 2


@cache
def defined() -> dict[str, Any]:
    """What the example defines before it calls `shoal.cell`."""
    definitions, _, rest = EXAMPLE.read_text().partition("\ncell = shoal.cell(config)")
    assert rest, f"{EXAMPLE} calls shoal.cell after its definitions"
    known: dict[str, Any] = {}
    exec(definitions, known)
    return known


class Whole(nn.Module):
    """Tokens to the mean cross entropy of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Parameter(torch.randn(8 * WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, 8 * WIDTH) / WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def inner(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden @ self.up.T) @ self.down.T

    def cut(self, tokens: Tensor) -> Tensor:
        return tokens

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(self.cut(tokens)))
        for _ in range(DEPTH):
            q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.qkv(hidden).chunk(3, -1))
            hidden = hidden + self.attend(q, k, v).transpose(1, 2).flatten(2)
            hidden = hidden + self.inner(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), self.cut(targets).flatten())


class Divided(Whole):
    """A process's part. `between`: called between two collectives of a forward."""

    by = "ulysses"

    def __init__(self, hub: CellHub, between: Callable[[], None], _: bool = False) -> None:
        super().__init__()
        shape, coordinate = hub.shape, hub.coordinate
        self.between, size, part = between, shape.tensor, shape.index(coordinate)["tensor"]
        with_my_part = [one for one in shape.coordinates if shape.index(one)["tensor"] == part]
        self.context = CellGroup(hub, with_my_part, "context")
        self.tensor = CellGroup(hub, shape.alike(coordinate), "tensor")
        if size > 1:
            self.up = sharded(nn.Parameter(self.up.detach().chunk(size, 0)[part].clone()))
            self.down = sharded(nn.Parameter(self.down.detach().chunk(size, 1)[part].clone()), dim=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = defined()[self.by](q, k, v, self.context)
        self.between()
        return found

    def inner(self, hidden: Tensor) -> Tensor:
        return Summed.apply(super().inner(Copied.apply(hidden, self.tensor)), self.tensor)

    def cut(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(self.context.size(), 1)[self.context.rank()]


class Ring(Divided):
    by = "ring"


def losses_of_the_whole(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> list[float]:
    """Those of the same model in one process, step by step."""
    found: list[float] = []

    def step(engine: Engine) -> None:
        if engine.step() and engine.loss is not None:
            found.append(engine.loss)

    options = {"lanes": 4, "max_steps": 6, "gradient_clipping": 0.0}
    undisturbed(Task(options, Whole, optimizer, scheduler=lambda _: None, step=step))
    return found
