"""Optimizer state in files of a model on a device that is late: the bits of a model on the CPU with state in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Killed, Task, undisturbed
from late_device import LateDevice
from rule import holds
from shoal.blocks.loaded_state import WEIGHTS
from shoal.blocks.update_place import OnTheHost
from shoal.offload.state_pieces import HeldPiece
from shoal.offload.state_place import InFile
from shoal.offload.transfers import Buffer
from shoal.process.device import HOST
from shoal.training.engine import Engine
from tiers import check
from torch import Tensor

pytestmark = check("waits for a slow disk")

BF16 = {"bf16": {"enabled": True}}


@pytest.fixture(autouse=True)
def buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces are of two blocks, so that there are more of them than buffers; buffers are no memory of the device."""
    monkeypatch.setattr("shoal.offload.state_pieces.PIECE_ELEMENTS", 2 * 4096)
    view = Buffer.view

    def host_view(self: Buffer, start: int, elements: int, dtype: torch.dtype) -> Tensor:
        return LateDevice.on_the_host(view(self, start, elements, dtype))

    monkeypatch.setattr(Buffer, "view", host_view)
    yield
    LateDevice.host_memory.clear()


def late(folder: Path, stage: int, **more: Any) -> Task:
    return Task({"max_steps": 6, "stage": stage, "offload": folder, **more}, device=LateDevice, in_loop=look)


def look(engine: Engine) -> None:
    held = engine.context.state.held
    assert isinstance(held.home, InFile) and isinstance(held.segments.place, OnTheHost)
    assert not held.runs or engine.global_step < 1 or held.home.bytes_by_place()["state_files"] > 0
    assert not any(held.segments.twin.state.values()), "what an update has left there is never given back"


def look_at_parameters(engine: Engine) -> None:
    look(engine)
    state = engine.context.state
    for segment in state.held.segments.in_order:
        assert segment.weights is not None and state.device.is_pinned(segment.weights)


def right(task: Task) -> str:
    return undisturbed(
        replace(task, options={**task.options, "offload": ""}, device=lambda: HOST, in_loop=lambda _: None)
    )


@holds("State on the host is updated")
@pytest.mark.parametrize(("stage", "precision"), [(1, {}), (2, BF16), (3, {}), (3, BF16)])
def test_a_loss_a_join_and_a_fill_change_no_bit(stage: int, precision: dict[str, Any], tmp_path: Path) -> None:
    through_a_loss_and_a_join(late(tmp_path, stage, precision=precision))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", [{}, BF16])
def test_parameters_in_host_memory_change_no_bit_either(precision: dict[str, Any], tmp_path: Path) -> None:
    task = late(tmp_path, 3, precision=precision, offload_param=True)
    through_a_loss_and_a_join(replace(task, in_loop=look_at_parameters))


def test_parameters_in_host_memory_are_filled_in_several_steps(tmp_path: Path) -> None:
    slices = {"max_steps": 12, "shoal": {"fill_bytes_per_step": 100_000}}
    through_a_loss_and_a_join(late(tmp_path, 3, offload_param=True, **slices))


@pytest.mark.parametrize("place", ["cpu", "a file"])
def test_parameters_in_host_memory_are_received_where_they_stay(place: str, tmp_path: Path) -> None:
    """Others than pinned would be copied once more, and be there twice."""
    engines: list[Engine] = []
    folder = tmp_path if place == "a file" else place
    task = late(folder, 3, max_steps=1, offload_param=True)  # type: ignore[arg-type]
    undisturbed(replace(task, in_loop=lambda _: None, prepare=engines.append))
    state = engines[0].context.state
    state.held.expect(state.held.runs)
    stretch = state.layout.stretches(state.held.runs)[0]
    received = state.held.memory_for(stretch, WEIGHTS, state.layout.buckets[stretch.bucket].dtype)
    assert state.device.is_pinned(received)


def test_an_update_in_a_file_brings_gradients_down_and_parameters_in_host_memory_stay_there(tmp_path: Path) -> None:
    device, seen, sizes = LateDevice(), list[int](), list[int]()

    def note(engine: Engine) -> None:
        if engine.context.loop.place == (0, 0):
            seen.append(device.down)
        sizes[:] = [sum(bucket.elements * 4 for bucket in engine.context.state.layout.buckets)]

    task = late(tmp_path, 3, lanes=1, offload_param=True)
    undisturbed(replace(task, device=lambda: device, in_loop=note))
    assert {after - before for before, after in pairwise(seen)} == set(sizes)


def through_a_loss_and_a_join(task: Task) -> None:
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.kill("b")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == right(task)


@pytest.mark.parametrize("more", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload_param": True}])
def test_a_death_within_the_update_changes_no_bit(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After some pieces of it: what lies in the file then is of two steps, and nobody ever reads it."""
    task, died = late(tmp_path, **more), list[int]()
    update = InFile._update_piece

    with Crew("abc", task) as crew:

        def fail(self: InFile, piece: HeldPiece, *rest: Any) -> None:
            state = crew.workers["b"].engine.context.state if "b" in crew.workers else None
            if state is not None and self is state.held.home and state.step == 2 and piece is self.store.pieces[0]:
                died.append(len(self.store.pieces))
                raise Killed
            update(self, piece, *rest)

        monkeypatch.setattr(InFile, "_update_piece", fail)
        crew.train_to(4)
        assert died and died[0] > 3 and "b" not in [worker.name for worker in crew.members()]
        assert crew.finish() == right(task)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_goes_on_with_and_without_a_device(stage: int, tmp_path: Path) -> None:
    place, files = {"checkpoint": {"path": str(tmp_path / "c"), "every_steps": 3}}, tmp_path / "files"
    files.mkdir()
    with Crew("abc", late(files, stage, max_steps=3, shoal=place)) as crew:
        crew.finish()
    on_the_cpu = Task({"max_steps": 6, "stage": stage, "shoal": place})
    with Crew("ab", on_the_cpu) as crew:
        assert crew.finish() == right(late(files, stage))
    with Crew("ab", late(files, stage, max_steps=9, shoal=place)) as crew:
        assert crew.finish() == right(late(files, stage, max_steps=9))


def test_workers_may_differ_in_where_they_keep_state(tmp_path: Path) -> None:
    in_files, on_host = late(tmp_path, 3), Task({"max_steps": 6, "stage": 3, "offload": "cpu"}, device=LateDevice)
    parameters_too = late(tmp_path, 3, offload_param=True)
    with Crew("abc", in_files, odd={"b": on_host, "c": parameters_too}) as crew:
        crew.train_to(2)
        crew.kill("a")
        crew.train_to(4)
        crew.add("d", on_host)
        assert crew.finish() == right(in_files)
