"""Optimizers and modules of other makes: what assigns `.data` instead of writing, what torch.jit has compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from hard_units import Layer, Layers, of, task
from matrices import shortened
from rule import Edit, rule
from shoal_protos.errors import UserError
from torch import Tensor, nn


class Writing(torch.optim.Optimizer):
    """Plain descent."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.change(parameter, -group["lr"] * parameter.grad)

    def change(self, parameter: Tensor, by: Tensor) -> None:  # both of one shape
        parameter.data.add_(by)


class Assigning(Writing):
    def change(self, parameter: Tensor, by: Tensor) -> None:  # both of one shape
        parameter.data = parameter.data + by


class Widening(Writing):
    def change(self, parameter: Tensor, by: Tensor) -> None:  # both of one shape
        parameter.data = parameter.data.double() + by


def by(kind: type[Writing], stage: int, **more: Any) -> Task:
    options = {"max_steps": 4, "stage": stage, "shoal": {"elementwise": True}, **more}
    return Task(options, model=Layers, optimizer=lambda model: kind(model.parameters()))


@rule(
    "What an optimizer assigns to `.data` is written to where the parameter lies",
    "A step",
    broken_by=Edit(
        "shoal.blocks.optimizer_step",
        "        if segment.parameter.data_ptr() != memory.data_ptr():\n",
        "        if segment.parameter.data_ptr() == 0:\n",
    ),
)
@pytest.mark.parametrize("precision", [{}, {"precision": {"bf16": {"enabled": True}}}])
@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_an_optimizer_that_assigns_data_trains_as_one_that_writes(stage: int, precision: dict[str, Any]) -> None:
    right = undisturbed(by(Writing, 0, **precision))
    assert right != undisturbed(by(Writing, 0, max_steps=3, **precision))
    assert undisturbed(by(Assigning, stage, **precision)) == right


def test_an_optimizer_that_assigns_data_goes_through_a_loss_and_a_join() -> None:
    with Crew("ab", by(Assigning, 3)) as crew:
        crew.plant("b", 2, "vote")
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == undisturbed(by(Writing, 0))


def test_data_of_another_kind_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"optimizer Widening has put a torch\.float64 of shape .* place of a torch\.float32"
    ):
        undisturbed(by(Widening, 1))


class Scripted(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = torch.jit.script(Layer())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.layers[3](self.layers[0](self.embedding(tokens)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Plain(Scripted):
    def __init__(self) -> None:
        Layers.__init__(self)
        self.layers[3] = Layer()


def with_model(stage: int, model: type[nn.Module]) -> Task:
    return Task(**{**vars(of(task(stage))), "model": model})


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_part_that_torch_jit_has_compiled_trains_where_parameters_stay(stage: int) -> None:
    with Crew("ab", with_model(stage, Scripted)) as crew:
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == undisturbed(with_model(0, Plain))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_part_that_torch_jit_has_compiled_is_refused_where_parameters_come_and_go() -> None:
    with pytest.raises(UserError, match=r'module "layers\.3" was made by torch\.jit.*stage 2'):
        undisturbed(with_model(3, Scripted))
