"""Memory that runs out is told with what was being made, the stage, the unit, and what would need less."""

from __future__ import annotations

import errno
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from crew import Crew, Task, undisturbed
from hard_units import of, task
from integration.scripts import Adapted, optimizer_of
from late_device import LateDevice
from shoal.blocks import sharded_memory
from shoal.blocks.held import HeldBlocks
from shoal.blocks.sharded_memory import TorchMemory
from shoal.blocks.state_home import FillMemory
from shoal.checkpoint import snapshot
from shoal.config import load_config
from shoal.config.out_of_memory import Setting, explain, is_out_of_memory, note_what, place_of, ways
from shoal.core.layout import Stretch
from shoal.offload.transfers import Buffer
from shoal.process.device import HOST, Device
from shoal.state.training_state import Limits, TrainingState
from shoal.training import start as start_of_training
from shoal.training.activation_checkpointing import checkpoint_activations
from shoal.training.engine import Engine
from shoal.training.memory_report import memory_setting
from shoal.training.residency import residency_of
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
    explain(error, "in the loop", lambda: setting_of(smallest()))
    assert not hasattr(error, "__notes__")


def test_an_error_that_cannot_be_explained_arrives_all_the_same() -> None:
    def nothing_left() -> Setting:
        raise MemoryError

    error = MemoryError()
    explain(error, "in the update of step 3", nothing_left)
    assert error.__notes__ == ["Memory ran out while activations, gradients or the script's own tensors were made."]


def smallest(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "shoal": {"lanes": 1, "max_steps": 1, "mirrors": 0}, **more}


def setting_of(document: dict[str, Any], workers: int = 2, device: Device = HOST) -> Setting:
    """Of a model with units."""
    config = load_config(document)
    advice = residency_of(config.stage).advice(config)
    return Setting(config, advice, workers, device.on_host, has_units=True, steps_in_parts=True)


def test_what_is_said_names_where_it_was_and_only_what_is_not_done_yet() -> None:
    error = RuntimeError(FULL)
    note_what(error, 'unit 3 of 9 was gathered ("layers.2", 4,096 bytes of parameters)')
    note_what(error, "the update was made")
    setting = setting_of(smallest(zero_optimization={"stage": 3}, bf16={"enabled": True}), workers=4)
    for _ in range(2):
        explain(error, "in the forward of step 5, lane 2", lambda: setting)
    nearest, whole = error.__notes__
    assert nearest == 'Memory ran out while unit 3 of 9 was gathered ("layers.2", 4,096 bytes of parameters).'
    assert whole.startswith("That was in the forward of step 5, lane 2, in ZeRO stage 3 with 4 workers. Less is needed")
    assert "`shoal.units`" in whole
    assert "offload_optimizer" in whole
    assert not any(words in whole for words in ("bf16", "mirrors", "micro_batch", "stage: 4"))


OFFER = re.compile("`([a-z0-9_.]+): ([^`]+)`")
"""A key with a value that is offered."""


def offers(setting: Setting, folder: Path, is_of_device: bool = True) -> dict[str, Any]:
    """By dotted key. What does not name a value is left out."""
    found = OFFER.findall("\n".join(ways(setting, is_of_device)))
    return {key: json.loads(value.replace("…", str(folder))) for key, value in found}


def with_key(document: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, name = key.rsplit(".", 1)
    return {**document, section: {**document.get(section, {}), name: value}}


def start(document: dict[str, Any], device: Device) -> None:
    """As far as a worker refuses what its config says. Raises `UserError`."""
    config, model = load_config(document), Adapted(0.1, True)
    checkpoint_activations(model, config)
    TrainingState(model, optimizer_of(model), None, Limits.of(config, 1), residency_of(config.stage), device)


@pytest.mark.parametrize("device", [HOST, LateDevice()], ids=["on the CPU", "on a device"])
def test_nothing_is_offered_that_a_worker_would_refuse(device: Device, tmp_path: Path) -> None:
    document, seen = smallest(zero_optimization={"stage": 0}), dict[str, Any]()
    while offered := offers(setting_of(document, device=device), tmp_path):
        for key, value in offered.items():
            start(with_key(document, key, value), device)
        key, value = next(iter(offered.items()))
        assert seen.get(key) != value, f"`{key}: {value}` is offered to a config that has it"
        seen[key] = value
        document = with_key(document, key, value)
    offloads = {key: value["device"] for key, value in seen.items() if "offload" in key}
    in_memory = {"zero_optimization.offload_optimizer": "cpu", "zero_optimization.offload_param": "cpu"}
    assert offloads == ({"zero_optimization.offload_optimizer": "nvme"} if device.on_host else in_memory)
    assert ("activation_checkpointing.cpu_checkpointing" in seen) is not device.on_host
    assert seen["zero_optimization.stage"] == 3


def test_the_hosts_memory_is_not_offered_where_it_is_what_ran_out(tmp_path: Path) -> None:
    setting = setting_of(smallest(zero_optimization={"stage": 3}), device=LateDevice())
    assert "zero_optimization.offload_optimizer" in offers(setting, tmp_path, is_of_device=True)
    assert "zero_optimization.offload_optimizer" not in offers(setting, tmp_path, is_of_device=False)
    for error, is_offered in ((torch.OutOfMemoryError("CUDA out of memory."), True), (RuntimeError(PINNED), False)):
        explain(error, "in the backward of step 1, lane 0", lambda: setting)
        assert ("offload_optimizer" in error.__notes__[-1]) is is_offered


IN_A_LANE = "a smaller `train_micro_batch_size_per_gpu`, and more of them in a lane"
IN_LANES = "a smaller `train_micro_batch_size_per_gpu`, and more lanes"


@pytest.mark.parametrize(
    ("stage", "micro_batches", "offered"),
    [
        (1, 1, [IN_A_LANE]),
        (1, 2, [IN_A_LANE, "`zero_optimization.stage: 2`, with one"]),
        (2, 1, [IN_LANES]),
        (3, 2, [IN_LANES, "one micro-batch in a lane, and more lanes"]),
    ],
)
def test_where_gradients_are_sharded_more_lanes_are_offered_and_not_more_micro_batches_in_one(
    stage: int, micro_batches: int, offered: list[str]
) -> None:
    document = with_key(smallest(zero_optimization={"stage": stage}), "shoal.micro_batches_per_lane", micro_batches)
    found = list(ways(setting_of(document | {"train_micro_batch_size_per_gpu": 4}), is_of_device=True))
    assert [way for way in found if "micro" in way] == [
        next(way for way in found if way.startswith(beginning)) for beginning in offered
    ]


class Counted(torch.optim.AdamW):
    """It may count its steps."""


def test_a_worker_says_what_its_advice_depends_on(tmp_path: Path) -> None:
    found: list[Setting] = []

    def look(engine: Engine) -> None:
        found.append(memory_setting(engine.context))

    undisturbed(of(task(prepare=look)))
    undisturbed(Task({"max_steps": 1, "lanes": 1}, prepare=look, device=LateDevice))
    undisturbed(Task({"max_steps": 1, "lanes": 1}, prepare=look, optimizer=lambda model: Counted(model.parameters())))
    assert [(one.is_on_host, one.has_units, one.steps_in_parts) for one in found] == [
        (True, True, True), (False, False, True), (True, False, False),
    ]  # fmt: skip
    assert list(offers(found[-1], tmp_path)) == ["zero_optimization.stage", "bf16.enabled"]


def test_a_place_in_a_model_is_what_names_have_in_common() -> None:
    assert place_of(["layers.2.up.weight", "layers.2.norm.bias"]) == '"layers.2"'
    assert place_of(["head.weight"]) == '"head.weight"'
    assert place_of(["norm.bias", "head.weight", "x"]) == '"norm.bias" and 2 more parameters'


def test_a_unit_for_which_there_is_no_memory_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_memory, "can_lie_in_pages", lambda _: False)
    find = TorchMemory.find

    def fails(memory: TorchMemory, bucket: int) -> None:
        if crew.workers["b"].planned and crew.workers["b"].engine.global_step == 2:
            crew.workers["b"].engine.context.faults._planted.clear()
            raise RuntimeError(FULL)
        find(memory, bucket)

    with Crew("abc", of(task())) as crew:
        crew.plant("b", 99, "forward")
        crew.train_to(1)
        monkeypatch.setattr(TorchMemory, "find", fails)
        assert crew.finish() == undisturbed(of(task(0)))
        failures = crew.workers["b"].failure + crew.workers["a"].failure + crew.workers["c"].failure
    assert "can't allocate memory" in failures
    assert "Memory ran out while unit " in failures
    assert 'was gathered ("' in failures


def without_memory(*_: object) -> None:
    raise RuntimeError(FULL)


def test_a_model_for_which_initialize_finds_no_memory_is_to_be_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_of_training, "TrainingState", without_memory)
    config = smallest(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        shoal.initialize(torch.nn.Linear(1, 1), config, [torch.ones(1)] * 2)
    making, instead = caught.value.__notes__
    assert making == "Memory ran out while shoal.initialize put the model's parameters into blocks."
    assert "`shoal.deferred()`" in instead


def test_blocks_for_which_a_new_world_finds_no_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldBlocks, "hold", without_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        undisturbed(of(task(0)))
    nearest, *_ = caught.value.__notes__
    assert nearest == "Memory ran out while this worker's blocks were put in place for generation 1."


def test_blocks_for_which_a_joiner_finds_no_memory_are_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = FillMemory.part

    def fails(self: FillMemory, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (elements,)
        size = 1 << 60 if threading.current_thread().name == "worker d" else 0
        return torch.empty(size, dtype=torch.uint8) if size else part(self, stretch, key, dtype)

    monkeypatch.setattr(FillMemory, "part", fails)
    with Crew("ab", Task({"max_steps": 8, "lanes": 4})) as crew:
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == undisturbed(Task({"max_steps": 8, "lanes": 4}))
        failure = crew.workers["d"].failure
    assert "Memory ran out while blocks that this worker is to hold came from those that have them." in failure


def test_a_buffer_of_offload_for_which_there_is_no_memory_is_named() -> None:
    buffer = Buffer()
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        buffer.reserve(1 << 46)
    assert is_out_of_memory(caught.value)
    assert caught.value.__notes__ == [
        "Memory ran out while a buffer of 70,368,744,177,664 bytes was made, which carries optimizer state from its "
        "file and back."
    ]
    assert buffer.bytes == 0


def test_a_save_without_memory_for_its_copy_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take, failed = snapshot.Arena.take, list[str]()

    def fails(arena: snapshot.Arena, size: int) -> Tensor:  # (bytes,) uint8
        if len(failed) < 2:  # one for each worker
            failed.append("the first save")
            raise RuntimeError(FULL)
        return take(arena, size)

    monkeypatch.setattr(snapshot.Arena, "take", fails)
    options = {"max_steps": 5, "lanes": 4, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}}
    with Crew("ab", Task(options)) as crew:
        assert crew.finish() == undisturbed(Task({"max_steps": 5, "lanes": 4}))
    assert "set `shoal.checkpoint.stream: true`" in capsys.readouterr().err
    assert [place.parent.name[:17] for place in tmp_path.rglob("manifest.json")] == ["step-000000000004"]
