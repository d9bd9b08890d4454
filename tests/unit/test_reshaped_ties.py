"""`shoal reshape` of pipelines whose stages tie parameters: copies become one parameter, and are copies again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_parallel import EXPERT
from integration.scripts import VOCABULARY
from pipeline_parallel import HUBS, OF_EXPERTS, PIPELINE, SQUARE, Fixed, Stage, adam, in_stages, loss_of
from reshaped_jobs import found_in, reshaped, there_and_back
from rule import Edit, rule
from shoal.cells.hub import CellHub
from shoal.cells.marks import tied
from shoal.cells.stages import Stages, built_stages
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.catalogue import at
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.manifest import MANIFEST, sealed
from shoal_protos.shape import ONE, Shape
from tensor_parallel import CellTask, crew_of
from tiers import check
from torch import nn

STEP, TURNS = 2, 4


def tied_stages(hub: CellHub, between: Callable[[], None], _: bool = False, listed: bool = False) -> Stages:
    """Embedding and head, and the norms, which are one parameter each at one place. `listed`: the head is a unit."""
    places = hub.shape.pipeline

    def build(number: int) -> nn.Module:
        stage = Stage(number, 2, 0.0, hub, between)
        if listed and number:
            stage.head = nn.Sequential(stage.head, nn.LayerNorm(VOCABULARY))
        weight = tied(stage.get_parameter(ends(listed)[number]), "embedding")
        if not weight.is_meta:
            nn.init.normal_(weight, 0, 0.3, generator=torch.Generator().manual_seed(7))
        for name, parameter in stage.norm.named_parameters():
            tied(parameter, name)
        return stage

    found = built_stages(build, 2, hub.shape.index(hub.coordinate)["pipeline"], places)
    if places == 1:
        found["1"].norm = found["0"].norm
        head = found["1"].get_submodule(ends(listed)[1].removesuffix(".weight"))
        head.weight = found["0"].get_parameter("embedding.weight")
    HUBS[found] = hub
    return found


def ends(listed: bool) -> tuple[str, str]:
    """Names of embedding and head in their stages."""
    return "embedding.weight", "head.0.weight" if listed else "head.weight"


def in_turn(engine: Any, batch: Any) -> None:
    """All stages in one process."""
    hidden = batch["tokens"]
    for stage in engine.module.values():
        hidden = stage(hidden)
    engine.backward(loss_of(hidden, batch["targets"]))
    engine.step()


def task_of(shape: Shape, listed: bool = False, **checkpoint: Any) -> CellTask:
    options = {"max_steps": 4, "gradient_clipping": 0.3, "shoal": {"checkpoint": checkpoint}}
    task = in_stages(CellTask(options, shape=shape, data=lambda: Fixed(40)))
    body = {} if shape.pipeline > 1 else {"body": in_turn}
    return replace(task, model=partial(tied_stages, listed=listed), optimizer=adam, **body)


def step_of(place: Path, step: int) -> Path:
    return next(place.glob(f"step-{step:012d}-*"))


@rule(
    "Copies that are reshaped to one place become the one parameter of its stages, and copies again on several places",
    "Cells",
    broken_by=[
        Edit("shoal.checkpoint.other_shape", "order=copy.order, unit=copy.unit)", "order=copy.order)"),
        Edit("shoal.checkpoint.other_shape", "one.name in summed or one.tie is not None", "one.name in summed"),
        Edit("shoal.blocks.flat", "if order not in copies)", "if order >= 0)"),
    ],
)
@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=check("without units"))], ids=["listed", "plain"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(PIPELINE, ONE), pytest.param(ONE, PIPELINE, marks=check("the other way")),
     pytest.param(SQUARE, Shape(tensor=2), marks=check("with parts besides"))],
    ids=str,
)  # fmt: skip
def test_a_job_goes_on_with_its_copies_at_one_place_or_at_several(
    before: Shape, after: Shape, listed: bool, tmp_path: Path
) -> None:
    def run(shape: Shape, **checkpoint: Any) -> tuple[str, float | None]:
        with crew_of("abcd"[: shape.processes], task_of(shape, listed, **checkpoint)) as crew:
            return crew.finish(), crew.workers["a"].engine.loss

    whole, loss = run(before, path=str(tmp_path / "old"), every_steps=STEP, keep=9)
    old = step_of(tmp_path / "old", STEP)
    fingerprint = verify(at(str(old), print).reader()).fingerprint
    reshaped(old, tmp_path / "new", after)
    if after.tensor == 1 or after.pipeline > 1:
        _, rest = run(after, path=str(tmp_path / "new"), every_steps=STEP, keep=9)
        assert rest == pytest.approx(loss, abs=1e-5)
        reshaped(step_of(tmp_path / "new", 4), tmp_path / "later", before)
    assert reshaped(step_of(tmp_path / "new", STEP), tmp_path / "back", before) == fingerprint
    assert found_in(tmp_path / "back").manifest.layout == at(str(old), print).manifest.layout
    assert run(before, path=str(tmp_path / "back"))[0] == whole


def tied_experts(hub: CellHub, between: Callable[[], None], _: bool = False) -> Stages:
    """Stages whose experts are copies of each other's, place by place."""

    def build(number: int) -> nn.Module:
        stage = Stage(number, 2, 0.0, hub, between)
        stage.counted = nn.Identity()  # type: ignore[assignment]
        assert stage.moe is not None
        for one, expert in enumerate(stage.moe.deepspeed_moe.experts.deepspeed_experts):
            weight = tied(expert.weight, f"expert {one}")  # type: ignore[arg-type]
            if not weight.is_meta:
                nn.init.normal_(weight, 0, 0.3, generator=torch.Generator().manual_seed(one))
        return stage

    found = built_stages(build, 2, hub.shape.index(hub.coordinate)["pipeline"], hub.shape.pipeline)
    HUBS[found] = hub
    return found


@rule(
    "Experts that stages tie become one at one place, and copies again, and are not dealt to other places",
    "Cells",
    broken_by=[
        Edit("shoal.checkpoint.other_shape", "return place, self._first.get(old, old)", "return place, old"),
        Edit("shoal.checkpoint.other_shape", 'if one.tie is not None), ""):', 'if one.tie is every), ""):'),
    ],
)
def test_experts_that_are_tied_are_reshaped_with_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = replace(in_stages(CellTask({"max_steps": 2}, shape=OF_EXPERTS)), model=tied_experts)
    there_and_back(task, EXPERT, tmp_path)
    for shape in ("--expert 1 --pipeline 2", "--expert 4"):
        assert main(["reshape", str(tmp_path / "old"), str(tmp_path / "dealt"), *shape.split()]) == 2
        words = r'experts 0\.moe\..*\.0 to 0\.moe\..*\.1 are tied \(shoal\.tied, "expert 0"\)'
        assert re.search(f"cannot reshape .*: {words}", capsys.readouterr().err)


def test_copies_that_differ_do_not_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a manifest says that was changed: it ties a weight to a bias."""
    with crew_of("ab", task_of(PIPELINE, path=str(tmp_path), every_steps=STEP)) as crew:
        crew.finish()
    place = step_of(tmp_path, 4) / MANIFEST
    written = json.loads(place.read_bytes())
    slots = {slot["name"]: slot for bucket in written["layout"]["buckets"] for slot in bucket["slots"]}
    weight, bias = slots["1.norm.weight"], slots["1.norm.bias"]
    weight["tie"], bias["tie"] = bias["tie"], weight["tie"]
    place.write_bytes(sealed(json.dumps(written, separators=(",", ":")).encode()))
    assert main(["reshape", str(place.parent), str(tmp_path / "new")]) == 2
    words = r'parameters "0\.norm\.\w+" and "1\.norm\.\w+" are tied, .* both as one, but their values differ'
    assert re.search(f"cannot reshape .*: {words}", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
