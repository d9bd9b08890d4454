"""Averages of weights beside the blocks: torch's own arithmetic; equal bits in every world, stage and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from crew_saves import saved
from integration.scripts import Samples
from late_device import LateDevice
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.blocks.loaded_state import AVERAGE
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.storage import LocalStorage
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from unit.test_turns import Gan, constant
from unit.test_turns import body as gan_body
from unit.test_turns import optimizer_of as gan_optimizer
from unit.test_unused_parameters import Towers, adamw, by_step

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}}
"""The first steps overflow, and are skipped."""
DECAY = 0.9
STEPS = 6


def options(average: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "shoal": {"average": average or {"decay": DECAY}}, **more}


def averages_of(engine: Engine) -> dict[str, Tensor]:  # each of its parameter's shape
    """By parameter, of what this worker holds, which is all."""
    state = engine.context.state
    found: dict[str, Tensor] = {}
    for stretch, parts in state.held.home.stream(state.everything):
        if AVERAGE not in parts:
            continue  # frozen, or none is made yet
        start, _ = state.layout.elements(stretch)
        for slot in state.layout.buckets[stretch.bucket].slots:
            name, end = slot.parameter.name, slot.start + slot.parameter.elements
            first, last = max(slot.start, start), min(end, start + parts[AVERAGE].numel())
            if first < last:
                flat = found.setdefault(name, torch.zeros(slot.parameter.elements, dtype=parts[AVERAGE].dtype))
                flat[first - slot.start : last - slot.start] = parts[AVERAGE][first - start : last - start]
    shapes = {slot.parameter.name: slot.parameter.shape for one in state.layout.buckets for slot in one.slots}
    return {name: flat.view(shapes[name]) for name, flat in found.items()}


def averaged_by_torch(task: Task, every: int, from_step: int) -> tuple[Engine, AveragedModel]:
    """An engine alone that has trained, and what torch makes of its weights beside it."""
    made: list[AveragedModel] = []

    def update(engine: Engine) -> None:
        if not made:
            made.append(AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
        step = engine.global_step
        if step > from_step and (step - from_step) % every == 0:
            made[0].update_parameters(engine.module)

    with ONE_AT_A_TIME:
        own = Task(**{**vars(task), "prepare": lambda engine: engine.on_commit(update)})
        engine = engine_of(own, AloneLink(), Faults([]))
        train(engine, own, lambda: None)
    return engine, made[0]


@rule(
    "Averages of weights are made by torch's own operations, of the exact weights of each step that counts, by owner "
    "and mirrors at the commit: the first such step's weights are the average",
    "A step",
    broken_by=[
        Edit("shoal.core.average_rule", "return 1 - self.decay", "return 1 - self.decay**2"),
        Edit("shoal.core.average_rule", "step > self.from_step and (step", "step > 0 and (step"),
        Edit("shoal.core.average_rule", "(step - self.from_step) % self.every", "step % self.every"),
        Edit("shoal.blocks.segments", "            torch._foreach_lerp_(averages, weights, rule.taken)\n",
             "            torch._foreach_mul_(averages, rule.decay)\n"
             "            torch._foreach_add_(averages, weights, alpha=rule.taken)\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("every", "from_step"), [(1, 0), (2, 0), (2, 1), (1, 3)])
def test_averages_are_those_of_torch(stage: int, every: int, from_step: int) -> None:
    average = {"decay": DECAY, "every": every, "from_step": from_step}
    engine, torchs = averaged_by_torch(Task(options(average, stage=stage, lanes=1)), every, from_step)
    theirs = dict(torchs.module.named_parameters())
    ours = averages_of(engine)
    assert ours.keys() == {name for name, one in theirs.items() if one.requires_grad}
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    with ONE_AT_A_TIME, engine.gathered():
        weights = dict(engine.module.named_parameters())
        assert any(not torch.equal(value, weights[name]) for name, value in ours.items())


FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3},
    "1, bf16": {"stage": 1, "precision": BF16}, "3, bf16": {"stage": 3, "precision": BF16},
    "1, fp16": {"stage": 1, "precision": FP16},
    "1, files": {"stage": 1, "offload": "files"}, "3, files, bf16": {"stage": 3, "offload": "files", "precision": BF16},
    "1, host of a device": {"stage": 1, "offload": "cpu"},
    "3, host of a device": {"stage": 3, "offload": "cpu", "offload_param": True},
    "2, files of a device": {"stage": 2, "offload": "files"},
}  # fmt: skip


def in_form(form: str, place: Path, **more: Any) -> Task:
    given = options(**{**FORMS[form], **more})
    if given.get("offload") == "files":
        given["offload"] = str(place)
    device: dict[str, Any] = {"device": LateDevice} if form.endswith("of a device") else {}
    return Task(given, **device)


def in_memory(form: str, **more: Any) -> Task:
    """The same bits in the simplest world."""
    return Task(options(**{"precision": FORMS[form].get("precision", {}), **more}))


@holds("Averages of weights are made")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", shortened(["a", "ab", "abc", "abcd", "abcde"], "abc"))
def test_worlds_end_with_the_same_averages(form: str, names: str, tmp_path: Path) -> None:
    with Crew(names, in_form(form, tmp_path, lanes=5)) as crew:
        assert crew.finish() == reference(in_memory(form, lanes=5))


POINTS = ["exchange", "mirror", "in_vote", "optimizer", "hand_out"]


@holds("Averages of weights are made")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("form", shortened(FORMS, "1", "3, bf16"))
def test_kills_joins_and_drains_change_no_bit_of_an_average(form: str, point: str, tmp_path: Path) -> None:
    average = {"decay": DECAY, "every": 2, "from_step": 1}
    with Crew("abc", in_form(form, tmp_path, average=average, max_steps=14)) as crew:
        crew.train_to(2)
        crew.plant("b", 3, point)
        crew.train_to(4)
        joiner = crew.add("d")
        crew.train_until("d is in", lambda: joiner in crew.members() and crew.at_rest())
        crew.request(DrainWorker("a"))
        fingerprint = crew.finish()
    assert fingerprint == reference(in_memory(form, average=average, max_steps=14))


def test_averages_are_in_the_fingerprint() -> None:
    decays = [reference(Task(options({"decay": decay}))) for decay in (0.9, 0.8)]
    assert len({*decays, reference(Task({"max_steps": STEPS}))}) == 3


def test_before_they_begin_a_job_is_as_without_them() -> None:
    assert reference(Task(options({"decay": 0.5, "from_step": STEPS}))) == reference(Task({"max_steps": STEPS}))


@rule(
    "A group whose turn it is not, and a parameter that no lane has used, enter averages with the weights that they "
    "have; a step that updates nothing leaves all averages",
    "A step",
    broken_by=[
        Edit("shoal.blocks.state_home", "bucket in trained if not (bucket.is_frozen or turns[bucket.group])]",
             "bucket in trained if False]",
             by="test_a_group_without_its_turn_is_averaged_all_the_same"),
        Edit("shoal.blocks.segments", "one.has_master or are_updated else", "True else",
             by="test_a_group_without_its_turn_is_averaged_all_the_same"),
        Edit("shoal.offload.state_place", "has_its or segments.averages_now for", "has_its for",
             by="test_a_group_without_its_turn_is_averaged_all_the_same"),
        Edit("shoal.state.training_state", "        if record.updates:\n            self._update(record, on_updated)\n",
             "        self._update(record, on_updated)\n",
             by="test_a_step_that_updates_nothing_leaves_averages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", shortened(FORMS, "1", "1, files", "3, host of a device"))
def test_a_group_without_its_turn_is_averaged_all_the_same(form: str, tmp_path: Path) -> None:
    """As torch's own averages are, whatever trains."""
    parts = {"model": Gan, "optimizer": gan_optimizer, "scheduler": constant, "body": gan_body}
    with Crew("abc", Task(**{**vars(in_form(form, tmp_path, max_steps=9)), **parts})) as crew:
        crew.train_to(2)
        crew.plant("c", 3, "in_vote")
        crew.train_to(4)
        joiner = crew.add("d")
        crew.train_until("d is in", lambda: joiner in crew.members() and crew.at_rest())
        fingerprint = crew.finish()
    assert fingerprint == undisturbed(Task(**{**vars(in_memory(form, max_steps=9)), **parts}))
    engine, torchs = averaged_by_torch(Task(**{**vars(Task(options(lanes=1, stage=1))), **parts}), 1, 0)
    ours = averages_of(engine)
    assert all(torch.equal(ours[name], value) for name, value in torchs.module.named_parameters())


@holds("A group whose turn it is not")
@pytest.mark.parametrize("form", shortened(FORMS, "0", "3", "1, files"))
def test_parameters_that_miss_updates_are_averaged_as_by_torch(form: str, tmp_path: Path) -> None:
    parts = {"model": Towers, "optimizer": adamw, "scheduler": constant, "body": by_step}
    task = Task(**{**vars(in_form(form, tmp_path, max_steps=9)), **parts})
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.kill("b")
        fingerprint = crew.finish()
    assert fingerprint == undisturbed(Task(**{**vars(in_memory(form, max_steps=9)), **parts}))
    if "bf16" not in form and "fp16" not in form:
        engine, torchs = averaged_by_torch(replace(task, options={**task.options, "lanes": 1}), 1, 0)
        ours = averages_of(engine)
        assert all(torch.equal(ours[name], value) for name, value in torchs.module.named_parameters())


@holds("A group whose turn it is not")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_updates_nothing_leaves_averages(stage: int) -> None:
    """One whose micro-batches are all skipped, and those that overflow, the first of all among them."""
    seen: list[tuple[bool, list[Tensor]]] = []

    def look(engine: Engine) -> None:
        record = engine.context.state.record
        assert record is not None
        seen.append((record.updates, [value.clone() for value in averages_of(engine).values()]))

    def skipping(engine: Engine, batch: Any) -> None:
        if engine.global_step == 4:
            engine.skip()
            return
        engine.backward(engine.module(**batch))
        engine.step()

    task = Task(options(stage=stage, precision=FP16), body=skipping, prepare=lambda engine: engine.on_commit(look))
    undisturbed(task)
    updates = [is_one for is_one, _ in seen]
    assert not updates[0] and not updates[4] and any(updates[:4]) and updates[5]
    for (_, before), (is_one, after) in pairwise(seen):
        are_equal = len(before) == len(after) and all(map(torch.equal, before, after))
        assert is_one != are_equal
    first = updates.index(True)
    assert not seen[first - 1][1] and seen[first][1]


@pytest.mark.parametrize("form", shortened(FORMS, "1", "3, files, bf16"))
def test_another_world_goes_on_from_a_checkpoint_with_its_averages(form: str, tmp_path: Path) -> None:
    place, files = tmp_path / "saves", tmp_path / "files"
    files.mkdir()
    checkpoint = {"shoal": {"average": {"decay": DECAY}, "checkpoint": {"path": str(place), "every_steps": 4}}}
    with Crew("abc", with_options(in_form(form, files, max_steps=9), checkpoint)) as crew:
        crew.train_to(5)
        saved(crew, 4)
    (found,) = [one for one in checkpoints(LocalStorage(place), lambda _: None) if one.manifest.step == 4]
    assert verify(found.reader()).fingerprint == reference(in_memory(form, max_steps=4))
    resume = {"shoal": {"average": {"decay": DECAY}, "checkpoint": {"resume": found.path}}}
    with Crew("ab", with_options(in_form("0", files, max_steps=9), {**options_of(form), **resume})) as crew:
        assert crew.finish() == reference(in_memory(form, max_steps=9))


def options_of(form: str) -> dict[str, Any]:
    return {"precision": FORMS[form]["precision"]} if "precision" in FORMS[form] else {}


def with_options(task: Task, more: dict[str, Any]) -> Task:
    return replace(task, options={**task.options, **more})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_a_job_without_averages_begins_them_with_its_weights(
    stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And averages that a job does not keep any more are left out."""
    before = {"max_steps": 9, "stage": stage, "lanes": 1}
    place = {"path": str(tmp_path), "every_steps": 4}
    with Crew("a", Task({**before, "shoal": {"checkpoint": place}})) as crew:
        crew.train_to(5)
        saved(crew, 4)
    (found,) = [one for one in checkpoints(LocalStorage(tmp_path), lambda _: None) if one.manifest.step == 4]
    later = {"path": str(tmp_path / "later"), "every_steps": 7}
    task = Task({**before, "shoal": {"average": {"decay": DECAY}, "checkpoint": {**later, "resume": found.path}}})
    with Crew("a", task) as crew:
        crew.train_to(8)
        saved(crew, 7)
        crew.finish()
        ours = averages_of(crew.workers["a"].engine)
    assert "they begin with the weights" in capsys.readouterr().err
    (made,) = checkpoints(LocalStorage(tmp_path / "later"), lambda _: None)
    _, torchs = averaged_by_torch(Task({**before, "shoal": {"average": {"decay": DECAY}}}), 1, 4)
    assert all(torch.equal(ours[name], value) for name, value in torchs.module.named_parameters() if name in ours)
    with Crew("a", Task({**before, "shoal": {"checkpoint": {"resume": made.path}}})) as crew:
        assert crew.finish() == reference(Task(before))
    assert "are left out" in capsys.readouterr().err


# ---- reading them

Values = dict[str, Tensor]  # each of its parameter's shape


def values_of(module: nn.Module) -> Values:
    """Copies of all trained parameters."""
    return {name: one.detach().clone() for name, one in module.named_parameters() if one.requires_grad}


@rule(
    "What a script reads as averages are those of the last step, whole, from their owners, whichever member asks, and "
    "none but it; what it trains afterwards has the bits that it has without",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.blocks.segments", "if segment.average is None:\n            return", "if True:\n            return"
        ),
        Edit(
            "shoal.training.whole_averages", "                    values.of(stretch).copy_", "                    copy("
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["", "bf16"])
def test_one_member_alone_evaluates_with_averages(stage: int, form: str) -> None:
    """Which are those that a worker alone holds."""
    precision = {"precision": BF16} if form else {}
    alone: list[Values] = []

    def keep(engine: Engine) -> None:
        found = averages_of(engine).items()
        alone.append({name: value.to(torch.bfloat16 if form else value.dtype) for name, value in found})

    undisturbed(Task(options(**precision), prepare=lambda engine: engine.on_commit(keep)))
    seen: dict[int, Values] = {}

    def look(engine: Engine) -> None:
        if engine.rank == 1 and engine.global_step not in seen:
            with engine.evaluating(), engine.averaged():
                engine.module(**collated(engine))
                with engine.gathered():
                    seen[engine.global_step] = values_of(engine.module)

    with Crew("abc", Task(options(stage=stage, **precision), in_loop=look)) as crew:
        assert crew.finish() == reference(Task(options(**precision)))
    assert len(seen) > 2
    for step, values in seen.items():
        if step:
            assert all(torch.equal(values[name], value) for name, value in alone[step - 1].items())


def collated(engine: Engine) -> Any:
    samples = Samples(4)
    return engine.context.loop.collate(samples, [0, 1])


@holds("What a script reads as averages")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_teacher_of_averages_runs_within_a_lane_in_every_world(stage: int) -> None:
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
    with Crew("abc", replace(task, options={**task.options, "stage": stage})) as crew:
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["in the body", "after the loop"])
def test_averages_are_exported(stage: int, where: str, tmp_path: Path) -> None:
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

    with Crew("abc", Task(options(stage=stage), script=script)) as crew:
        assert crew.finish() == reference(Task(options()))
    alone: list[Values] = []
    keep = Task(options(), prepare=lambda engine: engine.on_commit(lambda one: alone.append(averages_of(one))))
    undisturbed(keep)
    found = load_file(path)
    expected = alone[3 if where == "in the body" else -1]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
