"""Models and jobs for tests of sharded parameters (stage 3): units with all that makes them hard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shoal
import torch
from crew import Task
from integration.scripts import VOCABULARY
from shoal.training.engine import Engine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS, LANES, WIDTH = 6, 4, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 200), nn.Linear(200, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Layers(nn.Module):
    """Units with all that makes them hard: tied, shared, called twice, recomputed, used from outside, left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers[4].up.weight = self.layers[1].up.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.dropout(self.embedding(tokens) + self.places[: tokens.shape[1]])
        hidden = self.layers[1](self.layers[0](hidden))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = checkpoint(lambda x: self.layers[2](self.layers[4](x)), hidden, use_reentrant=False)
        hidden = self.layers[0](hidden) * self.layers[3].norm.weight.detach().norm()
        logits = nn.functional.linear(self.head(hidden), self.embedding.weight @ self.embedding.weight.t())
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def task(stage: int = 3, **more: Any) -> Task:
    given = {key: more.pop(key) for key in ("body", "step", "in_loop", "prepare") if key in more}
    return Task({"max_steps": STEPS, "lanes": LANES, "stage": stage, **more}, model=Layers, **given)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def of(one: Task) -> Task:
    return Task(**{**vars(one), "optimizer": adamw})


def and_train(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch))
    engine.step()


def with_model(one: Task, model: Callable[[], nn.Module]) -> Task:
    """The same task with another model, layout and all."""
    return Task(**{**vars(of(one)), "model": model})


def without_values(model: Callable[[], nn.Module], **given: Any) -> Callable[[], nn.Module]:
    """What builds that model by `shoal.deferred` with these arguments."""

    def build() -> nn.Module:
        with shoal.deferred(**given):
            return model()

    return build
