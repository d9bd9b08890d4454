"""The program that runs transformers' own tests, and its list; the run itself is `make trainer-upstream`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models.upstream import DIFFERS, ELSEWHERE, PASSES, VERDICTS, Verdict, differences, left_out, listed, main


def test_each_listed_name_has_a_known_verdict_and_a_reason_where_it_does_not_pass() -> None:
    names = listed()
    assert names
    for name, one in names.items():
        file = name.partition("::")[0]
        assert file.endswith(".py") and file not in left_out(), name
        assert one.verdict in VERDICTS and (one.reason or one.verdict == PASSES), name
    assert all(left_out().values())


LISTED = {
    "a": Verdict(PASSES, ""),
    "b": Verdict(DIFFERS, "by design"),
    "c.py::c": Verdict(ELSEWHERE, "wants a GPU"),
}


@pytest.mark.parametrize(
    ("outcomes", "whole", "sentences"),
    [
        ({"a": "passed", "b": "failed", "c.py::c": "skipped"}, True, []),
        ({"a": "failed", "b": "failed", "c.py::c": "failed"}, True, ["a has failed"]),
        ({"a": "passed", "b": "passed", "c.py::c": "passed"}, True, ["b has passed"]),
        ({"a": "skipped", "b": "failed", "c.py::c": "passed"}, True, ["a has skipped"]),
        ({"a": "passed"}, True, ["b is in the list and was not run", "c.py::c is in the list and was not run"]),
        ({"a": "passed", "b": "failed", "c.py": "failed"}, True, ["c.py is not in the list"]),
        ({"a": "passed"}, False, []),
        ({"e": "passed"}, False, ["e is not in the list"]),
    ],
)
def test_what_a_run_gives_is_compared_name_by_name(outcomes: dict[str, str], whole: bool, sentences: list[str]) -> None:
    found = differences(outcomes, LISTED, whole)
    assert len(found) == len(sentences)
    assert all(one.startswith(sentence) for one, sentence in zip(found, sentences, strict=True))


def test_a_missing_or_wrong_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [""], [str(tmp_path)], [str(tmp_path / "none")]):
        assert main(arguments) == 2
        (log,) = capsys.readouterr().err.splitlines()
        assert log.startswith("make trainer-upstream was given ") and "FOLDER=" in log


def test_the_tests_of_a_folder_run_with_shoals_trainer_and_are_looked_for_in_the_list(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(
        "from transformers import Seq2SeqTrainer, Trainer\n"
        "def test_whose():\n    assert 'shoal' in Trainer.__module__ and 'shoal' in Seq2SeqTrainer.__module__\n"
        "def test_fails():\n    assert False\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "models.upstream", str(tmp_path), "-k", "whose or fails"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    for sentence in (
        "test_small.py::test_whose is not in the list: it has passed",
        "test_small.py::test_fails is not in the list: it has failed",
        "1 failed, 1 passed; 2 not as listed in upstream.toml",
    ):
        assert sentence in ended.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["test_small.py"], "nothing is left there"
