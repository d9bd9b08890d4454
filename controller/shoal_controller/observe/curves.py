"""The recorder of curves: each job is looked at once a second, for the page's series and for the files of `shoal plot`.

`record_curves` is the shell's loop while it leads. Its points go into the rings of `job_series.py`, and every two
seconds into files: one for each run of a job, `FOLDER/curves/JOB/RUN.csv`, in the columns of `shoal.callbacks.CSV`,
those of the numbers that the script reports last. A file is bounded: when it is full every second line goes, and lines
come half as often. Each controller keeps what it saw while it led. `server.py` makes the `Curves` that write.
"""

from __future__ import annotations

import asyncio
import csv
import io
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog
from shoal_protos.messages import MOST_REPORTS

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.machine.view import Sample
from shoal_controller.process.private_files import for_this_user, make_private_folder, write_private

EVERY_SECONDS = 1.0
"""From one look at all jobs to the next."""
AT_A_TIME = 25
"""Jobs that are looked at before others have their turn."""
LOOK_SECONDS = 2.0
"""From one look at the newest points to the next, for the files."""
MOST_LINES = 4096
COLUMNS = ("step", "samples", "time", "world_size", "loss")

log = structlog.get_logger("shoal.curves")

Points = Mapping[tuple[str, str], Sample | None]
"""One look at all jobs, by job and run; None: a job that cannot be looked at."""


class Recorded(Protocol):
    """A job that can be looked at."""

    spec: JobSpec

    def record(self) -> Sample:
        """Put a point into its series, and return it."""


async def record_curves(
    jobs: Callable[[], Iterable[Recorded]], clock: Callable[[], float], keep: Callable[[Points, float], None]
) -> None:
    """Look at all jobs, for ever. One that cannot be looked at (a bug) has no curves any more; it goes on itself."""
    unseen: set[Recorded] = set()
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        points: dict[tuple[str, str], Sample | None] = {}
        for number, job in enumerate(list(jobs())):
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)
            name = (job.spec.job, job.spec.run)
            points[name] = None
            try:
                if job not in unseen:
                    points[name] = job.record()
            except Exception as error:
                unseen.add(job)
                log.error("a job's curves have ended", job=job.spec.job, error=str(error), exc_info=error)
        keep(points, clock())


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

    def see(self, point: Sample, now: float) -> None:
        """Add a line where the job has come on, or its world is another. Raises `OSError`."""
        step, world = point.step, point.active
        if point.samples is None or point.loss is None or (self._last is not None and self._last[1:] == (step, world)):
            return
        if self._last is not None and self._last[2] == world and now - self._last[0] < self._seconds:
            return
        self._last = now, step, world
        new = [name for name in point.reports if name not in self._reports][: MOST_REPORTS - len(self._reports)]
        self._reports += new
        reports = (point.reports.get(name, "") for name in self._reports)
        self._lines.append(_line([step, point.samples, f"{now:.3f}", world, point.loss, *reports]))
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
    """The files of all jobs. `run` as a task, for as long as a controller lives; `keep` while it leads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "curves"
        self._newest: tuple[Points, float] | None = None
        """What was seen last, and when; None: it is written. The last look of a term is written after its end."""
        self._curves: dict[tuple[str, str], Curve] = {}
        self._trouble = ""

    def keep(self, points: Points, now: float) -> None:
        """Write them soon, unless newer ones come before."""
        self._newest = points, now

    async def run(self) -> None:
        """Until it is cancelled. Writes in a thread: a slow disk delays no look at the jobs."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            newest, self._newest = self._newest, None
            if newest is not None:
                await asyncio.to_thread(self.write, *newest)

    def write(self, points: Points, now: float) -> None:
        """Write all jobs as they are now. A file that cannot be written is said once, and tried again."""
        try:
            self._forget(points)
            for (job, run), point in points.items():
                if (job, run) not in self._curves:
                    self._curves[job, run] = Curve(self._folder / job / f"{run or 'run'}.csv")
                if point is not None:
                    self._curves[job, run].see(point, now)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                log.warning("a job's curve cannot be written", error=str(error))
            self._trouble = str(error)

    def _forget(self, points: Points) -> None:
        """Remove the files of runs that were replaced, and of jobs that were forgotten."""
        jobs = {job for job, _ in points}
        for job, run in self._curves.keys() - points.keys():
            del self._curves[job, run]
            if job in jobs:
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
