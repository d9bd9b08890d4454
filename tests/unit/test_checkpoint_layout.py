"""A checkpoint and a model that is not quite the one it was written for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Model, fresh, save, trained
from shoal.checkpoint.catalogue import Found, look_into
from shoal.checkpoint.fingerprint import block_digests
from shoal.checkpoint.restore import fits, load_model, load_small_state
from shoal.checkpoint.storage import LocalStorage
from shoal.state.training_state import Limits, TrainingState
from shoal.training.residency import residency_of
from shoal_protos.errors import UserError
from torch import nn


@pytest.fixture
def found(tmp_path: Path) -> Found:
    storage = LocalStorage(tmp_path)
    name, _ = save(trained(2), storage)
    return look_into(storage, name)


def state_of(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, groups: int = 2, swapped: bool = False
) -> TrainingState:
    """Matrices in the first group; with three groups the wide one has its own. `swapped`: in another order."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    group_of = {name: 0 if p.ndim > 1 else groups - 1 for name, p in trained}
    if groups == 3:
        group_of["wide"] = 1
    made = [{"params": [p for name, p in trained if group_of[name] == number]} for number in range(groups)]
    made = made[::-1] if swapped else made
    return TrainingState(model, kind(made, lr=0.01), None, Limits(4, 0.0, 50), residency_of(0))  # type: ignore[call-arg]


class Larger(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)


class Renamed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.wider = self.wide
        del self.wide


class Doubled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 200, dtype=torch.float64)


class Shorter(Model):
    """Without the parameter that the layout has last."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 200, bias=False)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            lambda: state_of(Larger()),
            'parameter "extra.weight" of the model is where the checkpoint has "up.weight".',
        ),
        (lambda: state_of(Renamed()), 'parameter "wider" of the model is where the checkpoint has "wide".'),
        (lambda: fresh(width=97), 'parameter "up.weight" has shape (200, 97), the checkpoint\'s (200, 96).'),
        (
            lambda: state_of(Doubled()),
            'parameter "up.weight" has dtype torch.float64, the checkpoint\'s torch.float32.',
        ),
        (lambda: state_of(Model(), groups=3), 'parameter "wide" is in optimizer group 1, the checkpoint\'s in 0.'),
        (lambda: state_of(Model(), kind=torch.optim.SGD), "its optimizer is AdamW, this job's is SGD."),
        (lambda: state_of(Model(), kind=torch.optim.SGD, groups=1), "its optimizer is AdamW, this job's is SGD."),
        (
            lambda: state_of(Model(), swapped=True),
            'parameter "norm.bias" is in optimizer group 0, the checkpoint\'s in 1.',
        ),
        (lambda: state_of(Shorter()), 'only the checkpoint has parameter "up.bias".'),
    ],
)
def test_the_first_parameter_that_differs_is_named(
    found: Found, state: Callable[[], TrainingState], sentence: str
) -> None:
    with pytest.raises(UserError) as refusal:
        fits(found.manifest, state(), (), "it")
    hint = 'To begin at step 0 with what matches by name, set `shoal.checkpoint.allow: ["new", "missing"]`.'
    assert str(refusal.value) == f"it is not of this job's model: {sentence} {hint}"


def test_the_same_model_goes_on(found: Found) -> None:
    assert fits(found.manifest, state_of(Model()), (), "it")
    assert fits(found.manifest, state_of(Model()), ("new",), "it")


def test_what_matches_by_name_is_taken_where_that_is_allowed(found: Found) -> None:
    model = Larger()
    state = state_of(model)
    before = model.extra.weight.clone()
    assert not fits(found.manifest, state, ("new",), "it")
    matched = load_model(found.reader(), state, ("new",))
    state.begin_anew(state.everything)
    theirs = trained(2).module
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model.extra.weight, before)
    assert str(matched) == (
        '10 tensors are taken by name; "extra.weight", "extra.bias" keep their initial values; '
        "training begins at step 0 with a fresh optimizer."
    )
    assert state.buffers.committed["norm.running_mean"].tolist() == theirs.get_buffer("norm.running_mean").tolist()
    assert state.parameters[0].data_ptr() == state.weights.flats[0].data_ptr()  # still views of the flats


def test_only_the_named_differences_are_allowed(found: Found) -> None:
    with pytest.raises(UserError, match=r'only the model has "extra\.weight"\. .*allow: \["new"\]'):
        load_model(found.reader(), state_of(Larger()), ("missing",))
    with pytest.raises(UserError, match=r'only the model has "wider"\. .*allow: \["new", "missing"\]'):
        load_model(found.reader(), state_of(Renamed()), ("missing",))
    with pytest.raises(UserError, match=r'only the checkpoint has "wide"\. .*allow: \["new", "missing"\]'):
        load_model(found.reader(), state_of(Renamed()), ("new",))
    assert "are left out" in str(load_model(found.reader(), state_of(Renamed()), ("new", "missing")))


def test_a_tensor_of_another_shape_is_both_new_and_missing(found: Found) -> None:
    model = Model()
    model.wide = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(UserError, match=r'"wide" has shape \(3, 3\), the checkpoint\'s \(130, 50\)\.'):
        load_model(found.reader(), state_of(model), ("new",))
    matched = load_model(found.reader(), state_of(model), ("new", "missing"))
    assert matched.new == matched.missing == ("wide",)


def test_another_dtype_is_converted(found: Found) -> None:
    model = Model()
    model.wide = nn.Parameter(torch.zeros(130, 50))
    state = state_of(model)
    load_model(found.reader(), state, ("new",))
    state.begin_anew(state.everything)
    assert torch.equal(model.wide, trained(2).module.get_parameter("wide").float())


def test_other_buffers_and_frozen_parameters_than_the_models_get_a_sentence(found: Found) -> None:
    state = state_of(Model())
    state.buffers.committed["another"] = torch.zeros(1)
    with pytest.raises(UserError, match=r'only one of checkpoint and model has the buffer "another"\.$'):
        load_small_state(found.reader(), state, {})
    model = Model()
    model.more = nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(UserError, match=r"other parameters are frozen in this job's model\.$"):
        load_small_state(found.reader(), state_of(model), {})
    model = Model()
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(UserError, match=r'frozen parameter "frozen" has shape \(2,\), the checkpoint\'s \(7, 3\)\.$'):
        load_small_state(found.reader(), state_of(model), {})


def test_taking_by_name_gives_the_parameters_bits(found: Found) -> None:
    state = fresh(seed=5)
    load_model(found.reader(), state, ("new", "missing"))
    state.begin_anew(state.everything)
    mine, theirs = (block_digests(one, one.everything) for one in (state, trained(2)))
    assert {number: digest[:32] for number, digest in mine.items()} == {n: d[:32] for n, d in theirs.items()}
