"""What the parameters of a module are to the places of a cell. DTensors: tests/integration/test_cell_processes.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shoal.cells.marks import COMMON, Mark, common, local_gradient, local_of, marks, sharded
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import nn

TWO = Shape(tensor=2)


class Layer(nn.Module):
    """A parameter of each kind, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.own, self.summed, self.megatrons, self.sequence, self.pipelines = (
            nn.Parameter(torch.zeros(2, 3)) for _ in range(6)
        )
        self.tied = sharded(self.own, dim=-1)
        common(self.summed, gradient="sum")
        sharded(self.pipelines, over="pipeline")
        self.megatrons.tensor_model_parallel, self.megatrons.partition_dim = True, 1  # type: ignore[attr-defined]
        self.megatrons.partition_stride = 2  # type: ignore[attr-defined]
        self.sequence.tensor_model_parallel, self.sequence.sequence_parallel = False, True  # type: ignore[attr-defined]


def test_parameters_are_what_scripts_and_megatrons_layers_say_and_common_else() -> None:
    assert marks(Layer(), TWO) == {
        "plain": COMMON,
        "own": Mark(True, dim=1),
        "tied": Mark(True, dim=1),
        "summed": Mark(gradient="sum"),
        "megatrons": Mark(True, dim=1, stride=2),
        "sequence": Mark(gradient="sum"),
        "pipelines": COMMON,
    }


@pytest.mark.parametrize("shape", [Shape(), Shape(context=2)])
def test_nothing_is_divided_where_a_cell_has_one_place_that_divides_layers(shape: Shape) -> None:
    assert set(marks(Layer(), shape).values()) == {COMMON}


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (lambda one: sharded(one, dim=2), r"dim 2 of a parameter of shape \(2, 3\)"),
        (lambda one: sharded(one, over="tensr"), "'tensr'; expected one of pipeline, expert, context, tensor"),
        (lambda one: common(one, gradient="mean"), '\'mean\'; expected "equal" or "sum"'),
    ],
)
def test_a_mark_that_cannot_be_is_refused(mark: Callable[[nn.Parameter], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mark(nn.Parameter(torch.zeros(2, 3)))


def test_a_plain_parameter_and_its_gradient_are_their_own_local_parts() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(2)), torch.ones(2)
    assert local_of(parameter) is parameter
    found = local_gradient(parameter, gradient)
    assert found.tensor is gradient and not found.is_partial and found.own(gradient) is gradient
