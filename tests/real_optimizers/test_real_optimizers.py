"""Real packages of optimizers that need whole tensors, which `make optimizers` puts into a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from shoal.optim.elementwise import check_optimizer
from shoal_protos.errors import UserError
from torch import nn
from whole_models import Mixed, trained_here

pytestmark = pytest.mark.filterwarnings("ignore")  # those of their imports

CLASSES: dict[str, dict[str, Any]] = {
    "came_pytorch.CAME": {},
    "pytorch_optimizer.CAME": {},
    "pytorch_optimizer.LARS": {},
    "pytorch_optimizer.Lamb": {},
    "pytorch_optimizer.StableAdamW": {},
    "timm.optim.Adafactor": {},
    "timm.optim.Lamb": {"max_grad_norm": None},
    "timm.optim.Lars": {"weight_decay": 0.01},
    "torch_optimizer.Lamb": {},
    "torch_optimizer.NovoGrad": {},
}


def class_of(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(import_module(module), kind)


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    over = [one for one in model.parameters() if one.requires_grad]
    found: torch.optim.Optimizer = class_of(name)(over, lr=1e-3, **CLASSES[name])
    kind = type(found).__name__
    assert check_optimizer(found, False, [kind]) == f"state of whole tensors of {kind}"
    return found


def task(name: str, **more: Any) -> Task:
    made: Callable[[nn.Module], torch.optim.Optimizer] = partial(optimizer, name)
    return Task({"max_steps": 6, "gradient_clipping": 0.05, **more}, Mixed, made)


@pytest.mark.parametrize("name", CLASSES)
def test_at_one_lane_weights_are_those_of_the_class_itself(name: str) -> None:
    for mine, theirs in zip(*trained_here(task(name), partial(optimizer, name)), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_it_has_the_same_bits_through_a_loss_and_a_join(name: str, stage: int) -> None:
    with Crew("abc", task(name, stage=stage)) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "shape" if stage % 2 else "vote")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == undisturbed(task(name))


@pytest.mark.parametrize("name", CLASSES)
def test_another_world_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("ab", task(name, stage=1, shoal=saving, max_steps=3)) as crew:
        crew.finish()
    with Crew("abc", task(name, stage=3, shoal=saving)) as crew:
        assert crew.finish() == undisturbed(task(name))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pytorch_optimizer.AdaHessian", "optimizer AdaHessian differentiates gradients, which have no graph in"),
        ("pytorch_optimizer.Prodigy", "optimizer Prodigy keeps d_numerator, d_de_nom, d_hat in its group"),
        ("pytorch_optimizer.SOAP", "whole tensors would not do either: it keeps 'GG' as a list"),
        ("pytorch_optimizer.Shampoo", "optimizer Shampoo keeps a matrix for a row of numbers"),
        ("timm.optim.Lamb", "reads several tensors together, as a norm over all gradients does"),
        ("torch_optimizer.Adahessian", "optimizer Adahessian differentiates gradients, which have no graph in"),
        ("torch_optimizer.Shampoo", "optimizer Shampoo keeps a matrix for a row of numbers"),
    ],
)
def test_one_that_may_not_is_refused_with_its_reason(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_optimizer(class_of(name)([nn.Parameter(torch.ones(96, 128)), nn.Parameter(torch.ones(8))]), False)
