"""The callbacks of `shoal.callbacks`: one continuous run through kills, joins and rollbacks; refusals in a sentence."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from crew import Crew, Task, engine_of, train, undisturbed
from shoal.callbacks import CSV, MLflow, Progress, TensorBoard, WandB, step_callback
from shoal.callbacks.step_callback import line_of
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from shoal_protos.log_stream import in_short
from shoal_protos.text import duration, number

OPTIONS = {"max_steps": 6}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def trained(callback: Any, options: dict[str, Any] = OPTIONS) -> Engine:
    """A world of one, to its end."""
    engine = engine_of(Task(options), AloneLink(), Faults([]))
    engine.on_step(callback)
    train(engine, Task(options), lambda: None)
    return engine


@pytest.mark.parametrize("point", ["vote", "hand_out"])
def test_a_csv_file_reads_through_a_kill_of_rank_0_as_that_of_an_undisturbed_job(tmp_path: Path, point: str) -> None:
    trained(CSV(tmp_path / "alone.csv"))
    task = Task(OPTIONS, prepare=lambda engine: engine.on_step(CSV(tmp_path / "job.csv")))
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.plant("a", 4, point)
        assert crew.finish() == undisturbed(Task(OPTIONS))
    found, expected = rows(tmp_path / "job.csv"), rows(tmp_path / "alone.csv")
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]
    for name in ("step", "samples", "loss", "lr"):
        assert [row[name] for row in found] == [row[name] for row in expected]
    assert [row["world_size"] for row in found] == ["3", "3", "3", found[3]["world_size"], "2", "2"]


def test_a_step_that_is_made_again_replaces_what_came_after_it(tmp_path: Path) -> None:
    """And a line that was being written when its worker was killed is no line; new numbers get columns."""
    path = tmp_path / "steps.csv"
    path.write_text("step,samples,loss\n1,8,0.5\n2,16,0.25\n7,56,0.125\n8,6")
    trained(CSV(path), {"max_steps": 2})
    found = rows(path)
    assert [row["step"] for row in found] == ["1", "2"]
    assert list(found[0]) == ["step", "samples", "time", "world_size", "loss", "lr", "lr_1"]
    path.write_text("step,samples,loss\n0,0,0.5\n")
    trained(CSV(path), {"max_steps": 1})
    assert [(row["step"], row["world_size"]) for row in rows(path)] == [("0", ""), ("1", "1")]
    assert list(rows(path)[0]) == ["step", "samples", "loss", "time", "world_size", "lr", "lr_1"]


def test_reported_numbers_get_columns_when_they_first_come(tmp_path: Path) -> None:
    def report(engine: Engine) -> None:
        if engine.global_step >= 1:
            engine.report(accuracy=0.5)

    task = Task({"max_steps": 3}, in_loop=report)
    engine = engine_of(task, AloneLink(), Faults([]))
    engine.on_step(CSV(tmp_path / "new" / "steps.csv"))
    train(engine, task, lambda: None)
    assert [row["accuracy"] for row in rows(tmp_path / "new" / "steps.csv")] == ["", "0.5", "0.5"]


def test_tensorboard_shows_one_run_where_steps_were_made_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(TensorBoard(tmp_path), {"max_steps": 4})
    engine = trained(TensorBoard(tmp_path), {"max_steps": 3})
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [scalar.step for scalar in found] == [1, 2, 3]
    assert found[-1].value == pytest.approx(engine.loss)


def test_a_run_of_weights_and_biases_has_the_id_of_the_jobs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in; `make trackers` does it with the package itself."""
    calls: list[tuple[str, Any]] = []

    def note(name: str) -> Any:
        return lambda *of, **named: calls.append((name, of or named))

    run = SimpleNamespace(log=note("log"), define_metric=note("metric"), finish=note("finish"))
    fake = ModuleType("wandb")
    fake.init = lambda **named: calls.append(("init", named)) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    engine = trained(WandB("mine", mode="offline"), {"max_steps": 2})
    assert [name for name, _ in calls] == ["init", "metric", "log", "log", "finish"]
    assert calls[0][1]["id"] == engine.context.link.job.run and calls[0][1]["resume"] == "allow"
    assert calls[3][1][0]["loss"] == engine.loss
    with pytest.raises(UserError, match="mode is 'of'; allowed are online, offline, disabled"):
        WandB("mine", mode="of")


def test_a_tracker_that_fails_says_so_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = CSV(tmp_path / "steps.csv")
    (tmp_path / "steps.csv").unlink()
    (tmp_path / "steps.csv").mkdir()
    assert trained(tracker).global_step == 6
    errors = capsys.readouterr().err
    assert errors.count("tracker_failed") == 1 and "Is a directory" in errors


@pytest.mark.parametrize("tracker", [TensorBoard, WandB, MLflow])
def test_a_tracker_that_is_not_installed_or_cannot_be_imported_is_one_sentence(
    tracker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tracker.__name__.lower()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"which is not installed: pip install \w+\."):
        tracker("somewhere")
    (tmp_path / f"{package}.py").write_text("raise ImportError('cannot import name runtime_version')")
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.syspath_prepend(tmp_path)
    why = rf"package {package}, which cannot be imported \(ImportError: cannot import name runtime_version\): mend it\."
    with pytest.raises(UserError, match=why):
        tracker("somewhere")


def test_a_tracker_that_cannot_write_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("name,age\n")
    with pytest.raises(UserError, match=r"CSV: .* cannot be made \(File exists\); name a folder that all"):
        CSV(tmp_path / "file" / "steps.csv")
    with pytest.raises(UserError, match=r"CSV: .* cannot be written \(Is a directory\); name another file"):
        CSV(tmp_path)
    with pytest.raises(UserError, match=r"is not a file of steps \(its first line is 'name,age'\); name another"):
        CSV(tmp_path / "file")
    with pytest.raises(UserError, match=r"TensorBoard: .* cannot be made \(Not a directory\)"):
        TensorBoard(tmp_path / "file" / "runs")


def test_the_progress_line_names_step_loss_speed_time_left_and_world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 2))
    monkeypatch.setattr(step_callback, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    samples = trained(Progress(every_steps=2)).context.config.train_batch_size
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 1/6", "step 2/6", "step 4/6", "step 6/6"]
    assert lines[2].endswith(f", {samples} samples/s, 2 s left, world of 1")
    with pytest.raises(UserError, match="every_steps is 0; expected a number from 1"):
        Progress(every_steps=0)


def test_durations_are_rounded_for_people() -> None:
    assert [duration(s) for s in (0.4, 59, 200, 7500, 273600)] == [
        "0 s", "59 s", "3 min 20 s", "2 h 5 min", "3 d 4 h",
    ]  # fmt: skip
    assert duration(19 * 60 + 25) == "19 min"
    assert line_of(3, -1, 0.5, 2.0, 8, 1) == "step 3, loss 0.5, 16 samples/s, world of 1"
    assert line_of(80, 40, 28.928330421447754, 220.0, 8, 1) == "step 80, loss 28.93, 1760 samples/s, world of 1"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (0.0, "0"), (1.25, "1.25"), (28.928330421447754, "28.93"), (1759.8, "1760"), (123456.0, "123500"),
        (0.000123456, "0.0001235"), (-2.0, "-2"), (3.2e-7, "3.2e-07"), (6.022e23, "6.022e+23"),
        (float("nan"), "nan"), (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_numbers_have_four_significant_digits_and_no_exponent_where_people_write_none(
    value: float | None, shown: str
) -> None:
    assert number(value) == shown


def test_log_entries_in_a_terminal_have_short_numbers_too() -> None:
    entry = {"loss": 28.928330421447754, "lr": [1 / 3], "step": 7, "event": "progress"}
    assert in_short(None, "info", entry) == {"loss": 28.93, "lr": [0.3333], "step": 7, "event": "progress"}
