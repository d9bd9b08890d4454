"""`CSV`: one file, one line for each step, whoever wrote it.

A step that is made again (the job went back to a checkpoint, or rank 0 died in its callbacks) replaces what the file
has from it on, so the file reads like that of an undisturbed job.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal_protos.errors import UserError

from shoal.callbacks.step_callback import JobOfRow, Row, StepCallback, check_folder

FIRST = "step"


class CSV(StepCallback):
    """`engine.on_step(shoal.callbacks.CSV("steps.csv"))`. All workers must be able to write the file."""

    def __init__(self, path: str | Path) -> None:
        """Open the file. Raises `UserError` if it cannot be written, or is not a file of steps."""
        super().__init__()
        self._path = Path(path)
        self._columns: list[str] = []
        self._last, self._at, self._row = -1, 0, dict[str, Any]()
        """The last step in the file, where this worker wrote it: where its line begins, and what stands there."""
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
        self._put(row, replaces=False)

    def add(self, row: Row, job: JobOfRow) -> None:  # noqa: ARG002
        """To the step's line, which says when the step was made."""
        step = int(row[FIRST])
        line: Mapping[str, Any] = self._row
        if step != self._last:
            line = next((one for one in _rows(self._path) if int(one[FIRST]) == step), row)
        self._put({**line, **{name: value for name, value in row.items() if name != "time"}}, replaces=True)

    def _put(self, row: Mapping[str, Any], replaces: bool) -> None:
        """The line of a step. `replaces`: it has all that this worker's last line has, if that is of the same step."""
        step = int(row[FIRST])
        is_known = self._last >= 0 and row.keys() <= set(self._columns)
        in_place = is_known and replaces and step == self._last
        if not (in_place or (is_known and step > self._last)):
            self._begin_at(step, row)
        with self._path.open("r+" if in_place else "a", newline="") as file:
            self._at = file.seek(self._at) if in_place else file.tell()
            file.write(_lines([[row.get(name, "") for name in self._columns]]))
            file.truncate()
        self._last, self._row = step, dict(row)

    def _begin_at(self, step: int, row: Mapping[str, Any]) -> None:
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
