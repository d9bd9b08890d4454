"""Small random modules, and random programs over them: for tests that compare stages, worlds and precisions in bits.

`RandomModel(number)` is one of them: layers that are shared, tied, called twice, left out, recomputed in backward in
both of torch's ways, frozen; recurrent, attending, normalizing with buffers; scalar and empty parameters, some double.
Every forward may choose another path by its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from integration.scripts import VOCABULARY
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16

Call = Callable[[Tensor], Tensor]  # (batch, length, WIDTH) to the same


class _Norm(nn.Module):
    """Batch normalization over (batch, length), and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scratch", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return self.norm(x.flatten(0, 1)).view_as(x) * self.scratch


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return self.cells(x)[0]


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return self.heads(x, x, x, need_weights=False)[0]


class _Wide(nn.Module):
    """Of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 600), nn.Linear(600, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return self.down(torch.relu(self.up(x)))


class _Scaled(nn.Module):
    """By a parameter without dimensions, plus one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x * self.scale + self.none.sum()


class _Double(nn.Module):
    """In double precision where the rest is in single."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class _Penalized(nn.Module):
    """Its output's gradient is a part of it: a backward within the forward, and a second one through that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        at = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(at)).sum(), at, create_graph=True)
        return x + slope * 0.1


PARTS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH), lambda: nn.Dropout(0.2), _Norm, _Recurrent,
    _Attending, _Wide, _Scaled, _Double, _Penalized,
)  # fmt: skip
REENTRANT = "recomputed reentrant"
WAYS = ("plain", "plain", "twice", "left out", "by batch", "recomputed", REENTRANT, "added")


PRECISIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}},
    {"fp16": {"enabled": True, "loss_scale": 128}},
)
"""What such a model may be trained in: the first scale of the third overflows."""


class RandomModel(nn.Module):
    """Tokens to the mean cross entropy of the next ones, by a random program."""

    def __init__(self, number: int, is_half: bool = False) -> None:
        """`is_half`: it is to be rounded to half precision, in which torch has no recurrence on every CPU."""
        super().__init__()
        random = Random(number)
        parts = [part for part in PARTS if not is_half or part is not _Recurrent]
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.parts = nn.ModuleList(random.choice(parts)() for _ in range(random.randint(2, 5)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=random.random() < 0.5)
        if random.random() < 0.5:
            self.head.weight = self.embedding.weight
        for parameter in self.parts.parameters():
            if random.random() < 0.1:
                parameter.requires_grad_(False)
        self.program = [(random.randrange(len(self.parts)), random.choice(WAYS)) for _ in range(random.randint(2, 6))]
        called = [index for index, _ in self.program]
        self.program = [
            (index, "recomputed" if way == REENTRANT and called.count(index) > 1 else way)
            for index, way in self.program
        ]  # a gradient that autograd makes in two parts is refused

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both (batch, length)
        hidden = self.embedding(tokens)
        for index, way in self.program:
            hidden = self._call(self.parts[index], way, hidden, int(tokens.sum()))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())

    def _call(self, part: nn.Module, way: str, x: Tensor, batch: int) -> Tensor:  # (batch, length, WIDTH)
        if way == "twice":
            return part(x) + part(x * 0.5)
        if way == "left out" or (way == "by batch" and batch % 2):
            return x
        if way.startswith("recomputed") and self.training:
            return x + checkpoint(part, x, use_reentrant=way == REENTRANT)
        return x + part(x) if way == "added" else part(x)


def optimizer_of(number: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A random one, with one to three groups."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        random = Random(number)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        count = random.randint(1, min(3, len(trained)))
        groups: list[dict[str, Any]] = [{"params": trained[at::count], "lr": 1e-3 * (at + 1)} for at in range(count)]
        kind, arguments = random.choice(
            [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})]
        )
        return kind(groups, lr=1e-3, **arguments)

    return make
