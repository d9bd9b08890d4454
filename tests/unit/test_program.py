"""What `shoal run` starts in a worker, and the name that a job gets from it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from forked_command import shoal
from shoal_controller.cli.run import command_of, job_of
from tiers import check


def test_a_job_is_named_after_its_script() -> None:
    assert [job_of(Path(name), False, []) for name in ("train.py", "a/Train_GPT 2.py", "__.py")] == [
        "train",
        "Train_GPT-2",
        "job",
    ]
    assert job_of(Path("package.train"), True, [__file__]) == "package.train"
    assert job_of(Path("bash"), False, ["-e", __file__]) == "test_program"


def test_a_worker_runs_a_script_a_module_or_any_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in {"train.py": 0o755, "train": 0o644, "run.sh": 0o755}.items():
        (tmp_path / name).touch(mode)
    python = sys.executable
    assert command_of(Path("train.py"), False, ["1"]) == [python, str(tmp_path / "train.py"), "1"]
    assert command_of(Path("train"), False, []) == [python, str(tmp_path / "train")], "nobody may execute it"
    assert command_of(Path("run.sh"), False, ["-x"]) == [str(tmp_path / "run.sh"), "-x"]
    assert command_of(Path("a.b"), True, ["--lr", "1"]) == [python, "-m", "a.b", "--lr", "1"]
    assert command_of(Path("env"), False, ["A=1"]) == [shutil.which("env"), "A=1"]


@check("starts commands")
@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("lesson.ipynb", "lesson.ipynb is a notebook, and workers run scripts; make one of it with `jupyter nbconvert"),
        ("tran.py", "tran.py is neither a file nor a program on the PATH; expected a Python script, a module by -m"),
        (".", ". is a folder; expected a script, or a module by -m"),
    ],
)
def test_what_no_worker_can_run_is_refused_by_name(program: str, sentence: str) -> None:
    done = shoal("run", program)
    assert (done.returncode, done.stdout) == (2, "") and f"Invalid value for 'SCRIPT': {sentence}" in done.stderr
