"""A checkpoint whose optimizer has this job's class by its name, and keeps its state in another form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fresh, save, trained
from crew import ONE_AT_A_TIME, Task, engine_of, train
from shoal.checkpoint.catalogue import look_into
from shoal.checkpoint.restore import load_small_state
from shoal.checkpoint.storage import LocalStorage
from shoal.optim.elementwise import check_optimizer
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal_protos.errors import UserError
from torch import Tensor, nn
from whole_models import Mixed


class Moments(torch.optim.Optimizer):
    """Scales by means of a tensor's rows and columns; `names`: of these, as one version of a package has them."""

    names = "a", "b"

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                square, state = p.grad.square(), self.state[p]
                of_rows, of_columns = square.view(len(p), -1).mean(1), square.view(len(p), -1).mean(0)
                for name, new in zip(self.names, (of_rows, of_columns), strict=True):
                    state.setdefault(name, torch.zeros_like(new)).lerp_(new, 0.1)
                scale = (state[self.names[0]][:, None] * state[self.names[1]]).view_as(p)
                p.sub_(group["lr"] * p.grad / (scale.sqrt().sqrt() + 1e-6))


class Renamed(Moments):
    """The next version, which keeps the same in another order of names."""

    names = "d", "c"


Renamed.__name__ = "Moments"


def of(kind: type[torch.optim.Optimizer], whole: tuple[str, ...]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind([one for one in model.parameters() if one.requires_grad])
        check_optimizer(optimizer, elementwise=False, whole=whole)
        return optimizer

    return make


AS_A_WHOLE, ON_BLOCKS = of(torch.optim.AdamW, ("AdamW",)), of(torch.optim.AdamW, ())
FORMS = {
    "a class whose odd state has other names": (of(Moments, ("Moments",)), of(Renamed, ("Moments",)), "keeps a, b of"),
    "blocks after whole tensors": (AS_A_WHOLE, ON_BLOCKS, "group 0, this job's a value for each element"),
    "whole tensors after blocks": (ON_BLOCKS, AS_A_WHOLE, "a value for each element as state of group 0, this job's e"),
}


@pytest.mark.parametrize("form", FORMS)
def test_state_of_another_form_is_refused_before_it_is_read_and_its_weights_can_be_taken(
    form: str, tmp_path: Path
) -> None:
    before, after, sentence = FORMS[form]

    def run(make: Callable[[nn.Module], torch.optim.Optimizer], **checkpoint: Any) -> dict[str, Tensor]:
        checkpoint = {"path": str(tmp_path / "own"), "every_steps": 2, **checkpoint}
        task = Task({"max_steps": 2, "lanes": 1, "shoal": {"checkpoint": checkpoint}}, Mixed, make, lambda _: None)
        first: list[dict[str, Tensor]] = []

        def keep(engine: Any) -> None:
            if not first:
                first.append({name: one.detach().clone() for name, one in engine.module.named_parameters()})

        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, replace(task, in_loop=keep), lambda: None)
        engine.script_end.reach()
        return {**first[0], "last": engine.module.a.weight.detach().clone()}

    with ONE_AT_A_TIME:
        made = run(before)
        saved = str(next((tmp_path / "own").glob("step-000000000002-*")))
        with pytest.raises(
            UserError, match=r"is not of this job's model: its optimizer keeps .* set `shoal"
        ) as refused:
            run(after, resume=saved)
        taken = run(after, resume=saved, allow=["new", "missing"], path=str(tmp_path / "other"))
    assert sentence in str(refused.value)
    assert taken["a.weight"].equal(made["last"])


class Fused(torch.optim.AdamW):
    """As that of another package: the same name, other keys."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                state = self.state[p]
                if not state:
                    state["state1"] = torch.zeros_like(p)
                p.sub_(state["state1"].lerp_(p.grad, 0.1), alpha=group["lr"])


Fused.__name__ = "AdamW"


def test_state_that_another_class_of_the_same_name_has_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    reader = look_into(storage, save(trained(2), storage)[0]).reader()
    with pytest.raises(UserError, match=r"on what was kept, exp_avg, exp_avg_sq, step \(KeyError: 'state1'\)\. .*name"):
        load_small_state(reader, fresh(kind=partial(Fused)), {})  # type: ignore[arg-type]
