"""Optimizers and schedulers of a Trainer: sections of its DeepSpeed configuration, objects beside them, arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from models.trainer_scripts import STEPS, Script, column
from shoal_protos.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

LINE: dict[str, Any] = {"num_train_epochs": 1.5, "weight_decay": 0.0}
RATE, OWN_RATE = 3e-3, 1e-2
"""Of the arguments, and of an optimizer that the script gives."""
SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}  # fmt: skip


def giving(*objects: str) -> type:
    """A Trainer that is given an optimizer, and a scheduler, by its script."""

    class Gives:
        def __init__(self, model: Any, args: Any, **named: Any) -> None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=OWN_RATE, weight_decay=0.0)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5) if "scheduler" in objects else None
            super().__init__(model, args, optimizers=(optimizer, schedule), **named)

    return Gives if objects else object


def configured(*sections: str, **more: Any) -> dict[str, Any]:
    named = {name: SECTIONS[name] for name in sections}
    return {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", **named, **more}


@pytest.mark.parametrize("objects", [(), ("optimizer",), ("optimizer", "scheduler")], ids=lambda names: "+".join(names))
@pytest.mark.parametrize("sections", [(), ("optimizer",), ("scheduler",), ("optimizer", "scheduler")], ids="+".join)
def test_rates_are_those_of_the_object_else_of_the_section_else_of_the_arguments(
    sections: tuple[str, ...], objects: tuple[str, ...], tmp_path: Path
) -> None:
    mixin = giving(*objects)
    elastic = Script(tmp_path, {**LINE, "deepspeed": configured(*sections)}, mixin=mixin).alone()
    rates = column(elastic, "learning_rate")
    if "scheduler" in sections and "scheduler" not in objects:
        assert rates[0] < RATE and set(rates[2:]) == {RATE}
        return
    original = Script(tmp_path, LINE, mixin=mixin).original()
    assert rates == pytest.approx(column(original, "learning_rate"))
    assert column(elastic, "loss") == pytest.approx(column(original, "loss"), rel=2e-4)


def test_a_schedule_over_the_sections_optimizer_has_the_same_bits_through_a_loss_and_a_join(tmp_path: Path) -> None:
    script, kept = Script(tmp_path, {"deepspeed": configured("optimizer")}), list[Any]()
    right = script.alone()
    with Crew("ab", script.task(kept)) as crew:
        crew.train_to(3)
        crew.kill("b")
        crew.train_to(5)
        crew.add("c")
        assert crew.finish() == right.fingerprint
    assert [column(trainer, "learning_rate") for trainer in kept] == [column(right, "learning_rate")] * 2


@pytest.mark.parametrize(
    ("section", "value", "sentence"),
    [
        ("optimizer", {"type": "AdamW", "params": {"lr": 0.5}}, r"`optimizer.params.lr` is 0.5, and the optimizer"),
        ("optimizer", {"type": "SGD", "params": {"lr": "auto"}}, r'`optimizer.type` is "SGD".*AdamW'),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}, r'scheduler.type` is "WarmupLR".*Linear'),
    ],
)  # fmt: skip
def test_a_section_that_says_other_than_the_object_beside_it_is_refused(
    section: str, value: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    script = Script(tmp_path, {"deepspeed": configured(**{section: value})}, mixin=giving("optimizer", "scheduler"))
    with pytest.raises(UserError, match=sentence):
        script.alone()


def test_a_class_of_optimizer_that_the_script_names_is_not_dropped_beside_a_section(tmp_path: Path) -> None:
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": OWN_RATE})}
    with pytest.raises(UserError, match=r'`optimizer.type` is "AdamW".*SGD'):
        Script(tmp_path, {"deepspeed": configured("optimizer")}, given).alone()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_auto_is_filled_in_for_arguments_without_a_warm_up(kind: str, stage: int, tmp_path: Path) -> None:
    params = {**SECTIONS["scheduler"]["params"], **({"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {})}
    deepspeed = configured("optimizer", scheduler={"type": kind, "params": params}, zero_optimization={"stage": stage})
    elastic = Script(tmp_path, {"deepspeed": deepspeed, "warmup_steps": 0}).alone()
    rates = column(elastic, "learning_rate")
    assert len(rates) == STEPS and rates[2] == pytest.approx(RATE)
    assert rates[-1] == pytest.approx(RATE) if kind == "WarmupLR" else rates[-1] < RATE / 4


def test_a_warm_up_of_no_steps_that_the_file_asks_for_is_refused_by_its_own_name(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}
    with pytest.raises(
        UserError, match=r"`scheduler.params.warmup_num_steps` is 0; expected a whole number of at least"
    ):
        Script(tmp_path, {"deepspeed": configured(scheduler=scheduler), "warmup_steps": 0}).alone()


def test_cells_of_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the Trainer does not support cells of several processes \(tensor 2\) yet"):
        Script(tmp_path, given={"shoal": {"cell": {"tensor": 2}}}).alone()
