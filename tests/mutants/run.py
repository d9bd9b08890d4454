"""Breaks every rule of docs/rules.md in a copy of the tree, and reports what no test notices.

    python -m tests.mutants.run                    every mutant
    python -m tests.mutants.run --rule "The norm"  those whose rule begins so

A mutant is noticed when one of the tests that hold its rule fails (a test that hangs fails by its time-out). Exit
status 1 where one is not noticed, or where its tests cannot be run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.mutant import Mutant, mutants
from rules_page import ROOT

LIMIT_SECONDS = 600
PASSED, FAILED = 0, 1
"""Pytest's exit statuses; any other one means that the tests did not run."""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of what git tracks or would track."""
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
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def verdict(mutant: Mutant) -> str:
    """`noticed`, or what is wrong."""
    try:
        tests, broken = mutant.tests or mutant.row().held, mutant.broken_text()
    except ValueError as error:
        return f"does not fit: {error}"
    with copied_tree() as tree:
        (tree / mutant.file).write_text(broken)
        packages = os.pathsep.join(str(tree / name) for name in ("controller", "worker", "protos"))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *tests],
            cwd=tree, env={**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    if run.returncode == FAILED:
        return "noticed"
    last = (run.stdout.strip().splitlines() or run.stderr.strip().splitlines() or ["no output"])[-1]
    return "NOT NOTICED" if run.returncode == PASSED else f"its tests did not run: {last}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rule", default="", help="only rules that begin so")
    arguments.add_argument("--jobs", type=int, default=2, help="how many at a time")
    given = arguments.parse_args()
    chosen = [mutant for mutant in mutants() if mutant.rule.startswith(given.rule)]
    began, wrong = time.monotonic(), 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutant, found in zip(chosen, pool.map(verdict, chosen), strict=True):
            wrong += found != "noticed"
            print(f"{found:12} {mutant.rule} ({mutant.file})", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants noticed; {time.monotonic() - began:.0f} s")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
