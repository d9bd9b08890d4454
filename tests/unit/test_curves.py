"""The curve of a job as a file, bounded, over controllers; and the picture that `shoal plot` draws of it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from shoal_controller.cli.display import seconds_left, time_left
from shoal_controller.cli.endings import ending
from shoal_controller.cli.plot import place_of, plot, reported, throughput
from shoal_controller.core.machine.view import Sample
from shoal_controller.observe.curves import COLUMNS, LOOK_SECONDS, MOST_LINES, Curves, Points, curve_file, read_curve
from shoal_protos.errors import NotFound


def points(step: int, active: int = 2, run: str = "r1", reports: Mapping[str, float] | None = None) -> Points:
    return {("mlp", run): Sample(step, 1 / (step + 1), None, 8 * step, 0.0, active, 2, reports or {})}


def test_a_curve_has_a_line_for_each_look_at_which_step_or_world_is_another(tmp_path: Path) -> None:
    kept = Curves(tmp_path)
    for now, (step, active) in enumerate([(1, 2), (1, 2), (3, 2), (3, 1), (2, 1)]):
        kept.write(points(step, active), float(now))
    path = curve_file(tmp_path, "mlp")
    assert path is not None
    assert [(row["time"], row["step"], row["world_size"]) for row in read_curve(path)] == [
        (0, 1, 2), (2, 3, 2), (3, 3, 1), (4, 2, 1),
    ]  # fmt: skip
    Curves(tmp_path).write(points(4), 9.0)
    assert [row["step"] for row in read_curve(path)] == [1, 3, 3, 2, 4], "the next controller goes on with it"


def test_numbers_that_a_script_reports_are_columns_and_panels(tmp_path: Path) -> None:
    kept, steps = Curves(tmp_path), iter(range(1, 9))
    for reports in ({}, {"a,b": 0.5}, {"a,b": 0.5, "seen": 3.0}, {"seen": 4.0}):
        kept.write(points(step := next(steps), reports=reports), float(step))
    Curves(tmp_path).write(points(5, reports={"seen": 5.0}), 5.0)
    read = read_curve(curve_file(tmp_path, "mlp"))  # type: ignore[arg-type]
    assert [(row.get("a,b"), row.get("seen")) for row in read] == [
        (None, None), (0.5, None), (0.5, 3.0), (None, 4.0), (None, 5.0),
    ]  # fmt: skip
    assert reported(read) == ["a,b", "seen"]
    plot("mlp", tmp_path / "mlp.png", tmp_path)
    assert struct.unpack(">II", (tmp_path / "mlp.png").read_bytes()[16:24])[1] > 770, "each has a panel of its own"
    kept.write(points(6, reports=dict.fromkeys(map(str, range(99)), 1.0)), 6.0)
    assert len(read_curve(curve_file(tmp_path, "mlp"))[-1]) == len(COLUMNS) + 30  # type: ignore[arg-type]


def test_a_full_curve_loses_every_second_line_and_comes_half_as_often(tmp_path: Path) -> None:
    kept = Curves(tmp_path)
    path = tmp_path / "curves" / "mlp" / "r1.csv"
    path.parent.mkdir(parents=True)
    lines = [f"{step},{8 * step},{step}.0,2,0.5" for step in range(1, MOST_LINES + 1)]
    path.write_text("\n".join(["step,samples,time,world_size,loss", *lines, ""]))
    kept.write(points(MOST_LINES + 1), float(MOST_LINES + 1))
    assert [row["step"] for row in read_curve(path)] == list(range(2, MOST_LINES + 1, 2))
    kept.write(points(MOST_LINES + 2), MOST_LINES + 1 + LOOK_SECONDS / 2)
    kept.write(points(MOST_LINES + 3), MOST_LINES + 1 + LOOK_SECONDS)
    assert [row["step"] for row in read_curve(path)][-2:] == [MOST_LINES, MOST_LINES + 3]


def test_files_of_replaced_runs_and_forgotten_jobs_go(tmp_path: Path) -> None:
    kept = Curves(tmp_path)
    kept.write(points(1), 0.0)
    kept.write(points(1, run="r2"), 1.0)
    assert [file.name for file in (tmp_path / "curves" / "mlp").iterdir()] == ["r2.csv"]
    kept.write({}, 2.0)
    assert not (tmp_path / "curves" / "mlp").exists()


def test_a_curve_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "curves").write_text("")
    kept = Curves(tmp_path)
    for step in (1, 2):
        kept.write(points(step), float(step))
    assert "".join(capsys.readouterr()).count("a job's curve cannot be written") == 1


def test_a_picture_is_drawn_of_a_job_and_of_a_file_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = Curves(tmp_path)
    for step in range(1, 20):
        kept.write(points(step, active=1 + step % 3), 3.0 * step)
    plot("mlp", None, tmp_path)
    assert capsys.readouterr().out == "mlp.png: steps 1 to 19 of mlp\n"
    written = (tmp_path / "mlp.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", written[16:24]) == (990, 770)
    steps = tmp_path / "steps.csv"
    steps.write_text("step,samples,time,world_size,loss,lr\n1,8,10.0,2,0.5,0.1\n2,16,12.0,2,0.25,0.1\n")
    plot("steps.csv", tmp_path / "other.png", tmp_path)
    assert (tmp_path / "other.png").read_bytes()[:4] == b"\x89PNG"


def test_throughput_is_never_below_zero_where_a_job_goes_back() -> None:
    rows = [{"time": t, "samples": s} for t, s in ((0.0, 0.0), (1.0, 8.0), (2.0, 16.0), (3.0, 0.0), (3.0, 0.0))]
    assert throughput(rows) == [8.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("step,loss\n1,0.5\n", "is not a curve of a job: it has no column samples, time, world_size"),
        ("step,samples,time,world_size,loss\n", "has 0 of the 2 steps that a curve needs"),
        (
            "step,samples,time,world_size,loss\n1,x,2,3,4\n",
            "is not a curve of a job: could not convert string",
        ),
    ],
)
def test_what_is_no_curve_is_one_sentence(
    content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.csv").write_text(content)
    assert ending(plot, {"job": str(tmp_path / "some.csv"), "data": tmp_path}) == 2
    assert sentence in capsys.readouterr().err


def test_a_job_without_a_curve_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no curve of a job mlp; a controller keeps it in its data folder"):
        place_of("mlp", tmp_path)


def test_the_time_that_is_left_is_of_the_steps_that_are_left() -> None:
    assert seconds_left(20, 100, 160, 16.0) == 40.0
    assert [seconds_left(0, 100, 0, None), seconds_left(20, None, 160, 16.0)] == [None, None]
    assert [time_left(s) for s in (None, 40.2, 200, 7500, 273600)] == [
        "", "40 s left", "3 min 20 s left", "2 h 5 min left", "3 d 4 h left",
    ]  # fmt: skip
