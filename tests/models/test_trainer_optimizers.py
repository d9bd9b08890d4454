"""Optimizers of the library that need whole tensors: by the Trainer's `optim`, and as an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from models.trainer_scripts import Script, column, transformers
from shoal.optim.elementwise import check_optimizer
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
