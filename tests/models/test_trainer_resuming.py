"""A Trainer's job that is resumed: the run's part of its state, the arguments of the second start, which checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from models.trainer_scripts import (
    STEPS,
    STEPS_PER_EPOCH,
    Library,
    Script,
    column,
    door,
    gpt2,
    transformers,
    untimed_log,
)
from rule import Edit, holds, rule
from shoal.integrations.transformers import elastic_run
from shoal_protos.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED = STEPS_PER_EPOCH
"""The step whose checkpoint the second start is given."""
FIRST: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": SAVED}
FOLDER = f"checkpoint-{SAVED}"


def test_each_field_of_the_librarys_state_is_the_runs_the_arguments_or_the_workers() -> None:
    names = [field.name for field in dataclasses.fields(transformers.TrainerState)]
    kinds = [*elastic_run.OF_THE_RUN, *elastic_run.OF_THE_ARGUMENTS, *elastic_run.OF_THE_WORKER]
    assert sorted(kinds) == sorted(names)


class Unhurried:
    """No step begins before the save at hand is written, so none is skipped."""

    def training_step(self, *more: Any, **named: Any) -> Any:
        saver = self.engine.parts.saving._saver  # type: ignore[attr-defined]
        if saver is not None:
            saver.join()
        return super().training_step(*more, **named)  # type: ignore[misc]


@rule(
    "A Trainer that is resumed takes over the progress of its run, and has from its own arguments how long and how "
    "often: it ends where they say",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.integrations.transformers.elastic_run",
            "        for name in OF_THE_RUN:\n",
            "        for name in (*OF_THE_RUN, *OF_THE_ARGUMENTS):\n",
        ),
        Edit(
            "shoal.integrations.transformers.elastic_run",
            "        alike = given.get(name) == given_then.get(name)\n",
            "        alike = True\n",
            by="test_what_a_callback_is_made_with_is_the_scripts_and_what_it_has_counted_the_runs",
        ),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_train_epochs": 4},
        {"num_train_epochs": 2.5},
        {"max_steps": 10},
        {"max_steps": 6},
        {"num_train_epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("saved", [SAVED, 2 * SAVED])
def test_a_job_resumed_for_longer_or_shorter_ends_where_the_original_does(
    saved: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    ended = []
    for name, start, mixin in (("original", Script.original, object), ("elastic", Script.alone, Unhurried)):
        start(Script(tmp_path / name, FIRST, mixin=mixin))
        again = Script(tmp_path / name, {**FIRST, **arguments}, resume=str(tmp_path / name / f"checkpoint-{saved}"))
        ended.append(start(again))
    original, elastic = ended
    for name in ("global_step", "max_steps", "num_train_epochs", "epoch"):
        assert getattr(elastic.state, name) == pytest.approx(getattr(original.state, name)), name
    for name in ("step", "loss", "learning_rate"):
        assert column(elastic, name) == pytest.approx(column(original, name), rel=2e-3, abs=1e-6), name
    if elastic.state.global_step > saved:
        folders = [tmp_path / name / f"checkpoint-{elastic.state.global_step}" for name in ("original", "elastic")]
        written = [json.loads((folder / "trainer_state.json").read_text()) for folder in folders]
        assert [one["max_steps"] for one in written] == [original.state.max_steps] * 2


@holds("A Trainer that is resumed")
def test_how_often_a_resumed_job_logs_and_saves_is_as_its_arguments_say_and_warnings_name_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Script(tmp_path, {**FIRST, "save_total_limit": 5}, mixin=Unhurried).alone()
    capsys.readouterr()
    more = {**FIRST, "num_train_epochs": 3, "logging_steps": 4, "save_steps": 6}
    with Library() as library:
        again = Script(
            tmp_path, {**more, "log_level": "warning"}, resume=str(tmp_path / FOLDER), mixin=Unhurried
        ).alone()
    log = capsys.readouterr().err
    assert column(again, "step")[:-1] == [1, 2, 3, 4, 8, 12]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (4, 6, 8, 12)}
    assert {"step-000000000006", "step-000000000012"} <= {path.name[:17] for path in (tmp_path / "elastic").iterdir()}
    assert log.count("resumed_with_other_arguments") == 1
    for differs in ("8 then, 12 now", "2 then, 3 now"):
        assert differs in log
    for differs in ("logging_steps: 4 (from args) != 1 (from", "save_steps: 6 (from args) != 4 (from"):
        assert differs in library.logged
    assert first.state.max_steps == 8


class Long(Unhurried):
    """As if it had trained for a thousand seconds before each save."""

    def _save_checkpoint(self, *more: Any) -> None:
        self._run.kept.start_time -= 1000  # type: ignore[attr-defined]
        super()._save_checkpoint(*more)  # type: ignore[misc]


def test_a_resumed_jobs_figures_per_second_are_of_the_time_in_which_all_of_its_steps_were_made(tmp_path: Path) -> None:
    Script(tmp_path, FIRST, mixin=Long).alone()
    more = {"num_train_epochs": 3, "save_steps": 100, "include_num_input_tokens_seen": "all"}
    again = Script(tmp_path, {**FIRST, **more}, resume=str(tmp_path / FOLDER)).alone()
    assert 1000 < column(again, "train_runtime")[-1] < 2000
    assert column(again, "train_steps_per_second")[-1] == pytest.approx(STEPS / 1000, rel=0.5)
    assert column(again, "train_tokens_per_second")[-1] < 10


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_a_job_resumed_for_longer_has_the_same_bits_in_worlds_of_1_to_4(names: str, tmp_path: Path) -> None:
    Script(tmp_path, FIRST).alone()
    more = Script(tmp_path, {**FIRST, "save_steps": 100, "num_train_epochs": 4}, resume=str(tmp_path / FOLDER))
    right = replace(more, folder=tmp_path / "alone").alone()
    with Crew(names, replace(more, folder=tmp_path / "crew").task(kept := list[Any]())) as crew:
        assert crew.finish() == right.fingerprint
    assert [untimed_log(trainer) for trainer in kept] == [untimed_log(right)] * len(names)
    assert right.state.global_step == 4 * STEPS_PER_EPOCH


# ---- callbacks


class Counts(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc]
    """Is made with a goal, which it raises at each epoch where it is to, and counts steps."""

    def __init__(self, goal: float = 0.0, raises: bool = False) -> None:
        self.goal, self.raises, self.steps = goal, raises, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.goal += self.raises

    def state(self) -> dict[str, Any]:
        return {"args": {"goal": self.goal, "raises": self.raises}, "attributes": {"steps": self.steps}}


def counting(trainer: Any) -> Counts:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, Counts))


@holds("A Trainer that is resumed")
@pytest.mark.parametrize(
    ("then", "now", "restores", "goal"),
    [
        ((0.25,), (0.75,), False, 0.75),
        ((0.25,), (0.75,), True, 0.25),
        ((0.25, True), (0.25, True), False, 0.25 + 3),
        ((0.25, True), (0.75, True), False, 0.75 + 2),
    ],
    ids=["another", "another, and the saved one is asked for", "the same", "another, that changes"],
)
def test_what_a_callback_is_made_with_is_the_scripts_and_what_it_has_counted_the_runs(
    then: tuple[Any, ...], now: tuple[Any, ...], restores: bool, goal: float, tmp_path: Path
) -> None:
    Script(tmp_path, FIRST, {"callbacks": lambda: [Counts(*then)]}).alone()
    arguments = {**FIRST, "num_train_epochs": 3, "restore_callback_states_from_checkpoint": restores}
    given = {"callbacks": lambda: [Counts(*now)]}
    again = counting(Script(tmp_path, arguments, given, resume=str(tmp_path / FOLDER)).alone())
    assert (again.goal, again.steps) == (goal, STEPS)


def test_a_joiners_callback_has_what_the_others_have_made_of_their_arguments(tmp_path: Path) -> None:
    given = {"callbacks": lambda: [Counts(0.25, True)]}
    with Crew("ab", Script(tmp_path, {}, given).task(kept := list[Any]())) as crew:
        crew.train_to(STEPS_PER_EPOCH + 1)
        crew.add("c")
        crew.finish()
    assert [(counting(trainer).goal, counting(trainer).steps) for trainer in kept] == [(3.25, STEPS)] * 3


def test_a_callback_that_a_resumed_script_has_no_more_is_named(tmp_path: Path) -> None:
    Script(tmp_path, FIRST, {"callbacks": lambda: [Counts(1.0)]}).alone()
    again = Script(tmp_path, {**FIRST, "num_train_epochs": 3, "log_level": "warning"}, resume=str(tmp_path / FOLDER))
    with Library() as library:
        replace(again, folder=tmp_path / "whole", given={"callbacks": lambda: [Counts(1.0)]}).alone()
        assert "Checkpoint included callbacks" not in library.logged
        again.alone()
    assert "Checkpoint included callbacks not included in current configuration. Ignoring. (Counts)" in library.logged


class Clips(transformers.TrainerCallback):  # type: ignore[misc]
    """Would act on gradients."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Would clip."""


class Brings(transformers.TrainerCallback):  # type: ignore[misc]
    """Adds another one in the middle of training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.trainer.callback_handler.add_callback(Clips())


def _by_attribute(trainer: Any) -> None:
    callback = transformers.TrainerCallback()
    callback.on_pre_optimizer_step = lambda *_, **__: None
    trainer.add_callback(callback)


WAYS = {
    "add_callback, an object": lambda trainer: trainer.add_callback(Clips()),
    "add_callback, a class": lambda trainer: trainer.add_callback(Clips),
    "the handler": lambda trainer: trainer.callback_handler.add_callback(Clips),
    "an attribute": _by_attribute,
    "a callback": lambda trainer: trainer.add_callback(Brings(trainer)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_callback_that_would_act_on_gradients_is_refused_however_it_comes(way: str, tmp_path: Path) -> None:
    trainer = Script(tmp_path).trainer(door)
    with pytest.raises(UserError, match="has on_pre_optimizer_step, which cannot be honoured"):
        WAYS[way](trainer)
        trainer.train()


# ---- which checkpoint


def parts(folder: Path, step: int) -> Iterator[Path]:
    """The elastic checkpoints of that step."""
    return (folder / "elastic").glob(f"step-{step:012d}-*")


def lose(folder: Path, step: int) -> None:
    for part in parts(folder, step):
        shutil.rmtree(part)


def cut_short(folder: Path, step: int) -> None:
    for part in parts(folder, step):
        (part / "manifest.json").unlink()


EVERY_EPOCH = {"save_strategy": "epoch"}


@pytest.fixture
def whole(tmp_path: Path) -> Any:
    return Script(tmp_path, EVERY_EPOCH, model=lambda: gpt2(0.1), mixin=Unhurried).alone()


def again(folder: Path, resume: str | bool, **more: Any) -> Script:
    return Script(folder, {**EVERY_EPOCH, "save_total_limit": 9, **more}, model=lambda: gpt2(0.1), resume=resume)


@pytest.mark.parametrize("harm", [lose, cut_short])
@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_folder_whose_elastic_part_is_missing_means_the_newest_before_it(
    names: str, harm: Any, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(tmp_path, STEPS)
    last = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    assert Path(last).name == f"checkpoint-{STEPS}"
    capsys.readouterr()
    with Crew(names, again(tmp_path, last).task()) as crew:
        assert crew.finish() == whole.fingerprint
    log = capsys.readouterr().err
    assert f"training goes on from step {2 * STEPS_PER_EPOCH}" in log


def test_where_the_very_first_save_was_cut_short_a_script_that_names_it_begins_anew(
    whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2 * STEPS_PER_EPOCH, STEPS):
        lose(tmp_path, step)
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    cut_short(tmp_path, STEPS_PER_EPOCH)
    for resume in (str(tmp_path / FOLDER), True):
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"copy {resume is True}"))
        named = str(copy / FOLDER) if resume is not True else True
        assert again(copy, named).alone().fingerprint == whole.fingerprint
        assert "the first save of its run was cut short; training begins at step 0" in capsys.readouterr().err


def test_a_job_that_began_anew_in_a_used_folder_does_not_go_on_from_what_another_run_has_saved_there(
    whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {one.name for step in (4, 8, 12) for one in parts(tmp_path, step)}
    other = Script(
        tmp_path, {**EVERY_EPOCH, "seed": 11, "num_train_epochs": 1}, model=lambda: gpt2(0.1), mixin=Unhurried
    )
    other.alone()
    (mine,) = [one for one in parts(tmp_path, STEPS_PER_EPOCH) if one.name not in before]
    (mine / "manifest.json").unlink()
    capsys.readouterr()
    resumed = replace(
        other, arguments={**other.arguments, "num_train_epochs": 2}, resume=str(tmp_path / FOLDER)
    ).alone()
    assert "the first save of its run was cut short; training begins at step 0" in capsys.readouterr().err
    right = replace(other, folder=tmp_path / "right", arguments={**other.arguments, "num_train_epochs": 2}).alone()
    assert resumed.fingerprint == right.fingerprint


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: [lose(folder, step) for step in (4, 8, 12)], "of step 4 or before; there are none"),
        (lambda folder: lose(folder, 4), r"of step 4 or before; there are \[8, 12\]"),
        (lambda folder: shutil.rmtree(folder / "elastic"), "save_only_model"),
        (lambda folder: (folder / FOLDER / "trainer_state.json").write_text("{"), "trainer_state.json cannot be read"),
    ],
    ids=["all lost", "later ones alone", "no elastic ones", "no folder of a Trainer"],
)  # fmt: skip
def test_a_folder_that_there_is_nothing_to_go_on_from_is_refused(
    harm: Any, sentence: str, whole: Any, tmp_path: Path
) -> None:
    harm(tmp_path)
    with pytest.raises(UserError, match=sentence):
        again(tmp_path, str(tmp_path / FOLDER)).alone()


@pytest.mark.parametrize("resume", ["out/checkpoint-7", True], ids=["a folder", "the newest"])
def test_a_worker_that_joins_a_job_under_way_goes_on_with_it_and_ignores_the_argument(
    resume: str | bool, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CONTROLLER", "localhost:1")
    script = Script(tmp_path / "crew", EVERY_EPOCH, model=lambda: gpt2(0.1))
    with Crew("ab", script.task()) as crew:
        crew.train_to(2)
        crew.kill("b")
        crew.add("c", replace(script, resume=resume).task())
        assert crew.finish() == whole.fingerprint
        assert not crew.workers["c"].failure


def test_a_job_that_begins_by_a_folder_that_is_not_there_is_refused_on_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CONTROLLER", "localhost:1")
    with Crew("ab", Script(tmp_path, EVERY_EPOCH, resume="out/checkpoint-7").task()) as crew:
        crew.until("both", lambda: all(not worker.alive for worker in crew.workers.values()))
        assert all("out/checkpoint-7" in worker.failure for worker in crew.workers.values())
