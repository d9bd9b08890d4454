"""Optimizers that keep a value for some elements together: the scales of 8-bit state."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save, trained
from crew import Crew, Task, engine_of, undisturbed
from kept_values import EightBit, EightBitWrapped
from matrices import shortened
from rule import Edit, holds, rule
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.storage import LocalStorage
from shoal.optim.elementwise import check_optimizer
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal_protos.errors import UserError
from torch import nn

KINDS: tuple[type[EightBit], ...] = (EightBit, EightBitWrapped)
BF16 = {"precision": {"bf16": {"enabled": True}}}
FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3, bf16": {"stage": 3, **BF16},
    "1, on the host": {"stage": 1, "offload": "cpu"},
}


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def task(kind: type[EightBit], form: str, **more: Any) -> Task:
    def optimizer(model: nn.Module) -> EightBit:
        return kind([one for one in model.parameters() if one.requires_grad])

    return Task({"max_steps": 9, **FORMS[form], **more}, optimizer=optimizer, scheduler=constant)


CASES = product(KINDS, FORMS, ("ab", "abcd"))
KEPT = [(EightBit, "0", "ab"), (EightBit, "1", "abcd"), (EightBitWrapped, "2", "abcd"), (EightBit, "3", "abcd"),
        (EightBitWrapped, "3, bf16", "ab"), (EightBit, "1, on the host", "ab")]  # fmt: skip


@rule(
    "A value of the state that some elements share goes where these go, in any world, and a place between parameters "
    "keeps its part of it",
    "A step",
    broken_by=[
        Edit("shoal.optim.state_form", "found |= {key: table.to(device)", "found |= {key: 2 * table.to(device)"),
        Edit("shoal.optim.state_form", "spread[:, : value.element_size()] =", "spread[:, : 0] ="),
        Edit("shoal.optim.twin", "    counts &= not any(form.is_packed for form in forms.values())\n", ""),
        Edit(
            "shoal.checkpoint.snapshot",
            " and not (key and counts_in_gaps(key, piece.regions))",
            "",
            by="test_another_world_goes_on_from_a_checkpoint",
        ),
    ],
)
@pytest.mark.parametrize(("kind", "form", "workers"), shortened(CASES, *KEPT))
def test_8_bit_state_is_the_same_through_a_loss_in_a_step_and_a_join(
    kind: type[EightBit], form: str, workers: str
) -> None:
    """Of a model with a parameter that no lane uses, whose neighbours share scales with it."""
    with Crew(workers, task(kind, form)) as crew:
        crew.plant(workers[1], 2, "exchange")
        crew.train_to(3)
        crew.add("x")
        crew.train_until("fills", lambda: crew.at_rest() and bool(crew.workers["x"].engine.context.state.held.runs))
        crew.kill(workers[0])
        assert crew.finish() == undisturbed(task(kind, form))


@holds("A value of the state that some elements")
@pytest.mark.parametrize("kind", KINDS)
def test_another_world_goes_on_from_a_checkpoint(kind: type[EightBit], tmp_path: Path) -> None:
    go_on_from_a_checkpoint(kind, {}, tmp_path)


@rule(
    "An average has nothing where no parameter lies, also beside state that some elements share",
    "A step",
    broken_by=Edit("shoal.blocks.loaded_state", "return key != AVERAGE and is_packed(keys)", "return is_packed(keys)"),
)
def test_another_world_goes_on_with_averages_beside_8_bit_state(tmp_path: Path) -> None:
    go_on_from_a_checkpoint(EightBit, {"average": {"decay": 0.9}}, tmp_path)


def go_on_from_a_checkpoint(kind: type[EightBit], more: dict[str, Any], place: Path) -> None:
    saving: dict[str, Any] = {"shoal": {**more, "checkpoint": {"path": str(place / "c"), "every_steps": 4}}}
    with Crew("ab", task(kind, "1", **{**saving, "max_steps": 4})) as crew:
        crew.finish()
    assert main(["verify", str(place / "c")]) == 0
    assert '"strides":[' in next((place / "c").glob("*/manifest.json")).read_text()
    with Crew("abc", task(kind, "3", **saving)) as crew:
        assert crew.finish() == undisturbed(task(kind, "0", shoal=more))


def test_what_keeps_it_is_told_by_the_probe() -> None:
    kept = check_optimizer(EightBit([nn.Parameter(torch.ones(3, 3))]), elementwise=False)
    assert kept.startswith("tensors, step (int) of the state, scale per 256 elements, table, a table (")
    kept = check_optimizer(EightBitWrapped([nn.Parameter(torch.ones(3, 3))]), elementwise=False)
    assert "coded.scale per 256 elements, coded.table, a table (" in kept


def test_an_export_has_the_model_and_leaves_its_state_out(tmp_path: Path) -> None:
    save(trained(2, kind=EightBit), LocalStorage(tmp_path / "c"))
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "i"), "--model-only"]) == 0


def test_state_of_parameters_is_not_taken_for_that_of_blocks() -> None:
    def loaded(model: nn.Module) -> EightBit:
        optimizer = EightBit([one for one in model.parameters() if one.requires_grad])
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter].update(step=7, mean=torch.zeros_like(parameter))
        return optimizer

    one = Task(task(EightBit, "1").options, optimizer=loaded, scheduler=constant)
    with pytest.raises(UserError, match="EightBit keeps values that some elements share, and what it is given"):
        engine_of(one, AloneLink(), Faults([]))
