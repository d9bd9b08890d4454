"""Makes every edit that breaks a rule (tests/rule.py) in a copy of the tree, and reports what no test notices.

    python -m tests.mutants.run                             every mutant
    python -m tests.mutants.run --rule "The norm"           those whose rule begins so
    python -m tests.mutants.run --part 3/8                  an eighth of them
    python -m tests.mutants.run --changed-since origin/main those whose module or tests are others since then

A mutant is noticed when one of the tests that hold its rule fails (a test that hangs fails by its time-out). Exit
status 1 where one is not noticed, or where its tests cannot be run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from integration.warm import Warm
from mutants.within import WARM_MODULES
from rule import ROOT, Edit, Rule, rules

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
class Mutant:
    """A rule, broken."""

    rule: Rule
    edit: Edit

    def broken_text(self) -> str:
        """Of the module. Raises `ValueError` where the edit does not fit it any more."""
        text, edit = (ROOT / self.edit.file).read_text(), self.edit
        if text.count(edit.old) != 1:
            raise ValueError(f"{edit.module} has {text.count(edit.old)} times, expected once: {edit.old!r}")
        return text.replace(edit.old, edit.new)

    def tests(self) -> list[str]:
        """Those that may notice it, the cheapest first."""
        able = [test for test in self.rule.tests_of(self.edit) if not test.startswith(SWITCHES_OFF)]
        return sorted(able, key=lambda test: [not test.startswith(start) for start in CHEAPEST_FIRST])

    def depends_on(self, files: set[str]) -> bool:
        """Whether one of these files is the module, or has one of the tests."""
        return bool(files & {self.edit.file, *(test.partition("::")[0] for test in self.tests())})


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


def verdict(mutant: Mutant, tree: Path, warm: Warm) -> Verdict:
    """Breaks the rule in `tree`, and mends it again."""
    try:
        tests, broken = mutant.tests(), mutant.broken_text()
    except ValueError as error:
        return Verdict(False, f"does not fit: {error}")
    began, file = time.monotonic(), tree / mutant.edit.file
    file.write_text(broken)
    try:
        noticed, words = _run(tests, tree, warm)
    finally:
        shutil.copy2(ROOT / mutant.edit.file, file)
    return Verdict(noticed, words, time.monotonic() - began)


def _run(tests: list[str], tree: Path, warm: Warm) -> tuple[bool, str]:
    """Whether one of them fails as it should, and which one, or what is wrong."""
    paths = [str(tree / name) for name in PACKAGES]
    if any(test.startswith(WITH_MODELS) for test in tests):
        paths += [str(ROOT / ".venv/models"), str(tree / "tests/scripts/torchvision_without_cuda")]
    # what is compiled anew is not kept: the next mutant of the file may be of the same size and second
    own = {"PYTHONDONTWRITEBYTECODE": "1", "SHOAL_EXAMPLES": "all", "PYTHONPATH": os.pathsep.join(paths)}
    log = tree / "pytest.log"
    log.unlink(missing_ok=True)
    arguments = ["-x", "-q", "--no-header", "--tb=short", "-m", "", *tests]
    pid = warm.fork("mutants.within:run_tests", {"tree": str(tree), "paths": paths, "arguments": arguments}, own, log)
    status = _end_of(pid, warm)
    if status is None:
        return False, f"its tests did not end within {LIMIT_SECONDS} s"
    output = log.read_text(errors="replace")
    lines = output.strip().splitlines() or ["no output"]
    if status == PASSED:
        return False, "NOT NOTICED"
    if status != FAILED:
        return False, f"its tests did not run: {lines[-1]}"
    if mistake := NO_PYTHON.search(output):
        return False, f"fails of itself: {mistake[0]}"
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return True, failed[-1].split("::", 1)[-1].split(" - ")[0] if failed else lines[-1]


def _end_of(pid: int, warm: Warm) -> int | None:
    """A fork's exit status, or None once it was killed because it did not end in time."""
    with suppress(ProcessLookupError):  # it has ended already
        ending = os.pidfd_open(pid)
        try:
            if not select.select([ending], [], [], LIMIT_SECONDS)[0]:
                os.killpg(pid, signal.SIGKILL)
                return None
        finally:
            os.close(ending)
    return warm.ended()[pid]


def changed_since(revision: str) -> set[str]:
    """The files that are others, or new, since then."""
    commands = (["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"])
    listed = [subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, check=True) for one in commands]
    return {name for one in listed for name in one.stdout.splitlines()}


def part(text: str) -> slice:
    """3/8: every eighth from the third on."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return slice(number - 1, None, count)


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    """Of all rules, in the page's order, what was asked for."""
    found = [Mutant(one, edit) for one in rules() if one.text.startswith(arguments.rule) for edit in one.edits]
    if arguments.changed_since:
        changed = changed_since(arguments.changed_since)
        found = [mutant for mutant in found if mutant.depends_on(changed)]
    return found[arguments.part]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rule", default="", help="only rules that begin so")
    arguments.add_argument("--part", type=part, default="1/1", help="3/8: the third of eight parts of them")
    arguments.add_argument("--changed-since", metavar="REV", help="only mutants whose module or tests have changed")
    arguments.add_argument("--jobs", type=int, default=2, help="how many at a time")
    given = arguments.parse_args()
    mutants = chosen(given)
    began, wrong = time.monotonic(), 0
    trees: SimpleQueue[Path] = SimpleQueue()

    def judge(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            return verdict(mutant, tree, warm)
        finally:
            trees.put(tree)

    with ExitStack() as copies, ThreadPoolExecutor(given.jobs) as pool:
        warm = copies.enter_context(closing(Warm(WARM_MODULES)))
        for _ in range(given.jobs):
            trees.put(copies.enter_context(copied_tree()))
        for mutant, found in zip(mutants, pool.map(judge, mutants), strict=True):
            wrong += not found.noticed
            shown = f"noticed by {found.words}" if found.noticed else found.words
            print(f"{found.seconds:4.0f} s  {mutant.rule.text[:80]} ({mutant.edit.module}): {shown}", flush=True)
    print(f"{len(mutants) - wrong} of {len(mutants)} mutants noticed; {time.monotonic() - began:.0f} s")
    return 1 if wrong or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
