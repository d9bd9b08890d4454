"""`optimizer.type: "Muon"`: which parameters it trains, DeepSpeed's keys, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shoal.config.document import Optimizer
from shoal.optim.config_sections import build_optimizer, optimizer_differs
from shoal.optim.several import members_of
from shoal_protos.errors import UserError
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.conv, self.lm_head = nn.Conv2d(2, 2, 3), nn.Linear(4, 8, bias=False)
        self.marked = nn.Linear(4, 4, bias=False)
        self.marked.weight.use_muon = False


def built(model: nn.Module, **params: Any) -> list[torch.optim.Optimizer]:
    return list(members_of(build_optimizer(Optimizer(type="muon", params=params), model)))


def shapes(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for group in optimizer.param_groups for one in group["params"]]


def test_matrices_of_hidden_layers_are_for_muon_and_all_else_for_adamw() -> None:
    model = Model()
    muon, adamw = built(model)
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert [*muon.param_groups[0]["params"]] == [model.hidden.weight]
    assert len(shapes(adamw)) == 6


def test_keys_are_those_of_deepspeed() -> None:
    muon, adamw = built(Model(), lr=0.1, momentum=0.9, weight_decay=0.2, adam_lr=0.3, betas=[0.8, 0.9], eps=1e-6)
    (of_muon,), (of_adamw,) = muon.param_groups, adamw.param_groups
    assert (of_muon["lr"], of_muon["momentum"], of_muon["weight_decay"]) == (0.1, 0.9, 0.2)
    assert {key: of_adamw[key] for key in ("lr", "eps")} == {"lr": 0.3, "eps": 1e-6}
    assert ([*of_adamw["betas"]], of_adamw["weight_decay"]) == ([0.8, 0.9], 0.2)
    assert built(Model(), lr=0.1, muon_lr=0.5)[0].param_groups[0]["lr"] == 0.5
    assert [one.param_groups[0]["lr"] for one in built(Model(), lr="auto")] == [0.02, 3e-4]


def test_groups_of_the_script_are_parted() -> None:
    model = Model()
    groups = [{"params": [model.hidden.weight, model.hidden.bias], "weight_decay": 0.5}]
    found = build_optimizer(Optimizer(type="Muon"), model, groups)
    assert [shapes(one) for one in members_of(found)] == [[(4, 4)], [(4,)]]
    assert [group["weight_decay"] for group in found.param_groups] == [0.5, 0.5]


def test_groups_may_have_a_generator_or_one_parameter() -> None:
    model = Model()
    groups = [{"params": model.hidden.parameters()}, {"params": model.marked.weight}]
    found = build_optimizer(Optimizer(type="Muon"), model, groups)
    assert [shapes(one) for one in members_of(found)] == [[(4, 4)], [(4,), (4, 4)]]


def test_named_parameters_are_refused_in_a_sentence() -> None:
    model = Model()
    for kind in ("Muon", "AdamW"):
        with pytest.raises(UserError, match=r"model_parameters\[0\] is a tuple; expected parameters, as model.param"):
            build_optimizer(Optimizer(type=kind), model, model.named_parameters())


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        (
            {"ns_method": "gram"},
            '`optimizer.params.ns_method` is "gram", which is other arithmetic than torch',
        ),
        ({"nesterof": True}, "`optimizer.params.nesterof` is an unknown parameter of Muon"),
        ({"momentum": -1.0}, "`optimizer.params` do not fit Muon: momentum should be >= 0 but is: -1.0."),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        built(Model(), **params)
    assert sentence in str(refused.value)


def test_objects_beside_the_section_have_its_muon() -> None:
    model = Model()
    section = Optimizer(type="Muon", params={"momentum": 0.95, "adam_lr": 0.1})
    assert [*optimizer_differs(section, build_optimizer(section, model))] == []
    assert [*optimizer_differs(section, torch.optim.Muon([model.hidden.weight], momentum=0.5))]
    assert [*optimizer_differs(section, torch.optim.AdamW(model.parameters()))]


@pytest.mark.parametrize("kind", ["Adafactor", "lamb", "SingleDeviceMuon"])
def test_the_refusal_of_a_class_of_whole_tensors_says_that_an_object_of_it_trains(kind: str) -> None:
    sentence = rf'^`optimizer.type` is "{kind}"; .* object of the class that is passed to shoal.initialize\.$'
    with pytest.raises(UserError, match=sentence):
        build_optimizer(Optimizer(type=kind, params={"lr": 0.1}), Model())


def test_experts_in_one_parameter_are_for_adamw_and_refused_in_torchs_words_where_muon_is_asked_for() -> None:
    model = nn.Module()
    model.experts, model.router = nn.Parameter(torch.ones(3, 4, 5)), nn.Parameter(torch.ones(4, 4))
    assert [shapes(one) for one in built(model)] == [[(4, 4)], [(3, 4, 5)]]
    model.experts.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"do not fit Muon: Muon only supports 2D parameters .* size: .*\[3, 4, 5\]"):
        built(model)
