"""Real packages of 8-bit optimizers, which `make eight-bit` puts into a folder of their own: equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from shoal.optim.elementwise import check_optimizer
from shoal_protos.errors import UserError
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # those of their imports

CLASSES = (
    "bitsandbytes.optim.Adam8bit", "bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.Lion8bit",
    "torchao.optim.Adam8bit", "torchao.optim.AdamW8bit",
)  # fmt: skip


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchao compiles its step for each size, a minute each on a CPU; here it is the same Python."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    yield


def class_of(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(import_module(module), kind)


def task(name: str, stage: int, **more: Any) -> Task:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = class_of(name)([one for one in model.parameters() if one.requires_grad], lr=0.01)
        return found

    def constant(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    return Task({"max_steps": 7, "stage": stage, **more}, optimizer=optimizer, scheduler=constant)


@pytest.mark.parametrize(("name", "stage"), [*product(CLASSES, (0, 1, 2, 3))])
def test_it_has_the_same_bits_through_a_loss_and_a_join(name: str, stage: int) -> None:
    with Crew("abc", task(name, stage)) as crew:
        crew.plant("b", 2, "exchange")
        crew.train_to(3)
        crew.add("x")
        crew.train_until("fills", lambda: crew.at_rest() and bool(crew.workers["x"].engine.context.state.held.runs))
        crew.kill("a")
        assert crew.finish() == undisturbed(task(name, 0))


@pytest.mark.parametrize("name", ["bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit"])
def test_another_world_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}}
    with Crew("ab", task(name, 1, **{**saving, "max_steps": 3})) as crew:
        crew.finish()
    with Crew("abc", task(name, 3, **saving)) as crew:
        assert crew.finish() == undisturbed(task(name, 0))


def test_one_whose_state_has_another_form_is_refused() -> None:
    with pytest.raises(UserError, match="optimizer AdEMAMix8bit keeps 2 × 80 numbers as 'absmax1' of 20480 parameters"):
        check_optimizer(class_of("bitsandbytes.optim.AdEMAMix8bit")([nn.Parameter(torch.ones(64, 64))]), False)
