"""Parameters without dimensions: their optimizer state is one element of a block, not a number that all share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from integration.scripts import Model
from rule import Edit, holds, rule
from shoal.blocks.flat import adopt, lay_out_model, trainable
from shoal.blocks.values import WholeValues
from shoal.offload.state_place import StatePlace, held_blocks
from shoal_protos.runs import every
from torch import Tensor, nn


class Scaled(nn.Module):
    """A loss with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Model(0.1, True), nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens, targets) * self.scale
        return loss


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.01)


@holds("Optimizer state that exists before")
@pytest.mark.parametrize("workers", ["ab", "abcd"])
def test_adagrad_trains_a_scalar_parameter_the_same_in_every_world(workers: str) -> None:
    task = Task({"max_steps": 4}, model=Scaled, optimizer=adagrad)
    with Crew(workers, task) as crew:
        crew.train_to(2)
        crew.kill(workers[0])
        assert crew.finish() == undisturbed(task)


@rule(
    "Optimizer state that exists before the start counts as per-element where the optimizer keeps one value per "
    "element, also for a parameter without dimensions",
    "Arithmetic and layout",
    broken_by=Edit("shoal.blocks.loaded_state", " or key in shared)", ")"),
)
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.ASGD, torch.optim.SGD])
@pytest.mark.parametrize("only_scalars", [False, True])
def test_state_that_an_optimizer_brings_along_goes_on_as_in_the_plain_optimizer(kind: Any, only_scalars: bool) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.scale = nn.Parameter(torch.tensor(1.5))
        if not only_scalars:
            model.weight = nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5))
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, kind(model.parameters(), lr=0.01, foreach=False, **more)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.25 + number)
        optimizer.step()

    (model, optimizer), (plain, theirs) = made(), made()
    step(model, optimizer)
    step(plain, theirs)
    layout, parameters = lay_out_model(pairs := trainable(model, optimizer))
    flats = adopt(layout, parameters)
    held = held_blocks(
        StatePlace(), layout, optimizer, WholeValues(layout, flats), {info.name: tensor for info, tensor in pairs}
    )
    held.hold(every(layout.blocks))
    gradients = [torch.zeros_like(flat) for flat in flats]
    for bucket, flat in zip(layout.buckets, gradients, strict=True):
        for slot in bucket.slots:
            number = list(dict(model.named_parameters())).index(slot.parameter.name)
            flat[slot.start : slot.start + slot.parameter.elements] = 0.25 + number
    held.apply(WholeValues(layout, gradients), 1.0)
    step(plain, theirs)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


class WithNothing(Scaled):
    """One parameter has no elements, and no other shares its block."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets) + self.nothing.sum()


def test_a_block_without_an_element_has_the_state_that_its_optimizer_brings_along() -> None:
    task = Task({"max_steps": 3}, model=WithNothing, optimizer=adagrad)
    with Crew("ab", task) as crew:
        crew.train_to(1)
        crew.kill("b")
        assert crew.finish() == undisturbed(task)
