"""What does not work yet where a cell has several processes, and the sentence that says so."""

from __future__ import annotations

import pytest
import shoal
import shoal.deepspeed as deepspeed
import torch
from shoal.training.start import _check_place, part_of
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
