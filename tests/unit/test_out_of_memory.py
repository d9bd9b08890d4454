"""Memory that runs out is told with what was being made, the stage, the unit, and what would need less."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import Crew, Task, undisturbed
from hard_units import of, task
from shoal.checkpoint import snapshot
from shoal.config import load_config
from shoal.out_of_memory import explain, is_out_of_memory, note_what, place_of
from torch import Tensor

FULL = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."

PINNED = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
"""Of `torch.empty(…, pin_memory=True)`."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OSError(errno.ENOMEM, "x"), RuntimeError(FULL), torch.OutOfMemoryError("CUDA out of memory."),
        torch.AcceleratorError(PINNED), RuntimeError(PINNED), RuntimeError("HIP error: out of memory"),
    ],
)  # fmt: skip
def test_what_every_allocator_says_is_understood(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        RuntimeError("CUDA error: device-side assert"),
        OSError(errno.ENOSPC, "x"),
        ValueError(),
    ],
)
def test_another_error_is_left_alone(error: Exception) -> None:
    note_what(error, "something was made")
    explain(error, "in the loop", load_config(smallest()), 2)
    assert not hasattr(error, "__notes__")


def smallest(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "shoal": {"lanes": 1, "max_steps": 1, "mirrors": 0}, **more}


def test_what_is_said_names_where_it_was_and_only_what_is_not_done_yet() -> None:
    error = RuntimeError(FULL)
    note_what(error, 'unit 3 of 9 was gathered ("layers.2", 4,096 bytes of parameters)')
    note_what(error, "the update was made")
    config = load_config(smallest(zero_optimization={"stage": 3}, bf16={"enabled": True}))
    for _ in range(2):
        explain(error, "in the forward of step 5, lane 2", config, 4)
    nearest, whole = error.__notes__
    assert nearest == 'Memory ran out while unit 3 of 9 was gathered ("layers.2", 4,096 bytes of parameters).'
    assert whole.startswith("That was in the forward of step 5, lane 2, in ZeRO stage 3 with 4 workers. Less is needed")
    assert "`shoal.units`" in whole
    assert "offload_optimizer" in whole
    assert not any(words in whole for words in ("bf16", "mirrors", "micro_batch", "stage: 4"))


def test_a_place_in_a_model_is_what_names_have_in_common() -> None:
    assert place_of(["layers.2.up.weight", "layers.2.norm.bias"]) == '"layers.2"'
    assert place_of(["head.weight"]) == '"head.weight"'
    assert place_of(["norm.bias", "head.weight", "x"]) == '"norm.bias" and 2 more parameters'


def test_a_unit_for_which_there_is_no_memory_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = shoal.blocks.unit_flats._resize

    def fails(flat: Tensor, size: int) -> None:
        if size and crew.workers["b"].planned and crew.workers["b"].engine.global_step == 2:
            crew.workers["b"].engine.context.faults._planted.clear()
            raise RuntimeError(FULL)
        resize(flat, size)

    with Crew("abc", of(task())) as crew:
        crew.plant("b", 99, "forward")
        crew.train_to(1)
        monkeypatch.setattr(shoal.blocks.unit_flats, "_resize", fails)
        assert crew.finish() == undisturbed(of(task(0)))
        failures = crew.workers["b"].failure + crew.workers["a"].failure + crew.workers["c"].failure
    assert "can't allocate memory" in failures
    assert "Memory ran out while unit " in failures
    assert 'was gathered ("' in failures


def test_a_save_without_memory_for_its_copy_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError(FULL)

    monkeypatch.setattr(snapshot.Arena, "take", fails)
    options = {"max_steps": 5, "lanes": 4, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}}
    with Crew("ab", Task(options)) as crew:
        assert crew.finish() == undisturbed(Task({"max_steps": 5, "lanes": 4}))
    assert "set `shoal.checkpoint.stream: true`" in capsys.readouterr().err
    assert not list(tmp_path.rglob("manifest.json"))
