"""Optimizers of the library that need whole tensors: by the Trainer's `optim`, and as an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from models.trainer_scripts import SAMPLES, Script, column, gpt2, transformers
from shoal.optim.elementwise import check_optimizer
from shoal.training.engine import Engine
from torch import nn
from whole_models import Mixed, trained_here

pytestmark = pytest.mark.filterwarnings("ignore")

FORMS: dict[str, dict[str, Any]] = {
    "with its own rates": {},
    "with a given rate": {"lr": 1e-3, "scale_parameter": False, "relative_step": False},
    "with momentum": {"lr": 1e-3, "scale_parameter": True, "relative_step": False, "beta1": 0.9},
}


def task(form: str, **options: Any) -> Task:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = transformers.Adafactor(model.parameters(), **FORMS[form])
        assert check_optimizer(found, False) == "state of whole tensors of Adafactor"
        return found

    return Task({"max_steps": 6, "gradient_clipping": 0.05, **options}, Mixed, optimizer, lambda _: None)


@pytest.mark.parametrize("form", FORMS)
def test_at_one_lane_adafactors_weights_are_those_of_the_class_itself(form: str) -> None:
    given = task(form)
    for mine, theirs in zip(*trained_here(given, given.optimizer), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adafactor_has_the_same_bits_through_a_loss_and_a_join(form: str, stage: int) -> None:
    with Crew("abc", task(form, stage=stage)) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "shape" if stage % 2 else "vote")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == undisturbed(task(form))


def test_the_trainers_adafactor_has_the_originals_losses_and_the_same_bits_through_a_loss(tmp_path: Path) -> None:
    script = Script(tmp_path, {"optim": "adafactor"})
    right = script.alone()
    assert column(right, "loss") == pytest.approx(column(script.original(), "loss"), rel=2e-4)
    for names in ("ab", "abc"):
        with Crew(names, script.task()) as crew:
            crew.train_to(3)
            crew.kill("b")
            assert crew.finish() == right.fingerprint


def of_two(model: Any) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for all else."""
    inner = [one for name, one in model.named_parameters() if one.ndim == 2 and ".h." in name]
    others = [one for one in model.parameters() if all(one is not matrix for matrix in inner)]
    return {"matrices": torch.optim.Muon(inner, lr=1e-2), "others": torch.optim.AdamW(others, lr=1e-3)}


def line(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)


def gives(are_named: bool, are_scheduled: bool) -> type:
    class Gives:
        def __init__(self, model: Any, args: Any, **named: Any) -> None:
            optimizers = of_two(model)
            schedulers = {name: line(one) for name, one in optimizers.items()} if are_scheduled else None
            if not are_named:
                given: Any = ([*optimizers.values()], [*schedulers.values()] if schedulers is not None else None)
            super().__init__(model, args, optimizers=(optimizers, schedulers) if are_named else given, **named)

    return Gives


@pytest.mark.parametrize("are_scheduled", [False, True])
@pytest.mark.parametrize("are_named", [False, True])
def test_a_trainer_may_be_given_several_optimizers(are_named: bool, are_scheduled: bool, tmp_path: Path) -> None:
    script = Script(tmp_path, {"num_train_epochs": 1, "save_strategy": "epoch"}, mixin=gives(are_named, are_scheduled))
    right = script.alone()
    first = column(right, "learning_rate")[0]
    assert first == pytest.approx(1e-3 if are_scheduled else 0.0)  # a tenth of Muon's; by the arguments' warm-up
    with Crew("ab", script.task()) as crew:
        crew.train_to(2)
        crew.kill("a")
        assert crew.finish() == right.fingerprint


def test_a_trainer_may_declare_buffers_once_there_is_an_engine(tmp_path: Path) -> None:
    class Counting(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **named: Any) -> Any:
            if self.training:
                self.seen += len(input_ids)
            return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **named)

    def model() -> Any:
        found = gpt2()
        found.__class__ = Counting
        found.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        return found

    class Declares:
        def on_engine(self, engine: Engine) -> None:
            engine.buffer("seen", join="sum")

    script, kept = Script(tmp_path, {"num_train_epochs": 1}, model=model, mixin=Declares), list[Any]()
    right = script.alone()
    assert right.model.seen == SAMPLES
    with Crew("ab", script.task(kept)) as crew:
        assert crew.finish() == right.fingerprint
    assert [trainer.model.seen for trainer in kept] == [SAMPLES] * 2
