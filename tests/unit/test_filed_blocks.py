"""Every home of state against that beside the parameters; and the file, its pages and its buffers by themselves."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fills import fill
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from late_file import LateFile
from matrices import examples
from rule import Edit, holds, rule
from shoal.blocks.flat import Flats, adopt, empty_flats, lay_out_model, trainable
from shoal.blocks.held import HeldBlocks
from shoal.blocks.segments import HeldWeights, Segments
from shoal.blocks.update_place import BesideParameters
from shoal.blocks.values import WholeValues
from shoal.core.layout import Layout
from shoal.offload import transfers
from shoal.offload.state_file import PAGE_BYTES, OffloadFailed, StateFile
from shoal.offload.state_pieces import PieceStore
from shoal.offload.state_place import InFile, StatePlace, held_blocks
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs, every
from torch import Tensor, nn

OPTIMIZERS = [
    torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.Adadelta,
]  # fmt: skip
HOMES: dict[str, Callable[[str], StatePlace]] = {
    "a file": StatePlace,
    "the host of a device": lambda _: StatePlace(None, True, LateDevice()),
    "the host of a device, which has parameters too": lambda _: StatePlace(None, True, LateDevice(), True),
    "a file of a device": lambda folder: StatePlace(folder, device=LateDevice()),
    "a file of a device, whose host has parameters": lambda folder: StatePlace(folder, False, LateDevice(), True),
}
"""All but that beside the parameters."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks, so that there are more of them than buffers."""
    monkeypatch.setattr("shoal.offload.state_pieces.PIECE_ELEMENTS", 2 * 4096)


@pytest.fixture
def folder() -> Iterator[str]:
    """On a disk."""
    with tempfile.TemporaryDirectory() as name:
        yield name


def pair_of(
    file: StateFile,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    half: torch.dtype | None = None,
    sharded: bool = False,
) -> tuple[Layout, HeldBlocks, HeldBlocks, list[WholeValues]]:
    """Two that hold nothing yet, over equal parameters, which come last: those of the file's first."""
    (layout, users, mine, named), (_, _, theirs, _) = (model_of(kind, half) for _ in range(2))
    segments = Segments(layout, users, mine, BesideParameters(layout, users), sharded)
    filed = HeldBlocks(InFile(segments, PieceStore(layout, file)), named)
    return layout, filed, held_blocks(StatePlace(), layout, users, theirs, named, sharded), [mine, theirs]


def model_of(
    kind: type[torch.optim.Optimizer], half: torch.dtype | None
) -> tuple[Layout, torch.optim.Optimizer, WholeValues, dict[str, nn.Parameter]]:
    """What held blocks are made of: always the same values."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200), nn.Linear(200, 3)).to(half)
    users = kind(model.parameters())  # type: ignore[call-arg]
    pairs = trainable(model, users, half=half)
    layout, parameters = lay_out_model(pairs)
    named = {info.name: tensor for info, tensor in pairs}
    return layout, users, WholeValues(layout, adopt(layout, parameters)), named


def gradients(layout: Layout, seed: int) -> Flats:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(flat.shape, generator=random) for flat in empty_flats(layout)]


def by_block(held: HeldBlocks) -> dict[tuple[int, int, str], Tensor]:
    """Every block's state by bucket, position and key."""
    size = held.layout.block_elements
    return {
        (stretch.bucket, stretch.start + index, key): value[index * size : (index + 1) * size] if value.dim() else value
        for stretch, state in held.home.states(held.runs).items()
        for key, value in state.items()
        for index in range(stretch.blocks)
    }


def assert_equal(mine: HeldBlocks, theirs: HeldBlocks) -> None:
    assert mine.runs == theirs.runs
    left, right = by_block(mine), by_block(theirs)
    if mine.keeps_weights:
        for stretch in mine.layout.stretches(mine.runs):
            assert torch.equal(*(HeldWeights(held.segments).of(stretch) for held in (mine, theirs)))
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def check_pages(held: HeldBlocks) -> None:
    """Every page is free or one piece's, none is lost, and no more are taken than the blocks need."""
    file, used = held.home.store.file, NO_BLOCKS
    for piece in held.home.store.pieces:
        assert not piece.pages & used and len(piece.pages) * PAGE_BYTES == piece.bytes
        used |= piece.pages
    assert not used & file._free and used | file._free == every(file._pages)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_elementwise_optimizer_has_the_same_state_in_a_file(
    kind: type[torch.optim.Optimizer], folder: str
) -> None:
    layout, filed, kept, weights = pair_of(StateFile(folder), kind)
    for step in range(3):
        for held in (filed, kept):
            if not step:
                held.hold(every(layout.blocks))
            held.apply(WholeValues(layout, gradients(layout, step)), 0.5)
        assert_equal(filed, kept)
    assert filed.state_bytes_of_a_block() == kept.state_bytes_of_a_block()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*(w.flats for w in weights), strict=True))


@rule(
    "Every piece has the numbers that its blocks share for itself: an update adds to them in place, once for "
    "each piece",
    "A step",
    broken_by=[
        Edit(
            "shoal.offload.state_pieces",
            "{key: value.clone() for key, value in state.items() if not value.dim()}",
            "{key: value for key, value in state.items() if not value.dim()}",
        ),
        Edit("shoal.offload.state_pieces", "piece.part(stretch).with_own_numbers()", "piece.part(stretch)"),
    ],
)
@given(st.data(), st.sampled_from(sorted(HOMES)), st.booleans(), st.sampled_from([None, torch.bfloat16]))
@settings(max_examples=examples(40), deadline=None)
def test_whatever_is_held_filled_and_dropped_every_home_has_what_memory_has(
    data: st.DataObject, name: str, sharded: bool, half: torch.dtype | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = HOMES[name](folder)
        sharded = sharded or place.parameters_on_host
        layout, users, _, named = model_of(torch.optim.AdamW, half)
        weights = [model_of(torch.optim.AdamW, half)[2] for _ in range(3)]
        source, mine = (held_blocks(place, layout, users, values, named, sharded) for values in weights[:2])
        kept, sets = held_blocks(StatePlace(), layout, users, weights[2], named, sharded), sets_of(layout)
        first = data.draw(sets)
        for held, values, runs in zip((source, mine, kept), weights, (every(layout.blocks), first, first), strict=True):
            held.hold(runs, Wide(values) if half else None)
        for step in range(data.draw(st.integers(1, 4))):
            for held in (source, mine, kept):
                held.apply(WholeValues(layout, gradients(layout, step)), 1.0)
            place.device.settle()
            stays, comes = data.draw(sets), data.draw(sets)
            for held in (mine, kept):
                held.keep_only(held.runs & stays)
                fill(source, held, comes, expected=comes)
                held.join()
            if place.folder:
                check_pages(mine)
            assert_equal(mine, kept)
            assert all(torch.equal(*pair) for pair in zip(weights[1].flats, weights[2].flats, strict=True))


def sets_of(layout: Layout) -> st.SearchStrategy[Runs]:
    return st.sets(st.integers(0, layout.blocks - 1)).map(Runs.of)


def test_what_is_held_already_is_replaced_by_a_fill(folder: str) -> None:
    """A plan may fill again what the one before had filled."""
    layout, filed, kept, _ = pair_of(StateFile(folder))
    first = every(layout.blocks).first(5)
    for held in (filed, kept):
        held.hold(every(layout.blocks))
        held.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
    older = {where: {k: v.clone() for k, v in state.items()} for where, state in kept.home.states(first).items()}
    for held in (filed, kept):
        held.apply(WholeValues(layout, gradients(layout, 1)), 1.0)
        held.take({where: {k: v.clone() for k, v in state.items()} for where, state in older.items()})
    assert_equal(filed, kept)
    check_pages(filed)


def test_what_fills_bring_grows_together_and_moves_nothing(folder: str) -> None:
    layout, filed, _, _ = pair_of(StateFile(folder))
    _, source, _, _ = pair_of(StateFile(folder))
    source.hold(every(layout.blocks))
    source.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
    for block in reversed(range(layout.blocks)):
        fill(source, filed, Runs.of([block]), expected=Runs.of([block]))
    assert [piece.stretch for piece in filed.home.store.pieces] == [piece.stretch for piece in source.home.store.pieces]
    assert_equal(filed, source)


@holds("A buffer of optimizer state is")
@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_nothing_is_read_or_used_before_it_is_there_and_nothing_changes_while_it_is_written(
    half: torch.dtype | None, folder: str
) -> None:
    late = LateFile(folder)
    layout, filed, kept, weights = pair_of(late, half=half)
    for held, own in zip((filed, kept), weights, strict=True):
        held.hold(every(layout.blocks), Wide(own))
        for step in range(3):
            held.apply(WholeValues(layout, gradients(layout, step)), 1.0)
    assert len(filed.home.store.pieces) > 2 * transfers.BUFFERS
    assert_equal(filed, kept)
    assert late.changed == 0


class Wide:
    """First values of master weights."""

    def __init__(self, weights: WholeValues) -> None:
        self._weights = weights

    def of(self, stretch: Any) -> Tensor:
        return self._weights.of(stretch).float()


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_any_number_of_buffers_carries_the_same(buffers: int, folder: str) -> None:
    layout, filed, kept, _ = pair_of(StateFile(folder))
    filed.home.store = PieceStore(layout, filed.home.store.file, buffers)
    for held in (filed, kept):
        held.hold(every(layout.blocks))
        for step in range(2):
            held.apply(WholeValues(layout, gradients(layout, step)), 1.0)
    assert_equal(filed, kept)


@holds("A buffer of optimizer state is")
def test_a_pass_that_is_given_up_harms_no_later_one(folder: str) -> None:
    layout, filed, kept, _ = pair_of(LateFile(folder))
    for held in (filed, kept):
        held.hold(every(layout.blocks))
        held.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
    abandoned = filed.home.stream(filed.runs)
    next(abandoned)
    for held in (filed, kept):
        held.apply(WholeValues(layout, gradients(layout, 1)), 1.0)
    abandoned.close()
    assert_equal(filed, kept)


@holds("Every piece has the numbers")
def test_pieces_of_one_stretch_count_their_steps_each_for_itself(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.offload.state_pieces.PIECE_ELEMENTS", 4 * 4096)
    layout, filed, kept, _ = pair_of(StateFile(folder))
    for held in (filed, kept):
        held.hold(every(layout.blocks))
        held.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
    wholes = {
        stretch: {key: value.clone() for key, value in state.items()}
        for stretch, state in kept.home.states(every(layout.blocks)).items()
    }
    assert len(filed.home.store.pieces) > len(wholes)
    odd = Runs.of(number for numbers in layout.numbers for number in numbers[1::2])
    for held in (filed, kept):
        held.take(wholes)
        held.apply(WholeValues(layout, gradients(layout, 1)), 1.0)
        held.keep_only(odd)
        held.apply(WholeValues(layout, gradients(layout, 2)), 1.0)
    assert_equal(filed, kept)


def test_nothing_of_a_piece_stays_with_the_optimizer_after_its_update(folder: str) -> None:
    """A job makes millions of updates."""
    layout, filed, _, _ = pair_of(StateFile(folder))
    filed.hold(every(layout.blocks))
    for step in range(2):
        filed.apply(WholeValues(layout, gradients(layout, step)), 1.0)
    assert not filed.segments.twin.state


def test_state_that_an_optimizer_begins_to_keep_later_gets_its_place(folder: str) -> None:
    layout, filed, kept, _ = pair_of(StateFile(folder), torch.optim.SGD)
    for held in (filed, kept):
        held.hold(every(layout.blocks))
        held.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
    assert filed.home.state_bytes() == 0
    for held in (filed, kept):
        held.segments.user.param_groups[0]["momentum"] = 0.9
        for step in (1, 2):
            held.apply(WholeValues(layout, gradients(layout, step)), 1.0)
    assert_equal(filed, kept)
    check_pages(filed)


# ---- the file


@rule(
    "The space for all that a worker holds, or is to be filled with, is reserved before it is updated or "
    "received, state that the optimizer makes later included: a full disk is named before step 1",
    "A step",
    broken_by=[
        Edit(
            "shoal.offload.state_place",
            "        segments.join_neighbours()\n        self._reserve()\n",
            "        segments.join_neighbours()\n",
        ),
        Edit(
            "shoal.offload.state_place",
            "sum(value.dtype.itemsize for value in state.values() if value.dim())",
            "0 * len(state)",
        ),
    ],
)
def test_space_is_reserved_before_the_first_update_and_for_what_is_to_be_filled(folder: str) -> None:
    layout, filed, _, _ = pair_of(StateFile(folder))
    first = every(layout.blocks).first(6)
    filed.hold(first)
    block = 2 * 4 * layout.block_elements
    assert filed.home.store.file.reserved_bytes == len(first) * block
    assert os.fstat(filed.home.store.file._fd).st_blocks * 512 >= len(first) * block
    filed.expect(every(layout.blocks) - first)
    reserved = filed.home.store.file.reserved_bytes
    assert reserved == layout.blocks * block
    for step in range(2):
        filed.apply(WholeValues(layout, gradients(layout, step)), 1.0)
    assert filed.home.store.file.reserved_bytes == reserved


@holds("The space for all that")
@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "a folder that is gone by now"])
@pytest.mark.parametrize(
    ("number", "found", "remedy"),
    [
        (errno.ENOSPC, r"has [\d,]+ bytes left", "make room"),
        (errno.EDQUOT, "has a quota that is used up", "have it raised"),
        (errno.EFBIG, "takes no file of that size from this process", r"raise its limit \(`ulimit -f`\)"),
    ],
)
def test_a_full_disk_is_named_before_the_first_update(
    number: int, found: str, remedy: str, is_gone: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, filed, _, _ = pair_of(StateFile(folder))

    def full(fd: int, at: int, count: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    if is_gone:
        Path(folder).rmdir()
    needed = "and the optimizer state that this worker is to keep there needs [\\d,]+ more"
    sentence = f"{folder} {found}, {needed}; {remedy}, name"
    with pytest.raises(OffloadFailed, match=sentence):
        filed.hold(every(layout.blocks))
    Path(folder).mkdir(exist_ok=True)


def test_memory_that_poses_as_a_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        layout, filed, kept, _ = pair_of(StateFile(folder))
        for held in (filed, kept):
            held.hold(every(layout.blocks))
            held.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
        assert_equal(filed, kept)
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["event"], line["filesystem"]) == ("offload_to_memory", "tmpfs")
    assert line["means"] == f"{folder} is no disk: its files take memory, and offload saves none"


def test_where_direct_transfers_are_refused_buffered_ones_do_and_say_why(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.offload.state_file.folder_type", lambda _: "ext4")
    layout, filed, kept, _ = pair_of(StateFile(folder, direct=False))
    for held in (filed, kept):
        held.hold(every(layout.blocks))
        held.apply(WholeValues(layout, gradients(layout, 0)), 1.0)
    assert_equal(filed, kept)
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["event"], line["reason"]) == ("offload_buffered", "it was asked for")


def test_a_slow_disk_is_named_once_with_its_speed(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.offload.state_place.TELLING_BYTES", 1)
    monkeypatch.setattr("shoal.offload.state_place.SLOW_BYTES_PER_SECOND", 1e15)
    layout, filed, _, _ = pair_of(StateFile(folder))
    filed.hold(every(layout.blocks))
    for step in range(3):
        filed.apply(WholeValues(layout, gradients(layout, step)), 1.0)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [line] = [line for line in lines if line["event"] == "offload_is_slow"]
    assert filed.home.bytes_per_second > 0 and line["bytes_per_second"] > 0
    assert "waits" in line["means"] and "MB/s; expected" in line["means"]


def test_a_disk_that_does_not_answer_is_given_up(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SECONDS", 0.0)
    layout, filed, _, _ = pair_of(LateFile(folder))
    with pytest.raises(OffloadFailed, match=f"the disk of {folder} has not answered for 0 s"):
        filed.hold(every(layout.blocks))
        for step in range(2):
            filed.apply(WholeValues(layout, gradients(layout, step)), 1.0)


def test_a_process_that_can_start_no_thread_says_what_for(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of memory or of threads."""
    layout, filed, _, _ = pair_of(StateFile(folder))

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    filed.hold(every(layout.blocks))
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(OffloadFailed, match=f"carries optimizer state to {folder} and back: can't start new thread"):
        for step in range(2):
            filed.apply(WholeValues(layout, gradients(layout, step)), 1.0)


def test_an_optimizer_whose_step_must_be_one_is_refused(folder: str) -> None:
    class Counting(torch.optim.SGD):
        """A class of the user's own."""

    model = nn.Linear(2, 2)
    users = Counting(model.parameters(), lr=0.1)
    layout, parameters = lay_out_model(trainable(model, users))
    with pytest.raises(UserError, match="updated piece by piece, and Counting may count its steps"):
        held_blocks(StatePlace(folder), layout, users, WholeValues(layout, adopt(layout, parameters)), {})
