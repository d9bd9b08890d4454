"""Runs transformers' tests of its Trainer with Shoal's in its place, and compares with the verdicts of upstream.toml.

    python -m models.upstream FOLDER [arguments of pytest]     (make trainer-upstream FOLDER=…)

FOLDER is a checkout of transformers, or any folder with its `tests/trainer`; nothing of it is kept here but names.
With `--original` the library's own Trainer runs instead: what fails then says nothing of Shoal. With `-k` and the like,
names that were not run are not missed. Exit status 1 where a name is unknown, missing, or has come out otherwise.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("upstream.toml")
LIMIT_SECONDS = 120
PASSES, DIFFERS, ELSEWHERE = "passes", "differs", "elsewhere"
VERDICTS = (PASSES, DIFFERS, ELSEWHERE)
"""Passes as with the library's own; fails, for a reason that is Shoal's; cannot be told everywhere (a GPU, the network,
another version of the library), and may come out in any way.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is expected of one test."""

    verdict: str
    reason: str


def listed(path: Path = LIST) -> dict[str, Verdict]:
    """The verdicts, by name."""
    found: dict[str, Verdict] = {}
    for group in tomllib.loads(path.read_text(encoding="utf-8"))["tests"]:
        for name in group["names"]:
            assert name not in found, f"{name} is listed twice"
            found[name] = Verdict(group["verdict"], group.get("reason", ""))
    return found


def left_out(path: Path = LIST) -> dict[str, str]:
    """Files of that folder that are not run, and why."""
    files: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))["left_out"]
    return files


def differences(outcomes: Mapping[str, str], expected: Mapping[str, Verdict], whole: bool) -> list[str]:
    """A sentence for each name whose outcome is not as listed. `whole`: all tests were to run. A file that cannot be
    imported is a name by itself.
    """
    found = [
        f"{name} is not in the list: it has {outcome}" for name, outcome in outcomes.items() if name not in expected
    ]
    for name, one in expected.items():
        outcome = outcomes.get(name)
        if outcome is None:
            if whole and name.partition("::")[0] not in outcomes:
                found.append(f"{name} is in the list and was not run")
        elif one.verdict != ELSEWHERE and outcome != {PASSES: "passed", DIFFERS: "failed"}[one.verdict]:
            found.append(f"{name} has {outcome}; listed as {one.verdict!r} {one.reason}".rstrip())
    return found


class Outcomes:
    """A plugin of pytest: how each test has come out, by the name of its file, class and function."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("tests/trainer/")
        if report.when == "call" or report.outcome != "passed":
            self.by_name[name] = "failed" if self.by_name.get(name) == "failed" else report.outcome

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.by_name[report.nodeid.removeprefix("tests/trainer/")] = "failed"


def take_the_place_of_the_librarys() -> None:
    """From now on who imports the Trainer from transformers gets Shoal's."""
    import shoal.integrations.transformers as door
    import transformers

    transformers.Trainer, transformers.Seq2SeqTrainer = door.Trainer, door.Seq2SeqTrainer  # type: ignore[misc]


def run(folder: Path, arguments: Sequence[str]) -> Outcomes:
    """Runs the tests of that folder, in this process; a test that hangs fails by its time-out."""
    outcomes = Outcomes()
    ignored = [f"--ignore={folder / 'tests/trainer' / name}" for name in left_out()]
    with tempfile.TemporaryDirectory() as empty:
        settings = Path(empty) / "pytest.ini"
        settings.write_text(f"[pytest]\ntimeout = {LIMIT_SECONDS}\n", encoding="utf-8")
        os.chdir(empty)  # for what they write beside them
        sys.dont_write_bytecode = True
        pytest.main(
            ["-c", str(settings), f"--rootdir={folder}", "--noconftest", "-p", "no:cacheprovider", "-q", "--tb=line",
             "-W", "ignore", "--continue-on-collection-errors", *ignored, *arguments, str(folder / "tests/trainer")],
            plugins=[outcomes],
        )  # fmt: skip
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    folder = Path(arguments[0]).resolve() if arguments and arguments[0] else None
    if folder is None or not (folder / "tests" / "trainer").is_dir():
        found = "no folder" if folder is None else f"{folder}, which has no tests/trainer"
        print(f"make trainer-upstream was given {found}; name a checkout of transformers: "
              "make trainer-upstream FOLDER=…/transformers", file=sys.stderr)  # fmt: skip
        return 2
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    more = [argument for argument in arguments[1:] if argument != "--original"]
    if "--original" not in arguments:
        take_the_place_of_the_librarys()
    outcomes = run(folder, more).by_name
    if "--original" in arguments:
        failed = sorted(name for name, outcome in outcomes.items() if outcome == "failed")
        print(*(f"{name} fails with the library's own Trainer" for name in failed), sep="\n")
        return 0
    found = differences(outcomes, listed(), whole=not more)
    print(*found, sep="\n")
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(outcomes.values()).items()))
    print(f"{counted}; {len(found)} not as listed in {LIST.name}")
    return 1 if found or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
