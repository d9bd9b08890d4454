"""`CSV`: one file, one line for each step, whoever wrote it.

A step that is made again (the job went back to a checkpoint, or rank 0 died in its callbacks) replaces what the file
has from it on, so the file reads like that of an undisturbed job.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path

from shoal_protos.errors import UserError

from shoal.callbacks.step_callback import JobOfRow, Row, StepCallback, check_folder

FIRST = "step"


class CSV(StepCallback):
    """`engine.on_step(shoal.callbacks.CSV("steps.csv"))`. All workers must be able to write the file."""

    def __init__(self, path: str | Path) -> None:
        """Raises `UserError` for a file that cannot be written, or that is another one's."""
        super().__init__()
        self._path = Path(path)
        self._columns: list[str] = []
        self._last = -1
        """The last step in the file, where this worker wrote it."""
        check_folder("CSV", self._path.parent)
        self._check()

    def _check(self) -> None:
        try:
            with self._path.open("a+", newline="") as file:
                file.seek(0)
                first = file.readline()
        except OSError as error:
            raise UserError(
                f"shoal.callbacks.CSV: {self._path} cannot be written ({error.strerror}); name another file."
            ) from None
        if first and next(csv.reader([first]))[:1] != [FIRST]:
            raise UserError(
                f"shoal.callbacks.CSV: {self._path} is not a file of steps (its first line is {first.strip()[:80]!r}); "
                "name another file."
            )

    def write(self, row: Row, job: JobOfRow) -> None:  # noqa: ARG002
        step = int(row[FIRST])
        if self._last < 0 or step <= self._last or not row.keys() <= set(self._columns):
            self._begin_at(step, row)
        with self._path.open("a", newline="") as file:
            file.write(_lines([[row.get(name, "") for name in self._columns]]))
        self._last = step

    def _begin_at(self, step: int, row: Row) -> None:
        """The file ends before that step, and has a column for each number."""
        kept = [one for one in _rows(self._path) if int(one[FIRST]) < step]
        columns = dict.fromkeys([*(name for one in kept[:1] for name in one), *row])
        self._columns = list(columns)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        text = _lines([self._columns, *([one.get(name, "") for name in self._columns] for one in kept)])
        new.write_text(text, newline="")
        new.replace(self._path)


def _rows(path: Path) -> list[dict[str, str]]:
    """Whole lines only: a worker may have been killed while it wrote its last one."""
    text = path.read_text() if path.exists() else ""
    whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    return [row for row in csv.DictReader(whole, restval="") if row[FIRST].isdigit()]


def _lines(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
