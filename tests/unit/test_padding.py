"""What stands where no parameter lies: +0 in every digest and every file, whatever an optimizer has come to there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from crew_saves import saved
from integration.scripts import Model, optimizer_of
from matrices import shortened
from rule import Edit, rule
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.storage import LocalStorage
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
BF16 = {"precision": {"bf16": {"enabled": True}}}


def made(name: str, **arguments: Any) -> Make:
    return lambda model: optimizer_of(model, name, **arguments)


FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3, bf16": {"stage": 3, **BF16},
    "1, bf16, on the host": {"stage": 1, "offload": "cpu", **BF16},
}


class Turning(torch.optim.Optimizer):
    """Turns the sign of weights and of what it keeps: -0 in all padding, after every other step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                kept.sub_(parameter.grad).neg_()
                parameter.add_(kept, alpha=-group["lr"]).neg_()


def used() -> Model:
    """A model of which each lane uses all: beside an unused parameter none of the padding is updated."""
    model = Model(0.1, True)
    del model.unused
    return model


PADDED: dict[str, Make] = {
    "maximize": made("SGD", momentum=0.9, maximize=True),
    "turning": lambda model: Turning([p for p in model.parameters() if p.requires_grad]),
}


@rule(
    "Where no parameter lies digests and checkpoints have +0, whatever an optimizer has come to there",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.blocks.values", "value[a:b].view(torch.uint8).count_nonzero()", "value[a:b].count_nonzero()"),
        Edit(
            "shoal.checkpoint.fingerprint",
            "without_gaps(tensors[key], first, of_state[key])",
            "tensors[key]",
        ),
    ],
)
@pytest.mark.parametrize(("kind", "form"), shortened(product(PADDED, FORMS), ("maximize", "1"), ("turning", "3, bf16")))
def test_a_state_of_minus_zeros_has_one_fingerprint_at_once_after_a_resume_and_in_its_checkpoint(
    kind: str, form: str, tmp_path: Path
) -> None:
    checkpoint = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}, "elementwise": True}
    task = Task({"max_steps": 6, **FORMS[form], "shoal": checkpoint}, optimizer=PADDED[kind], model=used)
    at_once = undisturbed(replace(task, options={**task.options, "shoal": {"elementwise": True}}))
    with Crew("ab", task) as crew:
        crew.train_to(3)
        saved(crew, 3)
    with Crew("abc", task) as crew:
        assert crew.finish() == at_once
    found = next(one for one in checkpoints(LocalStorage(tmp_path), lambda _: None) if one.name.step == 6)
    assert verify(found.reader()).fingerprint == at_once
