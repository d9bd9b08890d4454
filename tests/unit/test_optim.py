"""Optimizers and schedules: which are allowed, what a configuration's names mean, what the vote hashes.

`deepspeed_schedules.json` holds the rates (and first betas, where they move) that DeepSpeed 0.19.8 itself gave over 40
steps of a two-group AdamW with rates 0.01 and 0.02: each list is what a step reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal.config import Optimizer, Scheduler
from shoal.optim.config_sections import TORCH_SCHEDULES, build_optimizer, build_scheduler
from shoal.optim.elementwise import ELEMENTWISE, check_optimizer
from shoal.optim.hyper import are_untouched, digest, first_difference, hyper_parameters, load_into
from shoal_protos.errors import UserError
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

DEEPSPEED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "deepspeed_schedules.json").read_text())


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 3))]


def two_groups() -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": one(), "lr": 0.01}, {"params": one(), "lr": 0.02}])


# ---- which optimizers


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_an_elementwise_optimizer_is_allowed(kind: type[torch.optim.Optimizer]) -> None:
    assert check_optimizer(kind(one()), elementwise=False) == "tensors"


class MyMuon(torch.optim.Muon):
    """A subclass of what is refused."""


class MyLBFGS(torch.optim.LBFGS):
    """A subclass of what cannot be tried."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, MyMuon, MyLBFGS])
@pytest.mark.parametrize("elementwise", [False, True])
def test_an_optimizer_that_is_not_elementwise_is_refused_by_name(kind: Any, elementwise: bool) -> None:
    with pytest.raises(UserError, match=rf"^optimizer {kind.__name__} .*; Shoal runs optimizers on blocks .*AdamW"):
        check_optimizer(kind(one()), elementwise)


class Named(torch.optim.SGD):
    """Has the name of what is refused, and computes element by element."""


Named.__name__ = "Lamb"


def test_what_an_optimizer_does_counts_and_not_what_it_is_called() -> None:
    assert check_optimizer(Named(one(), lr=0.1), elementwise=False) == "tensors"


@pytest.mark.parametrize("method", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("elementwise", [False, True])
def test_a_step_hook_of_the_scripts_optimizer_is_refused_by_name(method: str, elementwise: bool) -> None:
    def decay(*_: Any) -> None:
        """What a script does with each step."""

    optimizer = torch.optim.SGD(one(), lr=0.1)
    handle = getattr(optimizer, method)(decay)
    with pytest.raises(UserError, match=rf"^optimizer SGD has a step hook \({method}: .*decay\); .*engine\.step\(\)"):
        check_optimizer(optimizer, elementwise)
    handle.remove()
    assert check_optimizer(optimizer, elementwise) == "tensors"


def test_what_torch_itself_puts_around_a_step_is_no_hook_of_the_script() -> None:
    everybodys = register_optimizer_step_post_hook(lambda *_: None)  # as torch's profiler has one
    optimizer = two_groups()
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    try:
        assert check_optimizer(optimizer, elementwise=False) == "tensors"
    finally:
        everybodys.remove()


# ---- what a configuration's names mean


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_every_allowed_optimizer_can_be_named_in_any_case(kind: type[torch.optim.Optimizer]) -> None:
    built = build_optimizer(Optimizer(type=kind.__name__.upper(), params={"lr": 0.5}), nn.Linear(2, 2))
    expected = torch.optim.AdamW if kind is torch.optim.Adam else kind
    assert type(built) is expected
    assert built.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "params", "kind", "weight_decay", "fused"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0, True),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0, True),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0, True),
        ("AdamW", {"weight_decay": 0.3, "foreach": True}, torch.optim.AdamW, 0.3, None),
        ("AdamW", {"torch_adam": True, "weight_decay": "auto"}, torch.optim.AdamW, 0.01, None),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0, None),
    ],
)
def test_adam_means_what_deepspeed_means(
    name: str, params: dict[str, Any], kind: type, weight_decay: float, fused: bool | None
) -> None:
    section = Optimizer(type=name, params=dict(params))
    built = build_optimizer(section, nn.Linear(2, 2))
    group = built.param_groups[0]
    assert (type(built), group["weight_decay"], group["fused"]) == (kind, weight_decay, fused)
    assert section.params == params, "the section is left as it was"


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad = False
    assert build_optimizer(Optimizer(type="SGD"), model).param_groups[0]["params"] == [model.weight]
    model.weight.requires_grad = False
    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        build_optimizer(Optimizer(type="SGD"), model)


@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda case: f"{case['type']} {case['params']}")
def test_deepspeeds_schedules_give_deepspeeds_bits(case: dict[str, Any]) -> None:
    optimizer = two_groups()
    scheduler = build_scheduler(Scheduler(type=case["type"], params=case["params"]), optimizer, last_step=99)
    for step, rates in enumerate(case["lr"]):
        assert [group["lr"] for group in optimizer.param_groups] == rates, f"step {step}"
        betas = [group["betas"][0] for group in optimizer.param_groups]
        assert betas == (case["beta"][step] if "beta" in case else [0.9, 0.9]), f"step {step}"
        optimizer.step()
        scheduler.step()


def test_a_schedule_goes_on_from_its_state() -> None:
    section = Scheduler(type="WarmupCosineLR", params={"warmup_num_steps": 4, "total_num_steps": 20})
    optimizer, fresh = two_groups(), two_groups()
    scheduler, joiner = (build_scheduler(section, one, last_step=20) for one in (optimizer, fresh))
    optimizer.step()
    fresh.step()
    for _ in range(7):
        scheduler.step()
    joiner.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    load_into(fresh, json.loads(json.dumps(hyper_parameters(optimizer))))
    for _ in range(5):
        assert digest(hyper_parameters(fresh)) == digest(hyper_parameters(optimizer))
        scheduler.step()
        joiner.step()


def test_auto_lengths_are_the_jobs_last_step() -> None:
    for name, params, length in (
        ("WarmupDecayLR", {"warmup_num_steps": 2, "warmup_max_lr": "auto"}, "total_num_steps"),
        ("CosineAnnealingLR", {}, "T_max"),
        ("LinearLR", {"start_factor": 0.5}, "total_iters"),
        ("OneCycleLR", {"max_lr": 0.1}, "total_steps"),
    ):
        automatic, written = two_groups(), two_groups()
        build_scheduler(Scheduler(type=name, params={**params, length: "auto"}), automatic, last_step=30)
        if "warmup_max_lr" in params:
            params["warmup_max_lr"] = [0.01, 0.02]
        build_scheduler(Scheduler(type=name, params={**params, length: 30}), written, last_step=99)
        assert hyper_parameters(automatic) == hyper_parameters(written)


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torchs_schedules_can_be_named(name: str) -> None:
    needed = {
        "CosineAnnealingLR": {"T_max": 9},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
        "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
        "ExponentialLR": {"gamma": 0.9},
        "MultiStepLR": {"milestones": [3, 6]},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
        "StepLR": {"step_size": 3},
    }
    optimizer = two_groups()
    scheduler = build_scheduler(Scheduler(type=name.lower(), params=needed.get(name, {})), optimizer, last_step=9)
    assert type(scheduler).__name__ == name


# ---- hyper-parameters


def test_hyper_parameters_are_plain_values_of_every_group() -> None:
    optimizer = torch.optim.Adam(
        [{"params": one(), "lr": torch.tensor(0.5)}, {"params": one(), "name": "head"}], capturable=True
    )
    first, second = hyper_parameters(optimizer)
    assert first["lr"] == 0.5 and isinstance(first["lr"], float)
    assert second["betas"] == (0.9, 0.999) and second["name"] == "head"
    assert "params" not in first and list(first) == sorted(first)
    assert json.loads(json.dumps([first, second])) != [], "they travel as JSON"


def test_the_digest_tells_every_bit_and_survives_json() -> None:
    hyper = hyper_parameters(two_groups())
    travelled = json.loads(json.dumps(hyper))
    assert digest(hyper) == digest(travelled) and len(digest(hyper)) == 16
    for key, value in (("lr", 0.01 + 2**-58), ("lr", -0.0), ("amsgrad", True), ("betas", [0.9, 0.9990000000000001])):
        other = [{**hyper[0], key: value}, hyper[1]]
        assert digest(other) != digest(hyper)
        assert first_difference(hyper, other).startswith(f"{key} of optimizer group 0 is ")
    assert digest([hyper[1], hyper[0]]) != digest(hyper)


def test_values_are_untouched_only_where_they_are_the_same_objects_under_the_same_names() -> None:
    rate, before = 0.1, [{"lr": 0.0, "eps": 1e-8, "fused": True}]
    assert are_untouched([{**before[0]}], before)
    for value in (-0.0, False, 0):
        assert not are_untouched([{**before[0], "lr": value}], before)
    assert not are_untouched([{"lr": rate, "eps": rate}], [{"eps": rate, "lr": rate, "fused": True}])
    assert not are_untouched([{"lr": rate, "eps": rate}], [{"lr": rate, "beta": rate}])
    assert not are_untouched(before, []) and not are_untouched([], before)


def test_the_first_difference_names_group_and_key() -> None:
    hyper = hyper_parameters(two_groups())
    assert first_difference(hyper, json.loads(json.dumps(hyper))) == ""
    other = [hyper[0], {**hyper[1], "lr": 0.5}]
    assert first_difference(hyper, other) == "lr of optimizer group 1 is 0.02 here and 0.5 there"
    missing = [{key: value for key, value in hyper[0].items() if key != "eps"}, hyper[1]]
    assert first_difference(hyper, missing) == "eps of optimizer group 0 is 1e-08 here and not set there"
    assert first_difference(hyper, hyper[:1]) == "the optimizer has 2 groups here and 1 there"


def test_loading_sets_every_value_and_keeps_tensors() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([{"params": one(), "lr": rate}], capturable=True)
    wanted = [{**hyper_parameters(optimizer)[0], "lr": 0.25, "betas": [0.8, 0.9], "initial_lr": 1.0}]
    load_into(optimizer, wanted)
    group = optimizer.param_groups[0]
    assert group["lr"] is rate and rate.item() == 0.25
    assert group["betas"] == (0.8, 0.9) and group["initial_lr"] == 1.0
    assert digest(hyper_parameters(optimizer)) == digest(wanted)
    with pytest.raises(UserError, match=r"the optimizer has 1 parameter groups, the job's has 2\."):
        load_into(optimizer, wanted * 2)


def test_a_value_that_cannot_travel_is_refused_by_name() -> None:
    optimizer = torch.optim.SGD([{"params": one(), "rule": object()}], lr=0.1)
    with pytest.raises(UserError, match="rule of optimizer group 0 is object; hyper-parameters must be numbers"):
        hyper_parameters(optimizer)
