"""Units that are compiled each, in stage 3: changes of the world compile nothing again, and change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import Crew, Task, undisturbed
from shoal.training.engine import Engine
from torch import Tensor, nn
from torch._dynamo.utils import counters

WIDTH = 32


class Layer(nn.Module):
    """As a transformer's: what compilers like."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def compile_layers(engine: Engine) -> None:
    for layer in engine.module.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")


def graphs() -> int:
    """Of this process until now: workers are threads of one here, so of all of them."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_loss_and_a_join_compile_nothing_again_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many graphs as one worker's, whichever unit, worker and world they are for: one for each stretch between two
    modules with parameters, where a unit may be gathered.
    """
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    options: dict[str, Any] = {"max_steps": 6, "stage": 3, "mirrors": 1}
    task = Task(options, model=Stack, prepare=compile_layers)
    torch.compiler.reset()
    counters.clear()
    with Crew("abc", task) as crew:
        crew.train_to(1)
        before = graphs()
        crew.plant("b", 3, "backward")
        crew.train_to(4)
        crew.add("d")
        fingerprint = crew.finish()
    after = graphs()
    torch.compiler.reset()
    counters.clear()
    with Crew("a", task) as crew:
        assert crew.finish() == fingerprint == undisturbed(Task(options, model=Stack))
    assert before == after == graphs() > 0
    torch.compiler.reset()
