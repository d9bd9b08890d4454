"""The forms in which other programs write a model with its optimizer by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Model, check_last_update, fresh, train
from dcp_folders import FLAT, FORMS, changed, content_of, flat, found_in, plain, written
from shoal.blocks.flat import views
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.importing import import_model
from shoal.checkpoint.model_file import DcpFolder
from shoal.checkpoint.restore import load_model
from shoal.checkpoint.storage import LocalStorage
from shoal.state.training_state import Limits, TrainingState
from shoal.training.residency import residency_of
from shoal_protos.errors import UserError
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

SINGLE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plain_torch(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """The model and the optimizer of `checkpoints.fresh`, without Shoal."""
    torch.manual_seed(seed)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wide, narrow = ([p for p in trained if (p.ndim > 1) is is_wide] for is_wide in (True, False))
    return model, torch.optim.AdamW([{"params": wide}, {"params": narrow, "lr": 0.1}], lr=0.01)


@SINGLE_PROCESS
@pytest.mark.parametrize("form", FORMS)
def test_the_next_update_after_an_import_has_the_bits_of_torchs_own(form: str, tmp_path: Path) -> None:
    model, optimizer = plain_torch(seed=5)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * (step + 1) if parameter.requires_grad else None
        optimizer.step()
    written(content_of(form, model, optimizer), tmp_path / "dcp")
    made = import_model(tmp_path / "dcp", LocalStorage(tmp_path / "c"))
    assert (made.states, made.updates, made.rates) == (6, (3.0,), (0.01, 0.1))
    state = fresh(seed=1)
    load_model(found_in(tmp_path / "c").reader(), state, ())
    state.begin_anew(state.everything)
    train(state, 1)

    theirs, their_optimizer = plain_torch(seed=2)
    content = content_of(form, theirs, their_optimizer)
    load(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    parts = content["app"] if form == "recipe" else content
    set_state_dict(
        theirs,
        their_optimizer,
        model_state_dict=parts.get("model") or {name: content[name] for name in theirs.state_dict()},
        optim_state_dict=parts["optim" if form == "recipe" else "optimizer"],
        options=FLAT if form == "torchtitan" else None,
    )
    check_last_update(state, theirs, their_optimizer)


@SINGLE_PROCESS
def test_what_torchtitan_keeps_beside_the_model_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(content_of("torchtitan", *plain_torch(seed=5)), tmp_path / "dcp")
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.endswith(
        "not taken, as a job has its own config: learning rates 0.01, 0.1\n"
        "left out, neither model nor optimizer state: dataloader.dp_rank_0, lr_scheduler.last_epoch, "
        "train_state.ntokens_seen, train_state.step\n"
    )


@pytest.mark.parametrize("content", [plain(), flat()], ids=["by name", "flat"])
def test_a_state_that_is_a_plain_number_is_taken_as_torch_takes_it(content: dict[str, Any], tmp_path: Path) -> None:
    states = content["optimizer"]
    if "state" in states:
        states["state"]["w"]["step"] = 7
    else:
        states["state.w.step"] = 7
    import_model(written(content, tmp_path / "dcp"), LocalStorage(tmp_path / "c"))
    reader = found_in(tmp_path / "c").reader()
    ((_, kept),) = reader.states([reader.manifest.blocks.whole(reader.manifest.blocks.buckets[0])]).items()
    assert (kept["step"].item(), kept["step"].dtype) == (7.0, torch.float32)


@SINGLE_PROCESS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_in_half_precision_become_what_the_jobs_optimizer_keeps(dtype: torch.dtype, tmp_path: Path) -> None:
    """As where torch loads them: an update with states in half precision has other bits."""
    torch.manual_seed(3)
    theirs = nn.Linear(9, 4).to(dtype)
    optimizer = torch.optim.AdamW(theirs.parameters())
    theirs(torch.randn(2, 9, dtype=dtype)).square().sum().backward()
    optimizer.step()
    import_model(written(content_of("torchtitan", theirs, optimizer), tmp_path / "dcp"), LocalStorage(tmp_path / "c"))
    model = nn.Linear(9, 4)
    state = TrainingState(model, torch.optim.AdamW(model.parameters()), None, Limits(1, 0.0, 1), residency_of(0))
    load_model(found_in(tmp_path / "c").reader(), state, ())
    state.begin_anew(state.everything)
    ((_, kept),) = state.held.home.states(state.everything).items()
    (bucket,) = state.layout.buckets
    for slot, part in zip(bucket.slots, views(bucket, kept["exp_avg_sq"]), strict=True):
        expected = optimizer.state[theirs.get_parameter(slot.parameter.name)]["exp_avg_sq"].float()
        assert part.dtype == torch.float32 and torch.equal(part, expected)


# ---- what cannot be taken


def nested_in_flat(content: dict[str, Any]) -> None:
    content["optimizer"]["state"] = {"w": {"exp_avg_sq": torch.zeros(3, 2)}}


def twice(content: dict[str, Any]) -> None:
    content["optim"] = {"state": {"w": {"exp_avg": torch.zeros(3, 2)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            changed(lambda c: c["optimizer"].update({"state.v.w.exp_avg": torch.zeros(1)}), flat()),
            'has optimizer state "exp_avg" of "v.w", which its model does not have; import the model alone (--model',
        ),
        (
            changed(lambda c: c["optimizer"].update({"state.w.row": torch.zeros(3)}), flat()),
            'has optimizer state "row" of "w" with shape (3,); expected a state of its shape (3, 2), or one number.',
        ),
        (
            changed(lambda c: c["optimizer"].update({"state.w.factors.0": torch.zeros(3, 3)}), flat()),
            'has optimizer state "factors.0" of "w" with shape (3, 3); expected a state of its shape (3, 2), or one',
        ),
        (
            changed(lambda c: c["optimizer"]["state"]["w"].update(factors={"0": torch.zeros(3, 3)})),
            'has optimizer state "factors.0" of "w" with shape (3, 3); expected a state of its shape (3, 2), or one',
        ),
        (
            changed(lambda c: c["optimizer"].update({"state.w.step": "one"}), flat()),
            'has optimizer state "step" of "w" as a str; expected a tensor or a number. Import the model',
        ),
        (
            changed(lambda c: c["optimizer"].update({"state.w.exp_avg": torch.zeros(3, 2) * 1j}), flat()),
            'has optimizer state "exp_avg" of "w" with dtype torch.complex64; the parameter is torch.float32.',
        ),
        (
            changed(lambda c: c["optimizer"].update({"state.w.step": torch.tensor(float("nan"))}), flat()),
            'has optimizer state "step" of "w" that is nan; expected a finite number. Import the model alone (--model-',
        ),
        (
            changed(nested_in_flat, flat()),
            'has optimizer states in two forms, as "optimizer.state.w.exp_avg_sq" and, flat, as '
            '"optimizer.state.w.exp_avg"; expected one. Save one optimizer, or import the model alone (--model-only).',
        ),
        (
            changed(twice),
            'has optimizer state "exp_avg" of "w" twice, once as "optimizer.state.w.exp_avg"; save one optimizer, or',
        ),
    ],
)  # fmt: skip
def test_states_that_cannot_be_taken_get_a_sentence_and_the_model_alone_can(
    content: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = written(content, tmp_path / "dcp")
    with pytest.raises(UserError) as refused:
        import_model(folder, LocalStorage(tmp_path / "c"))
    assert str(refused.value).startswith(f"{folder} {sentence}")
    assert not (tmp_path / "c").exists()
    assert import_model(folder, LocalStorage(tmp_path / "c"), model_only=True).states == 0


def test_of_two_models_that_lie_in_mappings_none_is_taken(tmp_path: Path) -> None:
    content = {name: {"model": {"w": torch.zeros(2)}} for name in ("generator", "critic")}
    with pytest.raises(UserError, match=r'holds 2 models, "critic.model", "generator.model"; expected one. Save'):
        DcpFolder(written(content, tmp_path / "dcp"))


def two(
    steps: tuple[int, int], second: tuple[str, ...] = ("exp_avg", "exp_avg_sq"), numbers: tuple[str, ...] = ("step",)
) -> dict[str, Any]:
    """Two parameters after so many steps of Adam, the second with these states."""
    states: dict[str, Any] = {}
    for name, step, keys in (("a", steps[0], ("exp_avg", "exp_avg_sq")), ("b", steps[1], second)):
        states |= {f"state.{name}.{key}": torch.zeros(2) for key in keys}
        states |= {f"state.{name}.{key}": torch.tensor(step) for key in numbers}
    return {"a": torch.zeros(2), "b": torch.ones(2), "optim": {**states, "param_groups.a.lr": 1.0}}


@pytest.mark.parametrize(
    ("kind", "content", "sentence"),
    [
        (
            torch.optim.Adam,
            two((4, 4), ("exp_avg",)),
            'the checkpoint has exp_avg, step as optimizer state of parameter "b"; Adam keeps exp_avg, exp_avg_sq, '
            "step. Use the optimizer that made it, or import the model alone (--model-only).",
        ),
        (
            torch.optim.NAdam,
            two((4, 5), numbers=("step", "mu_product")),
            'the numbers that the optimizer keeps of parameters "b" and "a" (its steps, say) differ in the checkpoint, '
            "and the job keeps one for both. Put them into two optimizer groups, or import the model alone "
            "(--model-only).",
        ),
    ],
)
def test_states_that_a_jobs_optimizer_cannot_have_get_a_sentence_when_it_begins(
    kind: type[torch.optim.Adam], content: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    import_model(written(content, tmp_path / "dcp"), LocalStorage(tmp_path / "c"))
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    state = TrainingState(model, kind(model.parameters()), None, Limits(1, 0.0, 1), residency_of(0))
    with pytest.raises(UserError) as refused:
        load_model(found_in(tmp_path / "c").reader(), state, ())
    assert str(refused.value) == sentence


def test_tensors_that_the_model_ties_must_be_the_same_in_the_folder(tmp_path: Path) -> None:
    model = Model()
    for name, head in (("same", model.embedding.weight.detach()), ("other", torch.ones(150, 96))):
        content = {**model.state_dict(), "head.weight": head.clone()}
        import_model(written(content, tmp_path / name), LocalStorage(tmp_path / f"{name}-c"))
    load_model(found_in(tmp_path / "same-c").reader(), fresh(), ())
    with pytest.raises(
        UserError, match=r'"embedding.weight" and "head.weight" are one tensor in the model and differ in'
    ):
        load_model(found_in(tmp_path / "other-c").reader(), fresh(), ())
