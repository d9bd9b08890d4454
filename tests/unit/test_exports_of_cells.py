"""What a job of cells exports, and what is exported of its checkpoints: whole tensors, bit by bit those of the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save, trained
from context_parallel import BOTH, CONTEXT, Divided
from crew import Crew
from expert_parallel import BOTH as OF_BOTH
from expert_parallel import EXPERT, EXPERTS, Counting
from expert_parallel import Divided as OfExperts
from expert_parallel import Whole as WholeOfExperts
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from pipeline_parallel import OF_EXPERTS, PIPELINE, SQUARE, Stage, in_stages, without_buffers
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.cells.marks import marks, sharded
from shoal.cells.stages import built_stages
from shoal.checkpoint.catalogue import at
from shoal.checkpoint.export import export, export_dcp
from shoal.checkpoint.manifest import MANIFEST, sealed
from shoal.checkpoint.model_file import open_model
from shoal.checkpoint.storage import open_storage
from shoal.core.cuts import Cut
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from tensor_parallel import TWO, CellTask, Parallel, crew_of
from tiers import check
from torch import Tensor, nn

STEP = 2
CUT = {"up": 0, "down": 1}
"""Dimensions, by parameter, of the two models here."""


def task_of(shape: Shape, options: dict[str, Any], **more: Any) -> CellTask:
    return CellTask(options, shape=shape, model=Divided if shape.context > 1 else Parallel, **more)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model, by hand."""
    cut = {name: torch.cat([part[name] for part in parts], dim) for name, dim in CUT.items()}
    return {name: value.clone() for name, value in parts[0].items()} | cut


def weights_of(crew: Crew, shape: Shape) -> dict[str, Tensor]:
    return joined([crew.workers[name].engine.module.state_dict() for name in "ab"[: shape.tensor]])


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
def test_parts_that_are_cut_from_a_whole_are_joined_to_it(places: int, stride: int, dim: int, length: int) -> None:
    """As Megatron cuts fused matrices: pieces in turn."""
    shape = [2, 3, 4]
    shape[dim] = places * stride * length
    whole = torch.randn(shape)
    pieces = whole.split(length, dim)
    parts = [torch.cat(pieces[place::places], dim) for place in range(places)]
    cut = Cut(dim, stride)
    joined = torch.empty(shape)
    cut.join(parts, joined)
    assert torch.equal(joined, whole)
    assert cut.whole_shape(tuple(parts[0].shape), places) == tuple(shape)


@pytest.mark.parametrize(("shape", "names", "stage"), [(TWO, "abcd", 1), (BOTH, "abcd", 0), (CONTEXT, "ab", 2)])
@rule(
    "An export of a job of cells has the whole of every tensor under its own name, with the job's bits",
    "Cells",
    broken_by=[
        Edit(
            "shoal.core.cuts", "strips(whole, place, len(parts))", "strips(whole, len(parts) - 1 - place, len(parts))"
        ),
        Edit("shoal.checkpoint.named", "[reader.at(one) for", "[reader for"),
        Edit("shoal.training.cell_parts", "self._traffic_at(world, coordinate)\n", "self._traffic\n"),
        Edit("shoal.training.requests", "one.detail not in paths]", "True]"),
        Edit("shoal.cells.marks", '"split_factor", 1 if', '"_", 1 if'),
        Edit(
            "shoal.training.cell_parts",
            "fetch.first = first_of(traffic, averaged)",
            "fetch.first = first_of(traffic, False)",
        ),
    ],
)
def test_a_checkpoint_of_cells_is_exported_whole(shape: Shape, names: str, stage: int, tmp_path: Path) -> None:
    shoal = {"checkpoint": {"path": str(tmp_path), "every_steps": STEP}}
    with crew_of(names, task_of(shape, {"max_steps": STEP, "stage": stage, "shoal": shoal})) as crew:
        crew.finish()
        expected = weights_of(crew, shape)
    reader = at(str(next(tmp_path.glob(f"step-{STEP:012d}-*"))), print).reader()
    export(reader, tmp_path / "model.safetensors", None)
    assert same(load_file(tmp_path / "model.safetensors"), expected)
    export_dcp(reader, tmp_path / "folder", None)
    folder = open_model(tmp_path / "folder")
    assert all(folder.states[name]["exp_avg"].shape == value.shape for name, value in expected.items())
    flat = {name: folder.part(name, 0, value.numel()) for name, value in expected.items()}
    assert same(flat, {name: value.reshape(-1) for name, value in expected.items()})


@holds("An export of a job of cells has the whole")
@pytest.mark.parametrize("shape", [PIPELINE, pytest.param(SQUARE, marks=check("with parts besides"))], ids=str)
def test_a_checkpoint_of_a_pipeline_is_exported_with_all_stages(shape: Shape, tmp_path: Path) -> None:
    """Under the names that they have in the `ModuleDict` of all of them, as one process builds it."""
    shoal, workers = {"checkpoint": {"path": str(tmp_path), "every_steps": STEP}}, "abcd"[: shape.processes]
    with crew_of(workers, in_stages(CellTask({"max_steps": STEP, "shoal": shoal}, shape=shape))) as crew:
        crew.finish()
        there = [crew.workers[name].engine.module.state_dict() for name in workers]
    expected = {name: value for part in there for name, value in part.items()}
    for first, second in zip(there[::2], there[1::2], strict=True) if shape == SQUARE else ():
        cut = {name: CUT[name.partition(".")[2]] for name in first if name.partition(".")[2] in CUT}
        expected |= {name: torch.cat([first[name], second[name]], dim) for name, dim in cut.items()}
    reader = at(str(next(tmp_path.glob(f"step-{STEP:012d}-*"))), print).reader()
    export(reader, tmp_path / "model.safetensors", None)
    found = load_file(tmp_path / "model.safetensors")
    assert same(found, expected)
    whole = built_stages(partial(Stage, count=2, dropout=0.0, hub=None, between=lambda: None), 2, 0, 1)
    whole.load_state_dict(found)
    export_dcp(reader, tmp_path / "folder", None)
    states = open_model(tmp_path / "folder").states
    assert states.keys() == {name for name, _ in whole.named_parameters()}
    assert all(one["exp_avg"].shape == expected[name].shape for name, one in states.items())


@holds("An export of a job of cells has the whole")
@pytest.mark.parametrize(
    ("shape", "stage", "model"),
    [
        (PIPELINE, 1, OfExperts),
        (EXPERT, 2, Counting),
        pytest.param(SQUARE, 3, OfExperts, marks=check("with parts besides")),
        pytest.param(OF_BOTH, 3, Counting, marks=check("with parts besides")),
        pytest.param(OF_EXPERTS, 1, OfExperts, marks=check("as of a pipeline alone")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_job_exports_the_very_file_that_is_exported_of_its_checkpoint(
    shape: Shape, stage: int, model: Any, tmp_path: Path
) -> None:
    """Stages, parts and experts that other processes have, and buffers of both."""

    def after(engine: Engine) -> None:
        engine.export(tmp_path / "job.safetensors")

    shoal = {"checkpoint": {"path": str(tmp_path / "saved"), "every_steps": STEP}}
    task = CellTask({"max_steps": STEP, "stage": stage, "shoal": shoal}, shape=shape, model=model, after=after)
    if shape.pipeline > 1:
        task = in_stages(task) if shape.expert == 1 else replace(in_stages(task), model=without_buffers)
    with crew_of("abcdefgh"[: shape.processes], task) as crew:
        crew.finish()
    found = at(str(next((tmp_path / "saved").glob("step-*"))), print)
    export(found.reader(), tmp_path / "model.safetensors", None)
    assert (tmp_path / "job.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    seen = [value for name, value in load_file(tmp_path / "job.safetensors").items() if name.endswith(".seen")]
    assert len(seen) == (EXPERTS if model is Counting else 0)
    assert not any(torch.equal(one, other) for one, other in combinations(seen, 2))


@holds("An export of a job of cells has the whole")
@pytest.mark.parametrize(
    ("shape", "stage", "more"),
    [
        (PIPELINE, 1, {}),
        (EXPERT, 2, {"precision": {"bf16": {"enabled": True}}}),
        (TWO, 3, {}),
        pytest.param(TWO, 0, {}, marks=check("as in stage 1")),
        pytest.param(OF_BOTH, 3, {"precision": {"bf16": {"enabled": True}}}, marks=check("with parts besides")),
        pytest.param(SQUARE, 1, {"offload": "files"}, marks=check("from files")),
    ],
    ids=str,
)
def test_a_job_of_cells_exports_the_averages_that_are_exported_of_its_checkpoint(
    shape: Shape, stage: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """Of the step at hand, and beside them the weights; though a member is lost between."""

    def trains(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        engine.step()

    def asks(body: Any, engine: Engine, batch: Any) -> None:
        before = engine.global_step
        body(engine, batch)
        if before < engine.global_step == STEP:
            engine.export(tmp_path / "job.safetensors", averaged=True)
            engine.export(tmp_path / "weights.safetensors")

    if "offload" in more:
        (tmp_path / "files").mkdir()
        more = {"offload": str(tmp_path / "files")}
    checkpoint = {"path": str(tmp_path / "saved"), "every_steps": STEP, "keep": 9}
    options = {"max_steps": 4, "stage": stage, "shoal": {"checkpoint": checkpoint, "average": {"decay": 0.9}}, **more}
    task = CellTask(options, shape=shape, model=OfExperts, body=trains)
    task = in_stages(task) if shape.pipeline > 1 else task
    with crew_of("abcdefgh"[: 2 * shape.processes], replace(task, body=partial(asks, task.body))) as crew:
        crew.train_to(1)
        crew.kill("a")
        crew.finish()
    found = at(str(next((tmp_path / "saved").glob(f"step-{STEP:012d}-*"))), print)
    for name, averaged in (("job", True), ("weights", False)):
        export(found.reader(), tmp_path / "model.safetensors", None, averaged)
        assert (tmp_path / f"{name}.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "job.safetensors").read_bytes() != (tmp_path / "weights.safetensors").read_bytes()


@rule(
    "An export of experts that places of a cell divide has each under its number among the experts of all places",
    "Cells",
    broken_by=[
        Edit("shoal.core.cuts", "place * self.of_place + self.number(name)", "self.number(name) * 2 + place"),
        Edit("shoal.cells.marks", "if names and all(one in of_experts for one in names):", "if names:"),
    ],
)
@pytest.mark.parametrize("shape", [EXPERT, pytest.param(OF_BOTH, marks=check("with parts besides"))], ids=str)
def test_a_checkpoint_of_divided_experts_is_exported_as_the_model_of_one_process(shape: Shape, tmp_path: Path) -> None:
    shoal = {"checkpoint": {"path": str(tmp_path), "every_steps": STEP}}
    workers = "abcd"[: shape.processes]
    with crew_of(workers, CellTask({"max_steps": STEP, "shoal": shoal}, shape=shape, model=OfExperts)) as crew:
        crew.finish()
        there = [crew.workers[name].engine.module.state_dict() for name in workers]
    reader = at(str(next(tmp_path.glob(f"step-{STEP:012d}-*"))), print).reader()
    export(reader, tmp_path / "model.safetensors", None)
    found, whole, here = load_file(tmp_path / "model.safetensors"), WholeOfExperts(), EXPERTS // shape.expert
    whole.load_state_dict(found)
    for name, value in found.items():
        start, _, rest = name.partition("deepspeed_experts.")
        number, _, rest = rest.partition(".")
        place, number = divmod(int(number or 0), here)
        local = f"{start}deepspeed_experts.{number}.{rest}" if rest else name
        parts = [part[local] for part in there[place * shape.tensor :][: shape.tensor]]
        dim = CUT.get(name.rpartition(".")[2])
        assert torch.equal(value, parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim)), name
    export_dcp(reader, tmp_path / "folder", None)
    assert open_model(tmp_path / "folder").states.keys() == {name for name, _ in whole.named_parameters()}


@holds("An export of experts that places of a cell divide")
def test_an_expert_is_numbered_in_the_list_that_has_experts_alone_though_layers_are_in_a_list_too() -> None:
    def layer() -> nn.ModuleDict:
        experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        for parameter in experts.parameters():
            sharded(parameter, over="expert")
        return nn.ModuleDict({"norm": nn.LayerNorm(2), "experts": experts})

    model, name = nn.ModuleDict({"layers": nn.ModuleList([layer(), layer()])}), "layers.1.experts.0.weight"
    dealt = marks(model, EXPERT, 0)[name].dealt
    assert dealt is not None and dealt.whole_name(name, 1) == "layers.1.experts.2.weight"


@holds("An export of a job of cells has the whole")
@pytest.mark.parametrize(
    ("shape", "names", "stage"),
    [
        (TWO, "ba", 1),
        (TWO, "abcd", 1),
        pytest.param(BOTH, "abcd", 1, marks=check("with contexts besides")),
        (TWO, "abcd", 3),
        pytest.param(BOTH, "abcd", 3, marks=check("with contexts besides")),
    ],
)
def test_a_job_of_cells_exports_the_weights_of_the_step_at_hand(
    shape: Shape, names: str, stage: int, tmp_path: Path
) -> None:
    """At whatever coordinate rank 0 is, within the loop and after it, and though a member is lost between."""
    seen: dict[int, dict[int, dict[str, Tensor]]] = {2: {}, 4: {}, 6: {}}

    def export_and_look(engine: Engine) -> None:
        step, part = engine.global_step, engine.context.state.layout.part
        with engine.gathered():
            values = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        seen[step][part.coordinate % part.parts] = values
        engine.export(tmp_path / f"{step}.safetensors")

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and engine.global_step in (2, 4):
            export_and_look(engine)

    with crew_of(names, task_of(shape, {"stage": stage}, body=body, after=export_and_look)) as crew:
        if names == "abcd" and shape == TWO:
            crew.train_to(3)
            crew.kill("c")
        crew.finish()
    for step, parts in seen.items():
        assert same(load_file(tmp_path / f"{step}.safetensors"), joined([parts[part] for part in range(shape.tensor)]))


# ---- what is refused


def test_buffers_that_differ_between_coordinates_are_not_exported(tmp_path: Path) -> None:
    def after(engine: Engine) -> None:
        engine.export(tmp_path / "model.safetensors")

    shoal = {"checkpoint": {"path": str(tmp_path / "saved"), "every_steps": STEP}}
    task = CellTask({"max_steps": STEP, "shoal": shoal}, buffers=True, after=after)
    why = 'buffer "inner.running_mean" differs between the processes of a cell, and nothing says how it is cut'
    with crew_of("ab", task) as crew:
        crew.train_to(STEP)
        crew.until("its error", lambda: bool(crew.workers["a"].failure))
        assert f"cannot export the model: {why}" in crew.workers["a"].failure
    reader = at(str(next((tmp_path / "saved").glob("step-*"))), print).reader()
    with pytest.raises(UserError, match=why):
        export(reader, tmp_path / "model.safetensors", None)
    assert not (tmp_path / "model.safetensors").exists()


class Unsaid(Parallel):
    """Megatron's attribute alone says that a parameter is divided."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.up = nn.Parameter(self.up.detach())
        self.up.tensor_model_parallel = True  # type: ignore[attr-defined]


UNSAID = (
    'each process of a cell has a part of parameter "up", and nothing says along which dimension it is cut; mark it by '
    "shoal.sharded(parameter, dim=…) and save anew"
)


def test_a_part_of_which_nothing_says_how_it_is_cut_is_not_exported(tmp_path: Path) -> None:
    task = CellTask(
        {"max_steps": STEP}, model=Unsaid, after=lambda engine: engine.export(tmp_path / "model.safetensors")
    )
    with crew_of("ab", task) as crew:
        crew.train_to(STEP)
        crew.until("its error", lambda: bool(crew.workers["a"].failure))
        assert f"cannot export the model: {UNSAID}" in crew.workers["a"].failure


@pytest.mark.parametrize("kind", [export, partial(export_dcp)])
def test_a_checkpoint_from_before_cuts_were_saved_is_read_and_not_exported(
    kind: Callable[..., None], tmp_path: Path
) -> None:
    shoal = {"checkpoint": {"path": str(tmp_path), "every_steps": STEP}}
    with crew_of("ab", CellTask({"max_steps": STEP, "shoal": shoal})) as crew:
        crew.finish()
    place = next(tmp_path.glob("step-*")) / MANIFEST
    written = json.loads(place.read_bytes())
    cut = [slot.pop("cut") for bucket in written["layout"]["buckets"] for slot in bucket["slots"] if "cut" in slot]
    assert sorted(cut) == [[0, 1], [1, 1]]
    place.write_bytes(sealed(json.dumps(written, separators=(",", ":")).encode()))
    with pytest.raises(UserError, match=UNSAID[:40]):
        kind(at(str(place.parent), print).reader(), tmp_path / "exported", None)
    with crew_of("abcd", CellTask({"max_steps": 3, "shoal": shoal})) as crew:
        crew.finish()
        assert crew.job.durable.history[0].from_step == STEP


def test_a_checkpoint_of_one_process_says_nothing_of_cuts() -> None:
    storage = open_storage("memory://one")
    written = save(trained(1), storage)[1].to_bytes()
    assert b'"cut"' not in written and b'"own"' not in written
