"""The engine on a device that is late: whatever it forgets to wait for is a wrong bit, or an assertion of the device.

The bits are those of a world of one on the CPU, in every stage, through losses, joins, fills and checkpoints.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shoal
import shoal.blocks.unit_flats
import torch
from crew import Crew, Killed, Task, Worker, undisturbed
from integration.scripts import Adapted
from late_device import LateDevice
from matrices import shortened
from memory_group import MemoryGroup
from rule import Edit, holds, rule
from shoal.blocks import update_place
from shoal.blocks.optimizer_step import Segment
from shoal.blocks.state_home import InMemory
from shoal.blocks.update_place import OnTheHost
from shoal.exchange.unit_fetch import UnitFetch
from shoal.group.group import SoloGroup
from shoal.process.device import HOST, Device, DeviceCopy
from shoal.training import activation_checkpointing
from shoal.training.engine import Engine
from tiers import check
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from waiting_inputs import note_waiting_inputs

pytestmark = check("tries every step on a device of the tests")

BF16 = {"bf16": {"enabled": True}}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


def late(options: dict[str, Any], **more: Any) -> Task:
    return Task({"max_steps": 6, **options}, device=LateDevice, **more)


def right(task: Task) -> str:
    """On the CPU, with state beside the parameters."""
    return undisturbed(replace(task, device=lambda: HOST, in_loop=lambda _: None))


def look_at_votes(worker: Worker, point: str, _: int) -> None:
    """Before it votes the host has waited for whatever a commit reads."""
    device = worker.engine.context.state.device
    assert isinstance(device, LateDevice)
    assert point != "vote" or device.is_settled, "it votes before all has landed"


def through_a_loss_and_a_join(task: Task, point: str = "") -> None:
    with Crew("abc", task) as crew:
        crew.watchers.append(look_at_votes)
        crew.train_to(2)
        if point:
            crew.plant("b", 3, point)
        else:
            crew.kill("b")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == right(task)
        devices = [worker.engine.context.state.device for worker in crew.workers.values()]
        assert all(device.copies > 0 for device in devices if isinstance(device, LateDevice))


@rule(
    "A message leaves a device only when its copy has landed on the host, and in the order in which it was sent",
    "Devices",
    broken_by=[
        Edit(
            "shoal.group.device_group",
            "                work.copy.wait()\n                work.post(self.below)\n",
            "                work.post(self.below)\n",
        ),
        Edit(
            "shoal.group.device_group",
            "            while self._leaving:\n                work = self._leaving.popleft()\n",
            "            while self._leaving:\n                work = self._leaving.pop()\n",
        ),
    ],
)
@rule(
    "What a device does with a message that has come waits for the copy of it",
    "Devices",
    broken_by=Edit(
        "shoal.group.device_group",
        "device.to_device(message, self._target, self._promised).join()\n            device.give_back(message)\n",
        "device.to_device(message, self._target, self._promised)\n",
    ),
)
@rule(
    "Before it votes the host has waited for all that the device was given",
    "Devices",
    broken_by=Edit(
        "shoal.training.step",
        "        self._context.state.device.settle()\n        if self.number",
        "        if self.number",
    ),
)
@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_a_loss_and_a_join_change_no_bit(stage: int) -> None:
    through_a_loss_and_a_join(late({"stage": stage}))


@pytest.mark.parametrize("stage", shortened([1, 3], 3))
def test_half_precision_and_several_micro_batches_a_lane_have_their_bits(stage: int) -> None:
    through_a_loss_and_a_join(late({"stage": stage, "micro_batches_per_lane": 2, "precision": BF16}))


@pytest.mark.parametrize(("stage", "point"), [(1, "in_vote"), (2, "exchange")])
def test_a_loss_within_a_step_changes_no_bit(stage: int, point: str) -> None:
    through_a_loss_and_a_join(late({"stage": stage}), point)


def test_fills_that_take_several_steps_change_no_bit() -> None:
    through_a_loss_and_a_join(late({"stage": 1, "max_steps": 12, "shoal": {"fill_bytes_per_step": 100_000}}))


@rule(
    "State on the host is updated when gradients and parameters have come down, and a device reads no parameter "
    "before it has come up",
    "Devices",
    broken_by=[
        Edit(
            "shoal.blocks.update_place",
            "            for copy in one.copies:\n                copy.wait()\n",
            "            assert one.copies\n",
        ),
        Edit("shoal.blocks.update_place", "    copy.join()\n", ""),
    ],
)
@pytest.mark.parametrize(
    ("stage", "precision"), shortened([(1, {}), (2, BF16), (3, {}), (3, BF16)], (1, {}), (3, BF16))
)
def test_state_in_host_memory_has_the_same_bits(stage: int, precision: dict[str, Any]) -> None:
    task = late({"stage": stage, "precision": precision, "offload": "cpu"})
    through_a_loss_and_a_join(task)
    engine_state = []
    undisturbed(replace(task, prepare=lambda engine: engine_state.append(engine.context.state.held)))
    assert [(type(held.home), type(held.segments.place)) for held in engine_state] == [(InMemory, OnTheHost)]


PARAMETERS_TOO: dict[str, Any] = {"stage": 3, "offload": "cpu", "offload_param": True}


@rule(
    "What is copied up to a unit from host memory has landed before the unit is used, or its memory goes",
    "Devices",
    broken_by=[
        Edit(
            "shoal.exchange.unit_fetch",
            "            copy.join()\n        del self._coming[unit.number]\n",
            "            assert copy\n        del self._coming[unit.number]\n",
            by="test_parameters_in_host_memory_have_the_same_bits",
        ),
        Edit(
            "shoal.exchange.unit_fetch",
            "                copy.join()\n\n\ndef answers_of",
            "                assert copy\n\n\ndef answers_of",
            by="test_what_was_copied_up_to_a_unit_has_landed_when_the_unit_is_given_up",
        ),
    ],
)
@pytest.mark.parametrize("precision", [{}, BF16])
def test_parameters_in_host_memory_have_the_same_bits(precision: dict[str, Any]) -> None:
    def look(engine: Engine) -> None:
        state = engine.context.state
        assert isinstance(state.held.home, InMemory)
        for segment in state.held.segments.in_order:
            assert segment.weights is not None and state.device.is_pinned(segment.weights)

    through_a_loss_and_a_join(late({**PARAMETERS_TOO, "precision": precision}, in_loop=look))


def test_a_loss_in_a_gather_from_host_memory_changes_no_bit() -> None:
    through_a_loss_and_a_join(late(PARAMETERS_TOO), "gather")


def test_parameters_in_host_memory_are_filled_in_several_steps() -> None:
    through_a_loss_and_a_join(late({**PARAMETERS_TOO, "max_steps": 12, "shoal": {"fill_bytes_per_step": 100_000}}))


@pytest.mark.parametrize("more", [{"stage": 1, "offload": "cpu"}, {"stage": 3, "offload": "cpu"}, PARAMETERS_TOO])
def test_a_death_within_an_update_on_the_host_changes_no_bit(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first segment has gone up; nobody asks it for anything any more."""
    task, died, bring_up = late({"mirrors": 1, **more}), list[int](), update_place.bring_up
    with Crew("abc", task) as crew:

        def fail(device: Device, segment: Segment, place: Tensor) -> DeviceCopy | None:
            state = crew.workers["b"].engine.context.state
            if state.step == 2 and any(segment is later for later in state.held.segments.in_order[1:]):
                died.append(len(state.held.segments.in_order))
                raise Killed
            return bring_up(device, segment, place)

        monkeypatch.setattr(update_place, "bring_up", fail)
        crew.train_to(4)
        assert died and died[0] > 1 and "b" not in [worker.name for worker in crew.members()]
        crew.add("d")
        assert crew.finish() == right(task)


def test_inputs_of_checkpointed_units_that_wait_in_host_memory_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In stage 3 each is made again with gathered parameters; what it is made of was copied down and comes up."""
    waited, made = note_waiting_inputs(monkeypatch), activation_checkpointing._Checkpointed.__init__
    monkeypatch.setattr(activation_checkpointing._Checkpointed, "__init__", lambda self, _: made(self, True))
    for precision in ({}, BF16):
        waited.clear()
        options = {"stage": 3, "precision": precision, "shoal": {"activation_checkpointing": ["Adapter"]}}
        task = late(options, model=lambda: Adapted(0.1, True))
        without = replace(task, options={**task.options, "shoal": {}})
        with Crew("abc", task) as crew:
            crew.plant("b", 3, "backward")
            crew.train_to(4)
            crew.add("d")
            assert crew.finish() == right(without)
        assert waited


@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_a_model_that_was_built_without_memory_has_the_values_that_it_has_on_the_host(stage: int) -> None:
    def built() -> nn.Module:
        with shoal.deferred():
            return Adapted(0.1, True)

    through_a_loss_and_a_join(late({"stage": stage}, model=built))


def test_an_update_on_the_host_copies_gradients_down_and_units_up_and_nothing_more() -> None:
    device, seen = LateDevice(), list[tuple[int, int]]()
    held: list[int] = []

    def look(engine: Engine) -> None:
        if engine.context.loop.place == (0, 0):
            seen.append((device.down, device.up))
        held[:] = [sum(bucket.elements * 4 for bucket in engine.context.state.layout.buckets)]

    undisturbed(Task({"max_steps": 6, "lanes": 1, **PARAMETERS_TOO}, device=lambda: device, in_loop=look))
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen)]
    assert {down for down, _ in steps} == {held[0]}
    assert all(held[0] <= up <= 3 * held[0] for _, up in steps)


@holds("What is copied up to a unit")
def test_what_was_copied_up_to_a_unit_has_landed_when_the_unit_is_given_up() -> None:
    device, there = LateDevice(), torch.zeros(4)
    here = device.pinned(4, torch.float32).fill_(3.0)
    copies = []

    def put_own(_: int) -> list[Any]:
        copies.append(device.to_device(here, there, device.promise(there)))
        return copies

    unit: Any = SimpleNamespace(number=0, allocate=lambda: None)
    nothing: Any = None
    fetch = UnitFetch(SoloGroup(), nothing, (1, 0), nothing, put_own, lambda: True)
    fetch.begin(unit)
    assert not copies[0].landed
    fetch.give_up()
    assert copies[0].landed and there.eq(3.0).all()


def test_workers_may_differ_in_where_they_keep_state() -> None:
    for beside, on_host in (
        (late({"stage": 1}), late({"stage": 1, "offload": "cpu"})),
        (late({"stage": 3}), late(PARAMETERS_TOO)),
    ):
        with Crew("abc", beside, odd={"b": on_host}) as crew:
            crew.train_to(2)
            crew.kill("a")
            crew.train_to(4)
            crew.add("d", on_host)
            assert crew.finish() == right(beside)


@rule(
    "A snapshot is whole when training goes on",
    "Devices",
    broken_by=Edit("shoal.checkpoint.snapshot", "    arena.settle()\n    return snapshot\n", "    return snapshot\n"),
)
@pytest.mark.parametrize("more", shortened([{"stage": 1}, {"stage": 3}, PARAMETERS_TOO], {"stage": 1}, PARAMETERS_TOO))
def test_a_checkpoint_goes_on_with_and_without_a_device(more: dict[str, Any], tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("abc", late({**more, "max_steps": 3, "shoal": place})) as crew:
        crew.finish()
    with Crew("ab", replace(late({**more, "shoal": place}), device=lambda: HOST)) as crew:
        assert crew.finish() == right(late(more))
    with Crew("ab", late({**more, "max_steps": 9, "shoal": place})) as crew:
        assert crew.finish() == right(late({**more, "max_steps": 9}))


def test_an_evaluation_and_gathered_parameters_read_what_has_come() -> None:
    read: list[tuple[str, int, float]] = []

    def look(engine: Engine) -> None:
        with engine.gathered(), torch.no_grad():
            read.append(("all", engine.global_step, sum(float(one.sum()) for one in engine.module.parameters())))
        with engine.evaluating():
            for batch in engine.shard([{"tokens": torch.arange(16), "targets": torch.arange(16)}] * 8):
                engine.report(loss=engine.module(**batch))

    with Crew("abc", late({"stage": 3}, in_loop=look)) as crew:
        crew.train_to(2)
        crew.kill("b")
        crew.finish()
    for step in {step for _, step, _ in read}:
        assert len({total for _, of, total in read if of == step}) == 1


def test_a_device_that_is_settled_has_landed_everything() -> None:
    device = LateDevice()
    here, there = device.pinned(4, torch.float32), torch.zeros(4)
    copy = device.to_host(torch.arange(4.0), here)
    assert here.isnan().all() and not device.is_settled
    device.settle()
    assert copy.landed and here.tolist() == [0, 1, 2, 3]
    coming = device.to_device(here, there, device.promise(there))
    assert there.isnan().all()
    coming.join()
    assert there.tolist() == [0, 1, 2, 3]
    device.give_back(here)
    assert here.isnan().all()


def test_on_the_cpu_nothing_is_staged_and_nothing_is_waited_for() -> None:
    seen: list[bool] = []

    def look(engine: Engine) -> None:
        world = engine.context.world
        if world is not None:
            seen.append(isinstance(world.group, MemoryGroup) and engine.context.state.device is HOST)

    with Crew("ab", Task({"stage": 1, "max_steps": 2}, in_loop=look)) as crew:
        crew.finish()
    assert seen and all(seen)


BESIDE_A_STEP = {
    "probe_state", "_effects_of_steps", "<listcomp>", "_keeps_denormals",  # when a worker starts
    "_step_on",  # the optimizer's own counters, after the commit
    "is_finite",  # the layout of this device is the host's
    "refuse",  # once a step, where parameters come and go
}  # fmt: skip
"""Functions that ask all the same."""


class Reads(TorchDispatchMode):
    """Notes which functions of Shoal ask for a number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            ours = [frame.name for frame in traceback.extract_stack() if "/worker/shoal/" in frame.filename]
            self.by.add(ours[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_within_a_step_asks_a_device_for_a_number(stage: int) -> None:
    """It would wait for all that it was given."""
    reads = Reads()
    with reads:
        undisturbed(late({"stage": stage, "micro_batches_per_lane": 2}))
    assert reads.by <= BESIDE_A_STEP, "a device is asked within a step"
