"""Averages of weights as a script and a command read them: from their owners, in every stage, and from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from averages import (
    BF16,
    DECAY,
    Values,
    averages_of,
    in_form,
    in_memory,
    options,
    options_of,
    with_options,
)
from context_parallel import BOTH, CONTEXT, Divided
from crew import Crew, Task, undisturbed
from crew_saves import saved
from integration.scripts import Samples, config
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.checkpoint.__main__ import main as export_command
from shoal.config.load import load_config
from shoal.config.training import agreement
from shoal.offload.state_file import OffloadFailed
from shoal.offload.state_place import InFile
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MemorySetup, estimate
from shoal_protos.shape import Shape
from tensor_parallel import TWO, CellTask, Parallel, crew_of
from tiers import check
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.optim.swa_utils import get_ema_multi_avg_fn


def values_of(module: nn.Module) -> Values:
    """Copies of all trained parameters."""
    return {name: one.detach().clone() for name, one in module.named_parameters() if one.requires_grad}


pytestmark = check("trains many small jobs")

CELLS = [
    (TWO, "abcd", 0, Parallel),
    (TWO, "abcde", 1, Parallel),
    (CONTEXT, "abcd", 2, Divided),
    (BOTH, "abcdefgh", 1, Divided),
]


@rule(
    "What a script reads as averages are those of the last step, whole, from their owners, whichever member asks, and "
    "none but it; what it trains afterwards has the bits that it has without",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.blocks.segments", "if segment.average is None:\n            return", "if True:\n            return"
        ),
        Edit(
            "shoal.training.whole_averages",
            "values.of(stretch).copy_(self._averages.of(stretch))",
            "values.of(stretch).copy_(context.state.weights.of(stretch))",
        ),
        Edit("shoal.training.gathered_units", "else of_averages(peer", "else of_weights(peer"),
        Edit("shoal.offload.state_place", "if AVERAGE not in piece.places:", "if True:"),
        Edit("shoal.training.averages", "            give_back()\n", "            del give_back\n"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["", "bf16", "files", "files, bf16"])
def test_one_member_alone_evaluates_with_averages(stage: int, form: str, tmp_path: Path) -> None:
    """Which are those that a worker alone holds."""
    precision = {"precision": BF16} if "bf16" in form else {}
    place = {"offload": str(tmp_path)} if "files" in form else {}
    alone: list[Values] = []

    def keep(engine: Engine) -> None:
        found = averages_of(engine).items()
        alone.append({name: value.to(torch.bfloat16 if precision else value.dtype) for name, value in found})

    undisturbed(Task(options(**precision), prepare=lambda engine: engine.on_commit(keep)))
    seen: dict[int, Values] = {}

    def look(engine: Engine) -> None:
        if engine.rank == 1 and engine.global_step not in seen:
            with engine.evaluating(), engine.averaged():
                engine.module(**collated(engine))
                with engine.gathered():
                    seen[engine.global_step] = values_of(engine.module)

    with Crew("abc", Task(options(stage=stage, **place, **precision), in_loop=look)) as crew:
        assert crew.finish() == reference(Task(options(**precision)))
    assert len(seen) > 2
    for step, values in seen.items():
        if step:
            assert all(torch.equal(values[name], value) for name, value in alone[step - 1].items())


def collated(engine: Engine) -> Any:
    samples = Samples(4)
    return engine.context.loop.collate(samples, [0, 1])


@holds("What a script reads as averages")
@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_teacher_of_averages_runs_within_a_lane_in_every_world(stage: int, where: str, tmp_path: Path) -> None:
    """Before and after the student's own forward; with kills, and a joiner that warms up."""

    def distil(engine: Engine, batch: Any) -> None:
        with engine.averaged():
            before = engine.module(**batch)
        loss = engine.module(**batch)
        with engine.averaged():
            engine.module.eval()
            after = engine.module(**batch)
        engine.backward(loss + 0.1 * (loss - before - after).square())
        engine.step()

    task = Task(options(max_steps=12), body=distil)
    place = {"offload": str(tmp_path)} if where == "files" else {}
    with Crew("abc", replace(task, options={**task.options, "stage": stage, **place})) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "backward")
        crew.train_to(4)
        joiner = crew.add("d")
        crew.train_until("d is in", lambda: joiner in crew.members() and crew.at_rest())
        crew.plant("c", crew.allowed + 1, "gather" if stage == 3 else "exchange")
        fingerprint = crew.finish()
    assert fingerprint == reference(task)
    assert fingerprint != reference(Task(options(max_steps=12)))


@holds("What a script reads as averages")
@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_forwards_with_averages_change_no_bit_of_training(stage: int) -> None:
    """Though they draw dropout and move the statistics of batch normalization."""

    def look(engine: Engine) -> None:
        with engine.averaged():
            engine.module(**collated(engine))

    assert undisturbed(Task(options(stage=stage), in_loop=look)) == reference(Task(options()))


@pytest.mark.parametrize("stage", [1, 3])
def test_within_averages_nothing_is_trained(stage: int) -> None:
    refusals: list[str] = []

    def wrong(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        with engine.averaged():
            for call in (lambda: engine.backward(loss), engine.step, engine.skip, lambda: enter(engine)):
                with pytest.raises(UserError) as refused:
                    call()
                refusals.append(str(refused.value))
        engine.backward(loss)
        engine.step()

    assert undisturbed(Task(options(stage=stage), body=wrong)) == reference(Task(options()))
    assert refusals[:4] == [
        "engine.backward was called within engine.averaged; leave that context before it.",
        "engine.step was called within engine.averaged; leave that context before it.",
        "engine.skip was called within engine.averaged; leave that context before it.",
        "engine.averaged was entered within engine.averaged; leave the first one before it.",
    ]


def enter(engine: Engine) -> None:
    with engine.averaged():
        raise AssertionError


def test_a_job_without_averages_has_none_to_be_read(tmp_path: Path) -> None:
    refusals: list[str] = []

    def ask(engine: Engine) -> None:
        for call in (lambda: enter(engine), lambda: engine.export(tmp_path / "m.safetensors", averaged=True)):
            with pytest.raises(UserError) as refused:
                call()
            refusals.append(str(refused.value))

    undisturbed(Task({"max_steps": 1, "lanes": 1}, in_loop=ask))
    assert refusals == [
        "engine.averaged needs averages of weights, and this job keeps none; set `shoal.average`.",
        "engine.export(…, averaged=True) needs averages of weights, and this job keeps none; set `shoal.average`.",
    ]


@pytest.mark.parametrize("form", ["0", "1", "2", "3", "1, files", "3, files, bf16", "2, files of a device"])
@pytest.mark.parametrize("where", ["in the body", "after the loop"])
def test_averages_are_exported(form: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def ask(engine: Engine) -> None:
        if where == "in the body" and engine.global_step == 3 and engine.rank == 1:
            engine.export(path, averaged=True)

    def script(engine: Engine, before: Callable[[], None]) -> None:
        for batch in engine:
            before()
            ask(engine)
            engine.backward(engine.module(**batch))
            engine.step()
        if where == "after the loop":
            engine.export(path, averaged=True)

    with Crew("abc", replace(in_form(form, tmp_path), script=script)) as crew:
        assert crew.finish() == reference(in_memory(form))
    alone: list[Values] = []
    keep = replace(in_memory(form), prepare=lambda engine: engine.on_commit(lambda one: alone.append(averages_of(one))))
    undisturbed(keep)
    found = load_file(path)
    expected = alone[3 if where == "in the body" else -1]
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in expected.items())


@pytest.mark.parametrize("form", ["1", "3, bf16"])
def test_a_checkpoints_averages_are_exported(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the parameters' dtype, or as exactly as they are kept; one without them is refused."""
    place = tmp_path / "saves"
    checkpoint = {"checkpoint": {"path": str(place), "every_steps": 4}}
    alone: list[Values] = []
    keep = Task(
        {**options_of(form), "max_steps": 4, "shoal": {"average": {"decay": DECAY}}},
        prepare=lambda engine: engine.on_commit(lambda one: alone.append(averages_of(one))),
    )
    undisturbed(keep)
    task = in_form(form, tmp_path, max_steps=6)
    with Crew("abc", with_options(task, {"shoal": {"average": {"decay": DECAY}, **checkpoint}})) as crew:
        crew.train_to(5)
        saved(crew, 4)
    found, exact, folder = tmp_path / "found", tmp_path / "exact", tmp_path / "dcp"
    assert export_command(["export", "--averaged", str(place), str(found)]) == 0
    assert export_command(["export", "--averaged", str(place), str(exact), "--dtype", "float32"]) == 0
    assert export_command(["export", "--averaged", str(place), str(folder), "--format", "dcp"]) == 0
    assert "the model of step 4, with averages of weights" in capsys.readouterr().out
    narrow = torch.bfloat16 if "bf16" in form else torch.float32
    given, wide, model = load_file(found), load_file(exact), read_dcp(folder)["model"]
    for name, value in alone[-1].items():
        assert torch.equal(wide[name], value)
        assert torch.equal(given[name], value.to(narrow)) and torch.equal(model[name], given[name])

    without = tmp_path / "without"
    with Crew("a", Task({"max_steps": 3, "shoal": {"checkpoint": {"path": str(without), "every_steps": 1}}})) as crew:
        crew.train_to(2)
        saved(crew)
    assert export_command(["export", "--averaged", str(without), str(found)]) == 2
    assert "it has none, as its job kept none by that step (`shoal.average`)" in capsys.readouterr().err


def read_dcp(folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = {}
        _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


@pytest.mark.parametrize(
    ("average", "sentence"),
    [
        ({"decay": 1.0}, "`shoal.average.decay` is 1.0; expected a number between 0 and 1, neither of them."),
        ({"decay": 0}, "`shoal.average.decay` is 0; expected a number between 0 and 1, neither of them."),
        ({"decay": 0.9, "every": 0}, "`shoal.average.every` is 0; expected a whole number from 1 to 10^15."),
        ({"decay": 0.9, "from_step": -1}, "`shoal.average.from_step` is -1; expected a whole number from 0 to 10^15."),
        ({"decay": 0.9, "warm": 1}, "`shoal.average.warm` is an unknown key (given: 1)"),
        ({}, "`shoal.average.decay` is missing"),
        (0.9, "`shoal.average` is 0.9; expected"),
    ],
)
def test_a_section_that_means_nothing_is_refused_in_a_sentence(average: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(config({"shoal": {"average": average}}))
    assert sentence in str(refused.value)


def test_workers_of_one_job_average_alike() -> None:
    """Another decay is another job; and a job without averages says nothing of them."""
    texts = [agreement(load_config(config({"shoal": {"average": {"decay": one}}}))) for one in (0.9, 0.99)]
    assert texts[0] != texts[1] and "shoal.average" in texts[0]
    assert "shoal.average" not in agreement(load_config(config({})))


@rule(
    "An owner that cannot read averages that it is asked for ends with the reason, and its mirrors answer for it",
    "Data, evaluations and the doors",
    broken_by=Edit("shoal.exchange.unit_fetch", "        raise before.failure", "        pass"),
)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_owner_whose_file_cannot_be_read_leaves_and_others_answer(stage: int, tmp_path: Path) -> None:
    readers: list[Engine] = []

    def look(engine: Engine) -> None:
        if engine in readers:
            with engine.averaged(), engine.gathered():
                pass

    tries: list[int] = []

    def unreadable(*_: object) -> None:
        tries.append(1)
        raise OffloadFailed("the file of optimizer state in /nvme cannot be read: Input/output error.")

    with Crew("abc", Task(options(stage=stage, offload=str(tmp_path)), in_loop=look)) as crew:
        crew.train_to(2)
        reader, owner = crew.workers["a"], crew.workers["b"]
        readers.append(reader.engine)
        home = owner.engine.context.state.held.home
        assert isinstance(home, InFile)
        home.store.read = unreadable  # type: ignore[method-assign, assignment]
        assert crew.finish() == reference(Task(options()))
    assert "OffloadFailed: the file of optimizer state in /nvme cannot be read" in owner.failure
    assert len(tries) == 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_estimate_counts_averages_and_the_copy_of_a_reader(stage: int) -> None:
    setup = MemorySetup(parameters=1_000_000, workers=4, stage=stage, lanes=4, precision="bf16")
    without, with_averages = estimate(setup), estimate(replace(setup, average=True))
    assert with_averages.at_rest("device") - without.at_rest("device") == 4_000_000 * setup.copies
    assert with_averages.read_average_bytes == (2_000_000 if stage < 3 else 0) and without.read_average_bytes == 0


@holds("What a script reads as averages")
@pytest.mark.parametrize(("shape", "names", "stage", "model"), CELLS, ids=str)
def test_members_of_a_cell_read_averages_of_their_part(shape: Shape, names: str, stage: int, model: Any) -> None:
    """Which are what torch's own function makes of the weights; a cell of one and more, through a kill."""
    made: dict[Engine, list[Tensor]] = {}
    seen: list[int] = []

    def average(engine: Engine) -> None:
        weights = [one.detach() for one in engine.module.parameters()]
        if engine not in made:
            made[engine] = [one.clone() for one in weights]
        else:
            get_ema_multi_avg_fn(DECAY)(made[engine], weights, 0)

    def look(engine: Engine, batch: Any) -> None:
        if engine.global_step and made:
            with engine.averaged():
                pairs = zip(engine.module.parameters(), made[engine], strict=True)
                assert all(torch.equal(one, value) for one, value in pairs)
            seen.append(engine.global_step)
        engine.backward(engine.module(**batch))
        engine.step()

    def of(**more: Any) -> CellTask:
        options = {"max_steps": 6, "stage": stage, "shoal": {"average": {"decay": DECAY}}}
        return CellTask(options, shape=shape, model=model, **more)

    with crew_of(names[: shape.processes], of()) as crew:
        alone = crew.finish()
    with crew_of(names, of(body=look, prepare=lambda engine: engine.on_commit(average))) as crew:
        crew.train_to(2)
        crew.plant(names[-1], 3, "exchange")
        assert crew.finish() == alone
    assert set(seen) == {1, 2, 3, 4, 5}


@holds("What a script reads as averages")
@pytest.mark.parametrize(("shape", "names", "stage", "model"), CELLS, ids=str)
@pytest.mark.parametrize("point", ["between", "backward", "exchange"])
def test_a_teacher_of_averages_runs_in_a_cell(shape: Shape, names: str, stage: int, model: Any, point: str) -> None:
    """By the collectives of its forward, with the same bits for any number of cells and through a kill."""

    def distil(engine: Engine, batch: Any) -> None:
        with engine.averaged():
            before = engine.module(**batch)
        loss = engine.module(**batch)
        engine.backward(loss + 0.1 * (loss - before).square())
        if engine.step() and engine.global_step == 3:
            with engine.evaluating(), engine.averaged():
                engine.module(**batch)

    def of(**more: Any) -> CellTask:
        options = {"max_steps": 6, "stage": stage, "shoal": {"average": {"decay": DECAY}}}
        return CellTask(options, shape=shape, model=model, **more)

    with crew_of(names[: shape.processes], of(body=distil)) as crew:
        alone = crew.finish()
    with crew_of(names, of(body=distil)) as crew:
        crew.train_to(2)
        crew.plant(names[-2], 4, point)
        assert crew.finish() == alone
    with crew_of(names[: shape.processes], of()) as crew:
        assert crew.finish() != alone
