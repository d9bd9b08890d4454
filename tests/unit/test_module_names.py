"""A compiled model and the plain one read each other's files, and have one fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crew import Task, engine_of
from integration.scripts import Model
from safetensors.torch import load_file
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from torch import nn


def plain() -> nn.Module:
    return Model(0.0, True)


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


def compiled_inside() -> nn.Module:
    model = plain()
    model.up = torch.compile(model.up, backend="eager")  # type: ignore[assignment]
    return model


def run(model: Callable[[], nn.Module], steps: int, saves: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Trains (on) to `steps`, saves there; the fingerprint and the export."""
    options = {"max_steps": steps, "shoal": {"checkpoint": {"path": str(saves)}}}
    engine = engine_of(Task(options, model=model), AloneLink(), Faults([]))
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
    engine.save_checkpoint()
    engine.export(saves / "model.safetensors")
    engine.parts.saving.close()
    return str(engine.fingerprint()), load_file(saves / "model.safetensors")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("model", [compiled, compiled_inside])
def test_a_compiled_model_is_saved_exported_and_resumed_under_the_plain_names(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    right, tensors = run(plain, 4, tmp_path / "right")
    run(model, 2, tmp_path / "mixed")
    fingerprint, exported = run(plain, 4, tmp_path / "mixed")
    assert (fingerprint, exported.keys()) == (right, tensors.keys())
    run(plain, 2, tmp_path / "other")
    fingerprint, exported = run(model, 4, tmp_path / "other")
    assert (fingerprint, exported.keys()) == (right, tensors.keys())
    assert not [name for name in exported if "_orig_mod" in name]
