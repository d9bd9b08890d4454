"""What a worker is estimated to hold: the formulas, and the bytes that workers really hold."""

from __future__ import annotations

import gc
import json
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, Worker
from late_device import LateDevice
from matrices import shortened
from planning import World
from shoal.blocks import shared_weights
from shoal.blocks.flat import lay_out_model, trainable
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.loaded_state import probe_state_bytes
from shoal.core.laying_out import BUCKET_BYTES, lay_out
from shoal.core.layout import Trainable
from shoal.core.tree import push
from shoal.exchange import pieces
from shoal.exchange.traffic import Traffic
from shoal.offload import state_pieces, transfers
from shoal.optim.elementwise import ELEMENTWISE
from shoal.process.device import HOST
from shoal.training.engine import Engine
from shoal.training.telemetry import held_bytes
from shoal_controller.cli.estimate import COLUMNS
from shoal_controller.core.planning.planner import Terms
from shoal_protos import memory_estimate
from shoal_protos.memory_estimate import (
    STAGES,
    CellShare,
    MemorySetup,
    Offload,
    Precision,
    estimate,
    stack_copies,
    state_bytes_of,
    waiting_subtrees,
)
from shoal_protos.shape import Shape
from tiers import check
from torch import Tensor, nn

pytestmark = check("measures memory")

P = 1_000_000
WIDTH = 512
TOLERANCE = 1.05
"""For padding, and for blocks that cannot be shared evenly."""


def per_parameter(**setup: Any) -> float:
    """Bytes per parameter on the device between two steps, 4 workers with a lane each."""
    wanted = MemorySetup(**{"parameters": P, "workers": 4, "lanes": 4, "stage": 1, **setup})
    return estimate(wanted).at_rest("device") / P


def test_at_rest_the_formulas_of_each_stage_and_precision_hold() -> None:
    assert [per_parameter(stage=stage, mirrors=0) for stage in STAGES] == [16, 10, 6, 3]
    assert [per_parameter(stage=stage, mirrors=1) for stage in STAGES] == [16, 12, 8, 6]
    assert [per_parameter(stage=stage, mirrors=1, precision="bf16") for stage in STAGES] == [18, 12, 8, 7]
    assert per_parameter(lanes=8, mirrors=0) == 14
    assert per_parameter(lanes=32, mirrors=0) == 22


def test_a_process_of_a_cell_has_its_part_of_the_model_and_the_state_of_its_part_of_what_is_common() -> None:
    alone = MemorySetup(parameters=8 * P, workers=4, lanes=4, stage=1)
    share = CellShare.of(Shape(tensor=2), common=2 * P, divided=3 * P, of_experts=0)
    part = replace(alone, parameters=5 * P, cell=share)  # of 8: half of 6, and 2 that both have
    assert estimate(part).at_rest("device") == 5 * P * 8 + 4 * P * 8 * 2 // 4
    assert estimate(replace(part, stage=0)).at_rest("device") == 5 * P * 8 + 4 * P * 8
    assert (estimate(part).partial_sum_bytes, estimate(alone).partial_sum_bytes) == (8 * P, 0)
    assert [estimate(replace(part, stage=stage)).built for stage in STAGES] == [True, True, True, True]


def test_in_a_step_stages_2_and_3_hold_reduced_gradients_sums_buckets_and_units() -> None:
    buckets = round(2 * 2 * BUCKET_BYTES * 1.75)
    for stage, rest, units in ((2, 8, 0), (3, 6, 8 * 3 * 1000)):
        one = estimate(MemorySetup(parameters=P, workers=4, lanes=16, stage=stage, unit=1000))
        assert one.at_most("device") == rest * P + 2 * P + 2 * P + buckets + units


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_stages_2_and_3_a_lane_of_several_micro_batches_has_its_whole_gradient_in_a_step(
    precision: Precision,
) -> None:
    for stage, more in ((0, 0), (1, 0), (2, 4 * P), (3, 4 * P)):
        one = estimate(MemorySetup(P, 4, stage, 16, precision=precision))
        two = estimate(replace(one.setup, micro_batches=2))
        assert two.at_most("device") - one.at_most("device") == more
        assert two.at_rest("device") == one.at_rest("device")


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_in_stages_2_and_3_a_parameter_above_a_bucket_is_there_twice_in_a_step(
    precision: Precision, width: int
) -> None:
    embedding = 100 << 20
    for stage, more in ((0, 0), (1, 0), (2, 2), (3, 2)):
        small = estimate(MemorySetup(900 * P, 4, stage, 4, precision=precision))
        large = estimate(replace(small.setup, largest_parameter=embedding))
        assert large.at_most("device") - small.at_most("device") == more * (width * embedding - 2 * BUCKET_BYTES)
        assert estimate(replace(small.setup, largest_parameter=1000)).items == small.items


def test_offload_moves_state_to_the_host_or_to_files() -> None:
    host = estimate(MemorySetup(P, workers=4, stage=2, lanes=4, precision="bf16", offload="host"))
    assert (host.at_rest("device"), host.at_rest("host"), host.at_most("host")) == (2 * P, 6 * P, 8 * P)
    large = estimate(MemorySetup(900 * P, workers=4, stage=1, lanes=4, offload="host"))
    assert large.at_rest("host") == 450 * P * (8 + 4)  # a copy of the parameters too, as there are no masters
    assert large.at_most("host") - large.at_rest("host") == 48 << 20
    file = estimate(MemorySetup(100 * P, workers=4, stage=2, lanes=4, precision="bf16", offload="file"))
    assert (file.at_rest("file"), file.at_rest("host"), file.at_rest("device")) == (600 * P, 3 * 12 << 20, 200 * P)
    assert file.built and host.built
    small = estimate(MemorySetup(P, workers=4, stage=1, lanes=4, offload="file"))
    assert (small.at_rest("file"), small.at_rest("host")) == (4 * P, 4 * P)
    parameters = estimate(MemorySetup(P, workers=4, stage=3, lanes=4, offload_parameters=True))
    assert (parameters.at_rest("device"), parameters.at_rest("host")) == (4 * P, 2 * P) and not parameters.built
    both = estimate(MemorySetup(P, workers=4, stage=3, lanes=4, offload="host", offload_parameters=True))
    assert (both.at_rest("device"), both.at_rest("host")) == (0, 6 * P) and both.built


@pytest.mark.parametrize(("stage", "moves"), [(0, 6), (1, 2), (2, 3), (3, 4)])
def test_mirrors_on_the_host_leave_on_the_device_what_there_is_without_mirrors_and_some_pieces(
    stage: int, moves: int
) -> None:
    """Of 100 million parameters and 4 workers; in stage 0 all that three of them own is mirrored by the fourth."""
    setup = MemorySetup(100 * P, workers=4, stage=stage, lanes=4, mirrors_on_host=True)
    on_host, beside = estimate(setup), estimate(replace(setup, mirrors_on_host=False))
    assert on_host.at_rest("host") == (moves - (stage > 1)) * 100 * P
    assert on_host.at_rest("device") + on_host.at_rest("host") == beside.at_rest("device")
    pieces = [item.bytes for item in on_host.items if item.name == "pieces of mirrors"]
    assert pieces == [(8, 8, 12, 16)[stage] * 3 << 18]
    without = estimate(replace(setup, mirrors=0, mirrors_on_host=False))
    assert stage == 0 or on_host.at_most("device") == without.at_most("device") + pieces[0]


@pytest.mark.parametrize(
    ("lanes", "workers", "waiting"),
    [(4, 4, 0), (8, 4, 1), (8, 3, 2), (16, 4, 2), (64, 8, 3), (64, 7, 6), (1024, 64, 4), (1024, 100, 6)],
)
def test_between_rounds_of_consecutive_lanes_few_sums_wait(lanes: int, workers: int, waiting: int) -> None:
    assert waiting_subtrees(lanes, workers) == waiting
    stack: list[tuple[tuple[int, int], None]] = []
    sizes = [0]
    for lane in range(lanes):
        push(stack, lane, None, lanes, lambda kept, _: kept)
        if (lane + 1) % workers == 0 and lane + 1 < lanes:
            sizes.append(len(stack))
    assert max(sizes) == waiting


@pytest.mark.parametrize("lanes", range(1, 18))
def test_the_gradient_copies_are_those_that_a_worker_takes(lanes: int) -> None:
    model = nn.Linear(2, 2)
    layout, _ = lay_out_model(trainable(model, torch.optim.SGD(model.parameters())))
    sums = LaneSums(layout, 32)
    sums.reserve(range(lanes))
    assert sums.copies == stack_copies(lanes)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"amsgrad": True}), ("NAdam", {}), ("RAdam", {}),
    ("Adamax", {}), ("Adagrad", {}), ("Adadelta", {}), ("Rprop", {}), ("ASGD", {}), ("RMSprop", {}),
    ("Lion", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
def test_what_an_optimizer_keeps_of_a_parameter_is_known(name: str, arguments: dict[str, Any]) -> None:
    model = nn.Linear(64, 64)
    [kind] = [one for one in ELEMENTWISE if one.__name__ == name]
    optimizer = kind(model.parameters(), lr=0.1, **arguments)
    layout, _ = lay_out_model(trainable(model, optimizer))
    assert state_bytes_of(name, arguments) == probe_state_bytes(layout, optimizer) // layout.block_elements
    assert state_bytes_of(name, optimizer.defaults) == state_bytes_of(name, arguments)


def test_an_unknown_optimizer_has_no_known_state() -> None:
    assert state_bytes_of("LBFGS", {}) is None


def test_the_sizes_are_those_of_the_exchange_and_of_offload() -> None:
    assert memory_estimate.BUCKET_BYTES == BUCKET_BYTES
    for name in ("HOST_PIECE_BYTES", "MESSAGE_BYTES", "JOINED_TO_LARGEST"):
        assert getattr(memory_estimate, name) == getattr(pieces, name)
    assert memory_estimate.OFFLOAD_PIECE == state_pieces.PIECE_ELEMENTS
    assert memory_estimate.OFFLOAD_BUFFERS == transfers.BUFFERS


@pytest.mark.parametrize("workers", [2, 4, 70])
def test_the_exchange_of_whole_gradients_posts_what_was_estimated_and_no_more(workers: int) -> None:
    """On one host, where pieces are largest."""
    layout = lay_out([Trainable(f"p{n}", (512, 4_096), torch.float32, 0, n) for n in range(64)])
    terms = Terms(lanes=workers, blocks=layout.blocks, mirrors=0, mirror_partners=4, fill_blocks_per_step=7)
    traffic = Traffic(World(terms, "".join(chr(ord("a") + rank) for rank in range(workers))).plan, 0, layout)
    posted = (sum(one.bytes for one in traffic.pieces[at:stop]) for at, stop in enumerate(traffic.windows))
    items = estimate(MemorySetup(P, workers, 1, workers)).items
    [estimated] = [item.bytes for item in items if item.name == "exchange buffers"]
    assert 0.9 * estimated <= max(posted) <= estimated


def test_every_item_is_in_a_column_of_the_table() -> None:
    setups = [
        MemorySetup(P, 4, s, 16, precision="bf16", offload="file", unit=9, frozen=7, average=True) for s in STAGES
    ]
    setups.append(MemorySetup(P, 4, 3, 16, mirrors_on_host=True))
    named = {item.name for setup in setups for item in estimate(setup).items}
    assert named == {name for names in COLUMNS.values() for name in names}


def test_frozen_parameters_are_whole_below_stage_3_and_shared_there() -> None:
    for stage, bytes_of_a_worker in ((0, 4 * 1000), (2, 4 * 1000), (3, 4 * 1000 * 2 / 4)):
        items = {item.name: item.bytes for item in estimate(MemorySetup(P, 4, stage, 4, mirrors=1, frozen=1000)).items}
        assert items["frozen parameters"] == bytes_of_a_worker


# ---- against what workers hold


class Wide(nn.Module):
    """Half a million parameters, whose padding is small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


WIDE = sum(one.numel() for one in Wide().parameters())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def living_tensors() -> dict[int, Tensor]:
    """One for each storage, by its address. While a caller keeps them no other tensor lies at these addresses."""
    gc.collect()
    return {
        seen.untyped_storage().data_ptr(): seen
        for seen in gc.get_objects()
        if type(seen) in (Tensor, nn.Parameter) and seen.layout is torch.strided  # not what compilers leave
    }


def bytes_made_since(before: Mapping[int, Tensor]) -> int:
    """Of all storages that a tensor uses which lived not yet; of a mapping the pages of this process's own."""
    total = 0
    for place, tensor in living_tensors().items():
        storage = tensor.untyped_storage()
        is_mapped = not storage.resizable() and storage.nbytes() >= mmap.PAGESIZE
        if place not in before:
            total += own_page_bytes(storage) if is_mapped else storage.nbytes()
    return total


def own_page_bytes(storage: torch.UntypedStorage) -> int:
    """Addresses that no memory was found for, and those of files, are left out."""
    first, last = storage.data_ptr() // mmap.PAGESIZE, (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE
    with shared_weights.PAGES.open("rb", buffering=0) as file:
        file.seek(first * shared_weights.PAGE.size)
        pages = torch.frombuffer(bytearray(file.read((last - first) * shared_weights.PAGE.size)), dtype=torch.int64)
    mine = ((pages & shared_weights.IN_MEMORY) != 0) & ((pages & shared_weights.SHARED) == 0)
    return int(mine.sum()) * mmap.PAGESIZE


def seen_bytes(worker: Worker) -> int:
    """Memory of parameters where other workers see them."""
    shared = worker.engine.context.state.memory.shared
    return shared.taken_bytes if shared is not None else 0


def memory_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the logs of workers say that they hold."""
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [line for line in lines if line["event"] == "memory"]


@pytest.mark.parametrize("lanes", shortened([4, 8], 4))
@pytest.mark.parametrize(("stage", "mirrors"), shortened([(0, 1), (1, 1), (2, 0), (2, 1)], (2, 0)))
def test_workers_hold_what_is_estimated_and_their_logs_say_so(
    stage: int, mirrors: int, lanes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 2, "lanes": lanes, "stage": stage, "mirrors": mirrors}
    task = Task(options, model=Wide, optimizer=adamw)
    expected = estimate(MemorySetup(WIDE, 4, stage, lanes, mirrors)).at_rest("device")
    before = living_tensors()
    with Crew("abcd", task) as crew:
        crew.finish()
        held = bytes_made_since(before) / 4
    assert 1 <= held / expected <= TOLERANCE
    logged = memory_lines(capsys)
    assert [line["estimated_bytes"] for line in logged] == [expected] * 4
    assert all(0.9 < line["measured_bytes"] / expected < TOLERANCE for line in logged)


@pytest.mark.parametrize("stage", shortened([1, 2], 2))
def test_with_state_in_files_workers_hold_what_is_estimated(
    stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task({"max_steps": 2, "lanes": 4, "stage": stage, "mirrors": 1, "offload": tmp_path}, model=Wide)
    expected = estimate(MemorySetup(WIDE, 4, stage, 4, 1, offload="file"))
    before = living_tensors()
    with Crew("abcd", task) as crew:
        crew.finish()
        held = bytes_made_since(before) / 4
    assert 1 <= held / expected.at_rest("device") <= TOLERANCE  # buffers are no tensors, and files no memory
    logged = memory_lines(capsys)
    assert [line["estimated_file_bytes"] for line in logged] == [expected.at_rest("file")] * 4
    assert all(1 <= line["state_files"] / expected.at_rest("file") < TOLERANCE for line in logged)
    most = expected.at_rest("device") + expected.at_rest("host")
    assert all(line["measured_bytes"] < TOLERANCE * most and line["estimated_bytes"] == most for line in logged)


HALVES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},  # so small that no step is skipped
}
IN_MEMORY = [
    (3, "bf16", "none"), (2, "fp16", "none"), (1, "fp32", "host"), (2, "bf16", "host"), (3, "bf16", "host"),
    (3, "fp32", "parameters"), (3, "bf16", "parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "precision"), shortened([(1, "bf16"), (2, "fp32"), (3, "fp32")], (3, "fp32")))
def test_with_mirrors_on_the_host_workers_hold_what_is_estimated(
    stage: int, precision: Precision, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 2, "lanes": 4, "stage": stage, "precision": HALVES[precision]}
    task = Task({**options, "shoal": {"mirrors_on": "host"}}, model=Wide, optimizer=adamw, device=LateDevice)
    setup = MemorySetup(WIDE, 4, stage, 4, 1, precision, mirrors_on_host=True)
    with Crew("abcd", task) as crew:
        crew.finish()
    expected = estimate(setup).at_rest("device") + estimate(setup).at_rest("host")
    logged = memory_lines(capsys)
    assert [line["estimated_bytes"] for line in logged] == [expected] * 4
    assert all(0.9 < line["measured_bytes"] / expected < TOLERANCE for line in logged)


@pytest.mark.parametrize(("stage", "precision", "offload"), shortened(IN_MEMORY, IN_MEMORY[-1]))
def test_half_precision_and_host_memory_take_what_is_estimated(
    stage: int, precision: Precision, offload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    to_host = {} if offload == "none" else {"offload": "cpu", "offload_param": offload == "parameters"}
    options = {"max_steps": 2, "lanes": 4, "stage": stage, "precision": HALVES[precision], **to_host}
    task = Task(options, model=Wide, optimizer=adamw, device=LateDevice if to_host else lambda: HOST)
    there: Offload = "host" if to_host else "none"
    setup = MemorySetup(WIDE, 4, stage, 4, 1, precision, offload=there, offload_parameters=offload == "parameters")
    expected = estimate(setup).at_rest("device") + estimate(setup).at_rest("host")
    before = living_tensors()
    with Crew("abcd", task) as crew:
        crew.finish()
        for worker in crew.workers.values():
            worker.engine.context.state.device.settle()
        held = (bytes_made_since(before) + sum(map(seen_bytes, crew.workers.values()))) / 4
    assert 1 <= held / expected <= TOLERANCE
    logged = memory_lines(capsys)
    assert [line["estimated_bytes"] for line in logged] == [expected] * 4
    assert all(0.95 < line["measured_bytes"] / expected < TOLERANCE for line in logged)


@pytest.mark.parametrize("stage", shortened([2, 3], 2))
def test_between_two_micro_batches_workers_hold_the_whole_gradient_that_is_estimated(stage: int) -> None:
    options = {"max_steps": 2, "lanes": 4, "micro_batches_per_lane": 2, "stage": stage}
    expected = estimate(MemorySetup(WIDE, 4, stage, 4, 1, micro_batches=2))
    expected_then = expected.at_rest("device") + 4 * WIDE
    held: list[int] = []

    def look(engine: Engine) -> None:
        """Between two micro-batches of the second step."""
        if engine.global_step == 1 and engine.context.loop.place[1] == 1:
            held.append(sum(held_bytes(engine.context.state).values()))

    with Crew("abcd", Task(options, model=Wide, optimizer=adamw, in_loop=look)) as crew:
        crew.finish()
    assert [item.bytes for item in expected.items if (item.name, item.in_step) == ("gradients", True)] == [4 * WIDE]
    assert [1 <= one / expected_then <= TOLERANCE for one in held] == [True] * 4
