"""What does not work yet where a cell has several processes, and the sentence that says so."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import shoal.deepspeed as deepspeed
import torch
from shoal.cells.hub import CellHub
from shoal.optim.elementwise import check_optimizer
from shoal.optim.several import several
from shoal.state.training_state import Limits, TrainingState
from shoal.training.residency import residency_of
from shoal.training.start import _check_place, in_cell, part_of
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import nn

TWO = Shape(tensor=2)


def test_a_model_without_values_is_refused() -> None:
    with shoal.deferred():
        model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r'"weight" has no values: shoal\.deferred\(\) is not supported yet where a'):
        _check_place("weight", model.weight.device.type)


def test_a_model_on_a_device_is_refused() -> None:
    with pytest.raises(UserError, match='"weight" lies on a device, cuda: cells of several processes compute on the'):
        _check_place("weight", torch.device("cuda", 0).type)


def test_a_parameter_that_is_divided_among_contexts_is_refused() -> None:
    model = nn.Linear(2, 2)
    shoal.sharded(model.weight, over="context")
    for shape in (Shape(context=2), Shape(tensor=2, context=2)):
        with pytest.raises(
            UserError, match=r'"weight" is marked by shoal\.sharded over context, which is not supported'
        ):
            part_of(model, shape, 0)
    assert part_of(model, TWO, 0).own == frozenset(), "one context has all of it"


@pytest.mark.parametrize(("shape", "mark"), [(TWO, {}), (Shape(expert=2), {"over": "expert", "dim": 0})], ids=str)
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_an_optimizer_of_whole_tensors_is_refused_for_one_of_which_each_process_has_a_part(
    name: str, shape: Shape, mark: dict[str, Any]
) -> None:
    model = nn.Linear(4, 4)
    shoal.sharded(model.weight, **mark)
    optimizer = several([getattr(torch.optim, name)([model.weight]), torch.optim.AdamW([model.bias])])
    check_optimizer(optimizer, False)
    limits = in_cell(Limits(lanes=2, clipping=0.0, last_step=1), model, optimizer, CellHub(shape, 0))
    with pytest.raises(
        UserError, match=f'each process of a cell has a part of parameter "weight", and {name} updates whole tensors; '
    ):
        TrainingState(model, optimizer, None, limits, residency_of(1))


def test_deepspeeds_door_is_refused_for_a_model_that_is_no_pipeline() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "tensor_parallel": {"autotp_size": 2},
        "shoal": {"lanes": 2, "epochs": 1},
    }
    with pytest.raises(
        UserError, match=r"initialize of a model that is no PipelineModule does not support cells of several processes"
    ):
        deepspeed.initialize(model=nn.Linear(2, 2), training_data=[(torch.zeros(2), torch.zeros(2))], config=config)
