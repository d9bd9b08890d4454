"""`shoal reshape --expert`: experts of a checkpoint dealt to other places of a cell."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_parallel import BOTH, EXPERT, EXPERTS, FOUR, OF_CONTEXTS, Counting, Divided, gradient_descent
from pipeline_parallel import OF_EXPERTS, PIPELINE, in_stages, without_buffers
from reshaped_jobs import found_in, reshaped, there_and_back
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.cells.hub import CellHub
from shoal.cells.marks import marks, sharded
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.export import export
from shoal.core.cuts import Dealt
from shoal.deepspeed.moe.layer import MoE
from shoal_protos.shape import ONE, Shape
from tensor_parallel import TWO, CellTask, crew_of
from tiers import check
from torch import Tensor, nn


class Stacked(nn.Module):
    """One tensor has all experts of a place, whose columns are cut among the places of `tensor`. What it adds up has no
    meaning, and gives every element a gradient.
    """

    def __init__(self, hub: CellHub, _: Callable[[], None], __: bool = False) -> None:
        super().__init__()
        shape, index = hub.shape, hub.shape.index(hub.coordinate)
        self.embedding = nn.Embedding(256, 8)
        whole = torch.randn(3, 8, 64 * 33)
        of_place = whole.chunk(shape.expert, 1)[index["expert"]].chunk(shape.tensor, 2)[index["tensor"]]
        self.experts = sharded(sharded(nn.Parameter(of_place.clone()), dim=1, over="expert"), dim=2)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.embedding(tokens).square().mean() + self.embedding(targets).mean() + self.experts.square().mean()


@rule(
    "Experts that are dealt anew have all values of the old ones in their places, and back they are the old ones",
    "Cells",
    broken_by=[
        Edit("shoal.checkpoint.other_shape", "for number in range(here)", "for number in range(count)"),
        Edit("shoal.core.cuts", "place, number = divmod(", "number, place = divmod("),
        Edit("shoal.checkpoint.other_shape", "here.piece(Division(by_expert=True)), here.experts", "0, here.experts"),
        Edit("shoal.core.layout", "return name if place == self._place(coordinate) else None", "return name"),
    ],
)
@pytest.mark.parametrize(
    ("shape", "after", "model"),
    [
        (EXPERT, FOUR, Divided),
        (BOTH, TWO, Counting),
        (BOTH, Shape(tensor=4), Stacked),
        pytest.param(OF_CONTEXTS, FOUR, Divided, marks=check("as experts alone")),
        pytest.param(EXPERT, BOTH, Stacked, marks=check("as four places of tensor")),
        pytest.param(FOUR, OF_CONTEXTS, Counting, marks=check("as experts alone")),
        pytest.param(BOTH, OF_CONTEXTS, Counting, marks=check("as many experts a place")),
        pytest.param(OF_EXPERTS, Shape(expert=4, pipeline=2), None, marks=check("with stages")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_shape_of_other_experts_and_back_is_the_same_checkpoint(
    shape: Shape, after: Shape, model: Any, tmp_path: Path
) -> None:
    task = CellTask({"max_steps": 2}, shape=shape)
    task = replace(task, model=model) if model is not None else replace(in_stages(task), model=without_buffers)
    there_and_back(task, after, tmp_path)
    for name in ("old", "new", "back"):
        export(found_in(tmp_path / name).reader(), tmp_path / f"{name}.safetensors", None)
    old, new, back = (load_file(tmp_path / f"{name}.safetensors") for name in ("old", "new", "back"))
    assert old.keys() == new.keys() == back.keys()
    assert all(torch.equal(old[name], new[name]) and torch.equal(old[name], back[name]) for name in old)
    seen = [value for name, value in old.items() if name.endswith(".seen")]
    assert len(seen) == (EXPERTS if model is Counting else 0)
    assert not any(torch.equal(one, other) for one, other in combinations(seen, 2))


def trains(losses: list[float], engine: Any, batch: Any) -> None:
    engine.backward(engine.module(**batch))
    if engine.step() and engine.context.state.layout.part.coordinate == 0:
        losses.append(engine.loss)


@holds("Experts that are dealt anew have all values")
@pytest.mark.parametrize(("before", "after"), [(EXPERT, ONE), pytest.param(ONE, EXPERT, marks=check("the other way"))])
def test_a_job_goes_on_with_its_experts_on_other_places(before: Shape, after: Shape, tmp_path: Path) -> None:
    """The same samples are divided among the places, or among micro-batches of one."""

    def task(shape: Shape, steps: int, losses: list[float], **checkpoint: Any) -> CellTask:
        options = {"max_steps": steps, "gradient_clipping": 0.0, "micro_batches_per_lane": 2 // shape.expert}
        options["shoal"] = {"checkpoint": checkpoint}
        return CellTask(options, shape=shape, model=Counting, body=partial(trains, losses), optimizer=gradient_descent)

    whole, rest = list[float](), list[float]()
    with crew_of("ab"[: before.processes], task(before, 6, whole)) as crew:
        undisturbed = crew.finish()
    with crew_of("ab"[: before.processes], task(before, 2, [], path=str(tmp_path / "old"), every_steps=2)) as crew:
        fingerprint = crew.finish()
    reshaped(tmp_path / "old", tmp_path / "new", after)
    assert reshaped(tmp_path / "new", tmp_path / "back", before) == fingerprint
    with crew_of("ab"[: after.processes], task(after, 6, rest, path=str(tmp_path / "new"))) as crew:
        crew.finish()
        assert crew.job.durable.history[0].from_step == 2
    assert rest == pytest.approx(whole[2:], abs=1e-5)
    with crew_of("ab"[: before.processes], task(before, 6, [], path=str(tmp_path / "back"))) as crew:
        assert crew.finish() == undisturbed


# ---- which expert a parameter is of


def test_a_list_of_experts_alone_numbers_them_and_marks_say_what_else_is_theirs() -> None:
    def layer() -> nn.Module:
        experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
        for one in experts.parameters():
            one.allreduce = False  # type: ignore[attr-defined]
        return nn.ModuleDict({"gate": nn.Linear(2, 3), "experts": experts})

    model = nn.ModuleList(layer() for _ in range(2))
    for shape in (ONE, EXPERT):
        found = marks(model, shape, 0)
        assert found["1.experts.2.0.weight"].dealt == Dealt(level=2, of_place=3)
        assert found["1.gate.weight"].dealt is None
        assert found["1.experts.2.0.weight"].of_expert is (shape == EXPERT)
    alone = nn.Module()
    alone.one, alone.stack = (sharded(nn.Parameter(torch.zeros(4, 2)), over="expert", dim=dim) for dim in (None, -1))  # type: ignore[assignment]
    assert [mark.dealt for mark in marks(alone, EXPERT, 0).values()] == [None, Dealt(dim=1)]


# ---- what is refused


class Unnumbered(Stacked):
    """Nothing says along which dimension its experts lie."""

    def __init__(self, hub: CellHub, *more: Any) -> None:
        super().__init__(hub, *more)
        self.experts = sharded(nn.Parameter(self.experts.detach()), over="expert")


class Apart(Stacked):
    """Each of a list is a unit."""

    def __init__(self, hub: CellHub, *more: Any) -> None:
        super().__init__(hub, *more)
        del self.experts
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))  # type: ignore[assignment]
        for one in self.experts.parameters():
            sharded(one, over="expert")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.embedding(tokens).square().mean() + self.embedding(targets).mean()
        return loss + sum(one.square().mean() for one in self.experts.parameters())


class Unlike(Divided):
    """One of its experts has another shape."""

    def make_experts(self, expert: nn.Module, **options: Any) -> MoE:
        layer = super().make_experts(expert, **options)
        first = layer.deepspeed_moe.experts.deepspeed_experts[0]
        first.more = sharded(nn.Parameter(torch.ones(1)), over="expert")
        return layer


class UnlikeBuffers(Divided):
    """One of its experts has a buffer."""

    def make_experts(self, expert: nn.Module, **options: Any) -> MoE:
        layer = super().make_experts(expert, **options)
        layer.deepspeed_moe.experts.deepspeed_experts[0].register_buffer("more", torch.ones(1))
        return layer


@pytest.mark.parametrize(
    ("model", "shape", "sizes", "words"),
    [
        (
            UnlikeBuffers,
            EXPERT,
            "--expert 4",
            r'buffer "moe\..*\.0\.more" is one of some experts of a list',
        ),
        (Divided, EXPERT, "--expert 3", r"its experts moe\..*\.0 to moe\..*\.3 are 4, which do not divide among 3"),
        (Divided, EXPERT, "--expert 2", "it is of the shape expert 2 already"),
        (
            Stacked,
            EXPERT,
            "--expert 3",
            r'parameter "experts" of shape \(3, 8, 2112\) is of 8 experts, along dimension 1',
        ),
        (
            Unnumbered,
            EXPERT,
            "",
            'each place of the experts has parameter "experts" of its own, and nothing says which',
        ),
        (Apart, EXPERT, "", r"experts experts\.0 to experts\.1 are units of their own, .* \(shoal\.units\)"),
        (Unlike, EXPERT, "", r"experts moe\..*\.0 to moe\..*\.1 have not the same parameters"),
    ],
    ids=str,
)
def test_experts_that_cannot_be_dealt_so_are_refused(
    model: Any, shape: Shape, sizes: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 1, "shoal": {"checkpoint": {"path": str(tmp_path / "old"), "every_steps": 1}}}
    with crew_of("ab"[: shape.processes], CellTask(options, shape=shape, model=model)) as crew:
        crew.finish()
    assert main(["reshape", str(tmp_path / "old"), str(tmp_path / "new"), *sizes.split()]) == 2
    assert re.search(f"cannot reshape .*: .*{words}", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
    if model is Unnumbered:
        assert main(["export", str(tmp_path / "old"), str(tmp_path / "model.safetensors")]) == 2
        assert re.search(f"cannot export .*: {words}", capsys.readouterr().err)


def test_a_job_of_another_shape_is_given_the_command_to_type(tmp_path: Path) -> None:
    options = {"max_steps": 1, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 1}}}
    with crew_of("ab", CellTask(options, shape=EXPERT, model=Divided)) as crew:
        crew.finish()
    with crew_of("abcd", CellTask(options, shape=BOTH, model=Divided)) as crew:
        crew.allow()
        crew.until("its error", lambda: bool(crew.workers["a"].failure))
        failure = crew.workers["a"].failure
    assert "is of cells of 2 processes (expert 2), and this job's lanes are trained by cells of 4" in failure
    assert re.search(r"`shoal reshape \S+ NEW --expert 2 --tensor 2`, and give `resume` the folder NEW", failure)


def test_a_checkpoint_without_experts_is_not_dealt_among_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shoal = {"checkpoint": {"path": str(tmp_path / "old"), "every_steps": 1}}
    with crew_of("ab", in_stages(CellTask({"max_steps": 1, "shoal": shoal}, shape=PIPELINE))) as crew:
        crew.finish()
    assert main(["reshape", str(tmp_path / "old"), str(tmp_path / "new"), "--pipeline", "2", "--expert", "2"]) == 2
    assert "it says of no parameter that it is an expert's; mark those that are" in capsys.readouterr().err
