"""Breaks every rule of docs/rules.md in a copy of the tree, and reports what no test notices.

    python -m tests.mutants.run                    every mutant
    python -m tests.mutants.run --rule "The norm"  those whose rule begins so

A mutant is noticed when one of the tests that hold its rule fails (a test that hangs fails by its time-out). Exit
status 1 where one is not noticed, or where its tests cannot be run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.mutant import Mutant, mutants
from rules_page import ROOT

LIMIT_SECONDS = 600
PASSED, FAILED = 0, 1
"""Pytest's exit statuses; any other one means that the tests did not run."""
PACKAGES = ("controller", "worker", "protos")
CHEAPEST_FIRST = ("tests/unit/", "tests/simulation/test_scenarios.py", "tests/simulation/test_seeds.py", "tests/")
"""The first test that fails ends a run."""
SWITCHES_OFF = "tests/simulation/test_rules.py"
"""Switches a rule off by itself and looks who notices, so it passes whether the rule is there or not."""
WITH_MODELS = "tests/models/"
"""Needs what `make trainer` installs apart."""
NO_PYTHON = re.compile(r"(?:NameError|ImportError|UnboundLocalError|AttributeError: module).*")
"""A mutant that fails of itself breaks no rule."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant."""

    noticed: bool
    words: str
    """By which test, or what is wrong."""
    seconds: float = 0.0


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of what git tracks or would track, its packages compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for name in PACKAGES:
            compileall.compile_dir(folder / name, quiet=1)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tests_of(mutant: Mutant) -> list[str]:
    """The tests that may notice it, the cheapest first."""
    held = [test for test in mutant.tests or mutant.row().held if not test.startswith(SWITCHES_OFF)]
    return sorted(held, key=lambda test: next(i for i, start in enumerate(CHEAPEST_FIRST) if test.startswith(start)))


def verdict(mutant: Mutant, tree: Path) -> Verdict:
    """Breaks the rule in `tree`, and mends it again."""
    try:
        tests, broken = tests_of(mutant), mutant.broken_text()
    except ValueError as error:
        return Verdict(False, f"does not fit: {error}")
    began, file = time.monotonic(), tree / mutant.file
    file.write_text(broken)
    try:
        noticed, words = _run(tests, tree)
    finally:
        shutil.copy2(ROOT / mutant.file, file)
    return Verdict(noticed, words, time.monotonic() - began)


def _run(tests: list[str], tree: Path) -> tuple[bool, str]:
    """Whether one of them fails as it should, and which one, or what is wrong."""
    paths = [tree / name for name in PACKAGES]
    if any(test.startswith(WITH_MODELS) for test in tests):
        paths += [ROOT / ".venv/models", tree / "tests/scripts/torchvision_without_cuda"]
    packages = os.pathsep.join(map(str, paths))
    # what is compiled anew is not kept: the next mutant of the file may be of the same size and second
    own = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "SHOAL_EXAMPLES": "all"}
    environment = {**os.environ, "PYTHONPATH": packages, **own}
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-m", "", *tests],
            cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"its tests did not end within {LIMIT_SECONDS} s"
    lines = run.stdout.strip().splitlines() or run.stderr.strip().splitlines() or ["no output"]
    if run.returncode == PASSED:
        return False, "NOT NOTICED"
    if run.returncode != FAILED:
        return False, f"its tests did not run: {lines[-1]}"
    if mistake := NO_PYTHON.search(run.stdout):
        return False, f"fails of itself: {mistake[0]}"
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return True, failed[-1].split("::", 1)[-1].split(" - ")[0] if failed else lines[-1]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rule", default="", help="only rules that begin so")
    arguments.add_argument("--jobs", type=int, default=2, help="how many at a time")
    given = arguments.parse_args()
    chosen = [mutant for mutant in mutants() if mutant.rule.startswith(given.rule)]
    began, wrong = time.monotonic(), 0
    trees: SimpleQueue[Path] = SimpleQueue()

    def judge(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            return verdict(mutant, tree)
        finally:
            trees.put(tree)

    with ExitStack() as copies, ThreadPoolExecutor(given.jobs) as pool:
        for _ in range(given.jobs):
            trees.put(copies.enter_context(copied_tree()))
        for mutant, found in zip(chosen, pool.map(judge, chosen), strict=True):
            wrong += not found.noticed
            shown = f"noticed by {found.words}" if found.noticed else found.words
            print(f"{found.seconds:4.0f} s  {mutant.rule} ({mutant.file}): {shown}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants noticed; {time.monotonic() - began:.0f} s")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
