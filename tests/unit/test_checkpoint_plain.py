"""Python values as JSON and back."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.plain import decode, encode
from shoal_protos.errors import UserError
from torch import Tensor

keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.dictionaries(keys, inner)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "it"), allow_nan=False)), tensors)


@given(values)
def test_every_plain_value_comes_back_with_its_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)  # -0.0 and 0.0, True and 1, tuples and lists


@given(st.sets(keys) | st.frozensets(keys))
def test_a_set_comes_back(value: Any) -> None:
    assert there_and_back([value]) == [value]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), Counter({3: 2}), OrderedDict([("b", 1), ("a", 2)]), frozenset({1})],
    ids=repr,
)
def test_what_json_lacks_comes_back(value: Any) -> None:
    back = there_and_back(value)
    assert repr(back) == repr(value)


def test_tensors_and_arrays_come_back_bit_by_bit() -> None:
    state = {
        1: torch.tensor([0.1, float("nan"), -0.0], dtype=torch.bfloat16),
        "1": torch.tensor(7),
        "a": numpy.arange(3, dtype=numpy.uint8),
        "n": numpy.float32(0.1),
    }
    back = there_and_back(state)
    assert back[1].dtype == torch.bfloat16
    assert torch.equal(back[1].view(torch.int16), state[1].view(torch.int16))  # type: ignore[union-attr]
    assert back["1"].tolist() == 7
    assert back["a"].dtype == numpy.uint8 and back["a"].tolist() == [0, 1, 2]
    assert type(back["n"]) is numpy.float32 and back["n"] == numpy.float32(0.1)


def schedulers() -> list[Any]:
    """One of every kind that torch has."""
    from torch.optim import lr_scheduler as of

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return [
        of.StepLR(optimizer, 2),
        of.MultiStepLR(optimizer, [2, 5, 5]),
        of.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        of.OneCycleLR(optimizer, 0.2, total_steps=10),
        of.CosineAnnealingWarmRestarts(optimizer, 3),
        of.CyclicLR(optimizer, 0.1, 0.2),
        of.ReduceLROnPlateau(optimizer),
        of.SequentialLR(optimizer, [of.ConstantLR(optimizer), of.ExponentialLR(optimizer, 0.9)], [3]),
        of.ChainedScheduler([of.LinearLR(optimizer), of.PolynomialLR(optimizer)]),
    ]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("scheduler", schedulers(), ids=lambda s: type(s).__name__)
def test_the_state_of_every_scheduler_of_torch_comes_back(scheduler: Any) -> None:
    for _ in range(3):
        scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    state = scheduler.state_dict()
    assert repr(there_and_back(state)) == repr(state)


@pytest.mark.parametrize("value", [Fraction(1, 3), lambda: 1, torch.zeros(2).to_sparse(), numpy.array(["x"])])
def test_what_cannot_be_kept_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(UserError, match=r"^it\.a\.0 is a \S+, which cannot be saved or sent to a joiner; use numbers"):
        encode({"a": [value]}, {}, "it")


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "tensor", "of": "nowhere"},
        {"$": "class", "of": "os.system"},
        {"$": "tuple"},
        {"$": "dict", "of": [1]},
        {"$": "set", "of": [[]]},
        {"$": "float", "of": "x"},
        {"$": "bytes", "of": "?"},
        {"$": ["tuple"], "of": []},
    ],
    ids=json.dumps,
)
def test_a_tree_that_nobody_wrote_is_damage_and_not_an_exception_of_pythons(tree: Any) -> None:
    with pytest.raises(CheckpointDamaged, match=r"^a state cannot be read: "):
        decode({"a": tree}, {})
