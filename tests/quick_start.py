"""From a fresh clone to a killed worker in a script of one's own: types what docs/quick_start.md says, and times it.

    python tests/quick_start.py                                      make quickstart
    python tests/quick_start.py --constraint constraints.txt         with the versions that the tests have

What the page shows as code is what is run. Exit status 1 where a command fails, the bits with workers are not those of
the script alone, or training does not go on without the worker that is killed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from integration.cluster import until

ROOT = Path(__file__).resolve().parents[1]
LONGER = ('"epochs": 4', '"epochs": 400')
PATIENCE_SECONDS = 120
FURTHER_STEPS = 20
JOB = "train"


class Newcomer:
    """A shell in a folder, with the environment that was made there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        place = folder / "venv/bin"
        self._environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self._at = self._began = time.monotonic()

    def types(self, command: str, quietly: bool = False) -> str:
        """What the command prints. Raises `CalledProcessError`."""
        done = subprocess.run(
            command, shell=True, cwd=self._folder, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        )
        if not quietly:
            self.note(command)
        return done.stdout

    @contextmanager
    def runs(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """In a terminal of its own, where Ctrl-C ends it."""
        with (
            (self._folder / "shown").open("w") as shown,
            subprocess.Popen(
                command.split(), cwd=self._folder, env=self._environment, stdout=shown, text=True
            ) as process,
        ):
            try:
                yield process
            finally:
                process.send_signal(signal.SIGINT)

    def note(self, done: str) -> None:
        now = time.monotonic()
        print(f"{now - self._began:6.1f} s  (+{now - self._at:.1f})  {done}", flush=True)
        self._at = now


def fingerprint(printed: str) -> str:
    (found,) = set(re.findall(r"fingerprint ([0-9a-f]{64})", printed))
    return str(found)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--constraint", type=Path, help="file of versions for pip")
    given = arguments.parse_args()
    constraint = f" --constraint {given.constraint.resolve()}" if given.constraint else ""
    page = (ROOT / "docs/quick_start.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    install, runs, _ = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    alone, on_workers = runs.splitlines()
    with TemporaryDirectory() as folder:
        user = Newcomer(Path(folder))
        user.types(f"git clone --quiet {ROOT} shoal")
        user.types(f"{sys.executable} -m venv venv")
        user.types(f"cd shoal && {install.strip()} --quiet{constraint}")
        (Path(folder) / "train.py").write_text(script)
        right = fingerprint(user.types(alone))
        is_equal = fingerprint(user.types(on_workers)) == right
        (Path(folder) / "train.py").write_text(script.replace(*LONGER))
        with user.runs(on_workers):
            until("the longer job trains", lambda: steps_of(user) > FURTHER_STEPS, PATIENCE_SECONDS)
            user.note(f"{on_workers}, longer")
            (pid,) = re.findall(
                r"^w1 .* (\d+) +\S*\.shoal", user.types(f"shoal workers {JOB}", True), flags=re.MULTILINE
            )
            os.kill(int(pid), signal.SIGKILL)
            until("w1 is lost", lambda: "lost w1" in user.types(f"shoal events {JOB}", True), PATIENCE_SECONDS)
            before = steps_of(user)
            until("the others go on", lambda: steps_of(user) > before + FURTHER_STEPS, PATIENCE_SECONDS)
            user.note("a worker was killed, and the others went on")
    print("the same bits" if is_equal else "OTHER BITS with workers")
    return 0 if is_equal else 1


def steps_of(user: Newcomer) -> int:
    """Committed steps; 0 while no controller answers."""
    try:
        found = re.search(r"step (\d+)", user.types(f"shoal describe {JOB} 2> /dev/null", True))
    except subprocess.CalledProcessError:
        return 0
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
