"""`shoal reshape`: checkpoints of cells of one shape as ones of another, and the jobs that go on from them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated_bytes import most_bytes
from checkpoints import fresh, save, trained
from context_parallel import BOTH, CONTEXT, Divided
from kept_values import EightBit
from pipeline_parallel import PIPELINE, SQUARE, Fixed, in_stages, loss_of, stages_of
from reshaped_jobs import found_in, reshaped, there_and_back
from rule import Edit, rule
from shoal.blocks.flat import lay_out_model, trainable
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.stages import built_stages
from shoal.checkpoint import snapshot
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.catalogue import at
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.other_shape import in_shape
from shoal.checkpoint.reshaping import reshape
from shoal.checkpoint.restore import load_blocks, load_small_state
from shoal.checkpoint.storage import LocalStorage
from shoal.core.cell_part import CellPart
from shoal.core.layout import Layout
from shoal_protos.shape import ONE, Shape
from tensor_parallel import TWO, CellTask, Parallel, crew_of
from tiers import check
from torch import Tensor, nn

STEP = 2
FOUR = Shape(tensor=4)
WORKERS = {ONE: "a", TWO: "ab", FOUR: "abcd"}


def task_of(shape: Shape, max_steps: int = 6, losses: list[float] | None = None, **checkpoint: Any) -> CellTask:
    """`losses`: is given those of the steps that the process at coordinate 0 makes."""

    def body(engine: Any, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and losses is not None and engine.context.state.layout.part.coordinate == 0:
            losses.append(engine.loss)

    return CellTask({"max_steps": max_steps, "shoal": {"checkpoint": checkpoint}}, shape=shape, body=body)


@rule(
    "A checkpoint that is reshaped has all values of the old one in their places, and back it is the old one",
    "Cells",
    broken_by=[
        Edit("shoal.core.manifest_parts", "registered=(one.order, one.unit)", "registered=(0, one.unit)"),
        Edit("shoal.core.cuts", "low - first, high - low", "0, high - low"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [(ONE, TWO), (TWO, ONE), (TWO, FOUR)], ids=str)
def test_a_job_goes_on_in_another_shape_and_back_in_the_first_one(before: Shape, after: Shape, tmp_path: Path) -> None:
    old, new, back = tmp_path / "old", tmp_path / "new", tmp_path / "back"
    whole, rest = list[float](), list[float]()
    with crew_of(WORKERS[before], task_of(before, STEP, path=str(old), every_steps=STEP)) as crew:
        fingerprint = crew.finish()
    made = reshaped(old, new, after)
    assert made != fingerprint
    assert reshaped(new, back, before) == fingerprint
    with crew_of(WORKERS[after], task_of(after, losses=rest, path=str(new))) as crew:
        crew.finish()
        assert crew.job.durable.history[0].from_step == STEP
    with crew_of(WORKERS[before], task_of(before, losses=whole)) as crew:
        undisturbed = crew.finish()
    assert rest == pytest.approx(whole[STEP:], abs=1e-5)
    with crew_of(WORKERS[before], task_of(before, path=str(back))) as crew:
        assert crew.finish() == undisturbed


@pytest.mark.parametrize(
    ("shape", "after"),
    [
        (BOTH, TWO),
        (BOTH, CONTEXT),
        pytest.param(BOTH, Shape(context=4), marks=check("as to two places")),
        (SQUARE, PIPELINE),
        pytest.param(SQUARE, Shape(tensor=4, pipeline=2), marks=check("as to one place")),
        (SQUARE, Shape(tensor=4)),
    ],
    ids=str,
)
def test_other_dimensions_stay_or_change_too(shape: Shape, after: Shape, tmp_path: Path) -> None:
    task = CellTask({"max_steps": 1}, shape=shape, model=Divided)
    there_and_back(in_stages(task) if shape.pipeline > 1 else task, after, tmp_path)


def in_turn(engine: Any, batch: Any) -> None:
    """All stages in one process."""
    hidden = batch["tokens"]
    for stage in engine.module.values():
        hidden = stage(hidden)
    engine.backward(loss_of(hidden, batch["targets"]))
    engine.step()


def staged(shape: Shape, turns: int, **checkpoint: Any) -> CellTask:
    """The same stages at the places of a pipeline, or in one process; nothing in them draws random numbers."""
    shoal = {"checkpoint": checkpoint}
    task = in_stages(CellTask({"max_steps": 4, "shoal": shoal}, shape=shape, data=lambda: Fixed(40)))
    model = partial(stages_of, turns=turns, dropout=0.0)
    return replace(task, model=model, **({} if shape.pipeline > 1 else {"body": in_turn}))


@pytest.mark.parametrize(
    ("before", "after"),
    [(PIPELINE, ONE), (ONE, PIPELINE), pytest.param(SQUARE, PIPELINE, marks=check("a third pair"))],
    ids=str,
)
def test_stages_of_a_model_come_to_other_places(before: Shape, after: Shape, tmp_path: Path) -> None:
    saving = staged(before, 2 // before.pipeline, path=str(tmp_path / "old"), every_steps=STEP, keep=9)
    with crew_of("abcd"[: before.processes], saving) as crew:
        whole = crew.finish()
    old = next((tmp_path / "old").glob(f"step-{STEP:012d}-*"))
    fingerprint = verify(at(str(old), print).reader()).fingerprint
    reshaped(old, tmp_path / "new", after)
    with crew_of("abcd"[: after.processes], staged(after, 2 // after.pipeline, path=str(tmp_path / "new"))) as crew:
        crew.finish()
        assert crew.job.durable.history[0].from_step == STEP
        loss = crew.workers["a"].engine.loss
    assert reshaped(next((tmp_path / "new").glob(f"step-{STEP:012d}-*")), tmp_path / "back", before) == fingerprint
    with crew_of("abcd"[: before.processes], staged(before, 2 // before.pipeline, path=str(tmp_path / "back"))) as crew:
        assert crew.finish() == whole
        assert loss == pytest.approx(crew.workers["a"].engine.loss, abs=1e-5)


KINDS_OF_STAGES = (
    lambda: nn.Linear(3, 3),
    lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
    lambda: nn.ModuleDict({"list": nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), "norm": nn.LayerNorm(3)}),
)


def laid_out(kinds: Sequence[Callable[[], nn.Module]], places: int) -> Layout:
    """Of a model of four stages."""
    every = built_stages(lambda number: kinds[number](), 4, 0, places).places
    pairs = [trainable(place, torch.optim.SGD(place.parameters())) for place in every]
    stages = [[one for one, _ in of_place] for of_place in pairs]
    part = CellPart(places, stages=places, numbered=4)
    return lay_out_model(pairs[0], part=part, stages=stages if places > 1 else ())[0]


def test_the_units_of_stages_are_those_that_a_job_of_that_shape_finds() -> None:
    for kinds in product(KINDS_OF_STAGES, repeat=4):
        for before, after in permutations((1, 2, 4), 2):
            found = in_shape(laid_out(kinds, before), Shape(pipeline=after), "")
            assert found.text() == laid_out(kinds, after).text()


@pytest.mark.parametrize(
    "options",
    [{"precision": {"bf16": {"enabled": True}}}, {"shoal": {"average": {"decay": 0.9}}}],
    ids=["half precision", "averages"],
)
def test_masters_and_averages_go_along(options: dict[str, Any], tmp_path: Path) -> None:
    there_and_back(CellTask({"max_steps": 2, **options}), FOUR, tmp_path)


def test_what_parameters_have_missed_goes_along(tmp_path: Path) -> None:
    there_and_back(CellTask({"max_steps": 4}, model=Seldom), ONE, tmp_path)
    assert found_in(tmp_path / "new").manifest.missed


def test_frozen_parameters_buffers_and_ties_go_along(tmp_path: Path) -> None:
    state, old = trained(3), LocalStorage(tmp_path / "old")
    save(state, old)
    old_found = found_in(tmp_path / "old")
    reshaped(tmp_path / "old", tmp_path / "new", CONTEXT)
    fingerprint = reshaped(tmp_path / "new", tmp_path / "back", ONE)
    assert fingerprint == verify(old_found.reader()).fingerprint
    back = fresh(seed=1)
    load_small_state(found_in(tmp_path / "back").reader(), back, {})
    load_blocks(found_in(tmp_path / "back").reader(), back, back.everything)
    for name, value in state.module.state_dict().items():
        assert torch.equal(back.module.state_dict()[name], value), name


class Seldom(Parallel):
    """With a part that is used in the last of four steps alone."""

    def __init__(self, hub: CellHub, *more: Any) -> None:
        super().__init__(hub, *more)
        self.seldom, self.forwards = sharded(nn.Parameter(torch.randn(16 // hub.shape.tensor))), 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.forwards += 1
        loss = super().forward(tokens, targets)
        return loss + self.seldom.square().mean() if self.forwards > 12 else loss


class Wide(Parallel):
    """With tensors that are cut along either dimension, each of so many bytes in the whole."""

    BYTES = 4 * 256 * 2048

    def __init__(self, hub: CellHub, *more: Any) -> None:
        super().__init__(hub, *more)
        size = hub.shape.tensor
        self.tall = sharded(nn.Parameter(torch.randn(256 // size, 2048)))
        self.wide = sharded(nn.Parameter(torch.randn(256, 2048 // size)), dim=1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets) + 0.1 * self.tall.square().mean() + self.wide.square().mean()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a job of cells of two has saved."""
    place = tmp_path_factory.mktemp("two")
    with crew_of("ab", task_of(TWO, STEP, path=str(place), every_steps=STEP)) as crew:
        crew.finish()
    return place


def test_no_more_of_a_checkpoint_is_in_memory_than_of_its_largest_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes in parts, which are small beside such a tensor."""
    monkeypatch.setattr(snapshot, "PART_BYTES", 1 << 20)
    for constant in ("snapshot.READ_BYTES", "reshaping.READ_BYTES", "fingerprint.VERIFIED_BYTES"):
        monkeypatch.setattr(f"shoal.checkpoint.{constant}", 1 << 17)
    with crew_of("ab", replace(task_of(TWO, 1, path=str(tmp_path / "old"), every_steps=1), model=Wide)) as crew:
        crew.finish()
    found = found_in(tmp_path / "old")
    assert most_bytes(lambda: reshape(found, LocalStorage(tmp_path / "new"), FOUR)) < Wide.BYTES
    assert most_bytes(lambda: reshape(found, LocalStorage(tmp_path / "one"), ONE)) < Wide.BYTES


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("--tensor 2", "it is of the shape tensor 2 already"),
        ("--tensor 3", r'parameter "up" of shape \(512, 64\) is cut along dimension 0, whose 512 do not divide into 3'),
        ("--tensor 0", "the shape cannot be: its tensor is 0; expected 1 or more"),
        (
            "--pipeline 2",
            "on which of 2 stages .* its model was not made by cell.stages; give --pipeline 1",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(
    sizes: str, words: str, of_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshape", str(of_two), str(tmp_path / "new"), *sizes.split()]) == 2
    assert re.search(f"cannot reshape {of_two}/step-.*: .*{words}", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_neither_read_over_nor_replaced(
    of_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/notes").touch()
    for new in (tmp_path / "new", of_two):
        before = sorted(new.iterdir())
        assert main(["reshape", str(of_two), str(new), "--tensor", "4"]) == 2
        assert "something is there already; name a new folder" in capsys.readouterr().err
        assert sorted(new.iterdir()) == before


def test_a_place_without_a_checkpoint_and_a_damaged_one_are_refused(
    of_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshape", str(tmp_path), str(tmp_path / "new"), "--tensor", "4"]) == 2
    assert f"there is no complete checkpoint in {tmp_path}" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    shutil.copytree(of_two, damaged)
    file = next(damaged.glob("step-*/*-b-*.safetensors"))
    content = file.read_bytes()
    for place in (len(content) // 2, len(content) - 9):  # of a block, and of a number that blocks share
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert main(["reshape", str(damaged), str(tmp_path / "new"), "--tensor", "4"]) == 1
        assert re.search("is damaged: the checksum of .* differs", capsys.readouterr().err)
        assert not list((tmp_path / "new").glob("*"))


def test_state_of_which_elements_share_values_and_unlike_buffers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(trained(1, kind=EightBit), LocalStorage(tmp_path / "packed"))
    with crew_of("ab", replace(task_of(TWO, 1, path=str(tmp_path / "buffers"), every_steps=1), buffers=True)) as crew:
        crew.finish()
    for old, words in (
        ("packed", r'its optimizer keeps "\w+ per \d+" not as one value for each element'),
        ("buffers", r'buffer "inner\.running_mean" differs between the processes of a cell'),
    ):
        assert main(["reshape", str(tmp_path / old), str(tmp_path / "new"), "--context", "2"]) == 2
        assert re.search(words, capsys.readouterr().err)
        assert not (tmp_path / "new").exists()
