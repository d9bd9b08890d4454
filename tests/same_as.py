"""This tree beside an older commit of it: the same bits, the same machine, the same public names, and no slower.

    python tests/same_as.py COMMIT                make same-as COMMIT=…: without measurements, two minutes
    python tests/same_as.py COMMIT --measure      make same-as COMMIT=… ARGS=--measure: on a quiet machine, half an hour

The older tree is taken from git into a temporary folder. Both trees run by themselves: the fingerprints of
worlds, stages and precisions, with and without a worker's death, as `crew.py` of each tree trains them; and the
benchmarks of a step and of a recovery, in turns. Compared as files: transcripts of the simulation and frozen lists
(REST, metrics, formats). Exit status 1 for any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("tests/simulation/scenarios", "tests/unit/frozen")
"""Folders of equal files."""
SOURCES = ("tests", "benchmarks", "controller", "worker", "protos")
STEPS = 8
WORLDS = (1, 2, 3, 4)
PRECISIONS = {"float32": {}, "bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}
MEASURED = (
    ("step_time.py", "--only", "tiny", "--tiny-workers", "2", "4"),
    ("recovery.py", "--sizes", "10M", "--trials", "3", "--restarts", "0"),
)
PATIENCE_SECONDS = 1800


def fingerprints() -> Iterator[tuple[str, str]]:
    """Yield the fingerprint of each case, by its name; of the tree that `sys.path` begins with."""
    from crew import Crew, Task

    for stage in range(4):
        for name, precision in PRECISIONS.items():
            task = Task({"max_steps": STEPS, "stage": stage, "precision": precision})
            for world in WORLDS:
                for dies in (False, True)[:world]:
                    with Crew("abcd"[:world], task) as crew:
                        if dies:
                            crew.train_to(STEPS // 2)
                            crew.kill("b")
                        yield f"stage {stage}, {name}, {world} workers{', one dies' if dies else ''}", crew.finish()


def run_in(tree: Path, *command: str) -> str:
    """Return what a Python program prints with the packages and tests of a tree. Raises `RuntimeError`."""
    paths = os.pathsep.join(str(tree / folder) for folder in SOURCES)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", *command], cwd=tree, env=environment, capture_output=True, text=True, check=False,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} in {tree} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def differences(older: Path) -> Iterator[str]:
    """Yield a sentence for all that differs."""
    for folder in FILES:
        done = subprocess.run(["diff", "--recursive", "--brief", older / folder, ROOT / folder], stdout=subprocess.PIPE,
                              text=True, check=False)  # fmt: skip
        yield from done.stdout.splitlines()
    was, now = (json.loads(run_in(tree, __file__, "--fingerprints").splitlines()[-1]) for tree in (older, ROOT))
    yield from (f"{case}: {was[case]} became {now.get(case)}" for case in was if was[case] != now.get(case))
    print(f"{len(was)} fingerprints compared", flush=True)


def measure(older: Path) -> None:
    """Print the benchmarks of both trees, each twice and in turns."""
    for name, *flags in MEASURED:
        for tree, title in ((older, "before"), (ROOT, "now")) * 2:
            print(f"\n{title}: {name}\n{run_in(tree, f'benchmarks/{name}', *flags)}", flush=True)


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("commit", nargs="?", default="HEAD", help="the older tree")
    flags.add_argument("--measure", action="store_true", help="run the benchmarks of steps and recoveries as well")
    flags.add_argument("--fingerprints", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.fingerprints:
        print(json.dumps(dict(fingerprints())), flush=True)
        os._exit(0)  # threads of the crews still wait for each other
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder, "older")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", older, given.commit], cwd=ROOT, check=True)
        try:
            found = list(differences(older))
            if given.measure:
                measure(older)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", older], cwd=ROOT, check=True)
    print(*found, sep="\n")
    print(f"same as {given.commit}" if not found else f"{len(found)} differences from {given.commit}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
