"""Curves: step, samples, loss and world of each job over time, as files that `shoal plot` draws.

One file for each run of a job, `FOLDER/curves/JOB/RUN.csv`, in the columns of `shoal.callbacks.CSV`, those of the
numbers that the script reports last. It is bounded:
when it is full every second line goes, and lines come half as often. Each controller keeps what it saw while it led.
Made by `server.py`.
"""

from __future__ import annotations

import asyncio
import csv
import io
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from shoal_protos.messages import MOST_REPORTS

from shoal_controller.core.machine.spec import JobView
from shoal_controller.process.private_files import for_this_user, make_private_folder, write_private

LOOK_SECONDS = 2.0
MOST_LINES = 4096
COLUMNS = ("step", "samples", "time", "world_size", "loss")

log = structlog.get_logger("shoal.curves")


class Curve:
    """One run of one job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = list(csv.reader(io.StringIO(path.read_text()))) if path.exists() else []
        self._reports = rows[0][len(COLUMNS) :] if rows else []
        """Names of the reported numbers, one column each."""
        self._lines = [_line(row) for row in rows[1:]]
        self._seconds = 0.0
        """Time between two lines, beyond that between two looks."""
        self._last: tuple[float, int, int] | None = None
        """When the last line was written, its step and its world."""

    def see(self, view: JobView, now: float) -> None:
        """Adds a line where the job has come on, or its world is another. Raises `OSError`."""
        step, world = view.step, view.active
        if view.samples is None or view.loss is None or (self._last is not None and self._last[1:] == (step, world)):
            return
        if self._last is not None and self._last[2] == world and now - self._last[0] < self._seconds:
            return
        self._last = now, step, world
        new = [name for name in view.reports if name not in self._reports][: MOST_REPORTS - len(self._reports)]
        self._reports += new
        reports = (view.reports.get(name, "") for name in self._reports)
        self._lines.append(_line([step, view.samples, f"{now:.3f}", world, view.loss, *reports]))
        if not new and len(self._lines) <= MOST_LINES and self._path.exists():
            with open(self._path, "a", opener=for_this_user) as file:
                file.write(self._lines[-1])
            return
        if len(self._lines) > MOST_LINES:
            self._lines = self._lines[1::2]
            self._seconds = max(2 * self._seconds, LOOK_SECONDS)
        make_private_folder(self._path.parent)
        draft = self._path.with_suffix(".new")
        write_private(draft, "".join([_line([*COLUMNS, *self._reports]), *self._lines]))
        draft.replace(self._path)


class Curves:
    """`run` as a task. `jobs`: those of the controller that leads; None: this one does not."""

    def __init__(self, folder: Path, jobs: Callable[[], Sequence[JobView] | None]) -> None:
        self._folder, self._jobs = folder / "curves", jobs
        self._curves: dict[tuple[str, str], Curve] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            jobs = self._jobs()
            if jobs is not None:
                await asyncio.to_thread(self.look, jobs, time.time())

    def look(self, jobs: Sequence[JobView], now: float) -> None:
        """All jobs as they are now. A file that cannot be written is said once, and tried again."""
        try:
            self._forget({view.job: view.run for view in jobs})
            for view in jobs:
                if (view.job, view.run) not in self._curves:
                    self._curves[view.job, view.run] = Curve(self._folder / view.job / f"{view.run or 'run'}.csv")
                self._curves[view.job, view.run].see(view, now)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                log.warning("a job's curve cannot be written", error=str(error))
            self._trouble = str(error)

    def _forget(self, runs: dict[str, str]) -> None:
        """Files of runs that were replaced, and of jobs that were forgotten."""
        for job, run in [key for key in self._curves if runs.get(key[0]) != key[1]]:
            del self._curves[job, run]
            if job in runs:
                (self._folder / job / f"{run or 'run'}.csv").unlink(missing_ok=True)
            else:
                shutil.rmtree(self._folder / job, ignore_errors=True)


def _line(row: Sequence[object]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(row)
    return text.getvalue()


def curve_file(folder: Path, job: str) -> Path | None:
    """The newest run's file; None: there is none."""
    files = list((folder / "curves" / job).glob("*.csv"))
    return max(files, key=lambda file: file.stat().st_mtime) if files else None


def read_curve(path: Path) -> list[dict[str, float]]:
    """Return the whole lines by column. Raises `ValueError` if one of `COLUMNS` is missing."""
    text = path.read_text()
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
    lines = (row for row in reader if row["loss"] and row["world_size"])
    return [{name: float(value) for name, value in row.items() if name and value} for row in lines]
