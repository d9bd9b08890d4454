"""Averages of weights beside the blocks: torch's own arithmetic; equal bits in every world, stage and precision."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from averages import (
    DECAY,
    FORMS,
    FP16,
    STEPS,
    averaged_by_torch,
    averages_of,
    in_form,
    in_memory,
    options,
    options_of,
    with_options,
)
from crew import ONE_AT_A_TIME, Crew, Task, undisturbed
from crew_saves import saved
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.storage import LocalStorage
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from tiers import check
from torch import Tensor
from unit.test_turns import Gan, constant
from unit.test_turns import body as gan_body
from unit.test_turns import optimizer_of as gan_optimizer
from unit.test_unused_parameters import Towers, adamw, by_step

pytestmark = check("trains many small jobs")


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


def test_averages_that_are_to_begin_later_than_a_checkpoints_begin_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"max_steps": 9, "lanes": 1}

    def task(average: dict[str, Any], **checkpoint: Any) -> Task:
        return Task({**before, "shoal": {"average": average, "checkpoint": {"path": str(tmp_path), **checkpoint}}})

    with Crew("a", task({"decay": DECAY}, every_steps=4)) as crew:
        crew.train_to(5)
        saved(crew, 4)
    (found,) = [one for one in checkpoints(LocalStorage(tmp_path), lambda _: None) if one.manifest.step == 4]
    later = {"decay": DECAY, "from_step": 6}
    with Crew("a", task(later, resume=found.path)) as crew:
        assert crew.finish() == reference(Task({**before, "shoal": {"average": later}}))
    assert "this job begins its own after step 6" in capsys.readouterr().err
