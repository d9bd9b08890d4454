"""A ring of points in time: columns of numbers, of which the oldest make room. Pure, bounded in bytes.

`JobSeries` keeps a job's last hour and its last day in two of them. Time only grows; nothing is put where nobody has
measured, so a gap stays one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

TIME = "time"

TYPECODES: Mapping[str, str] = {
    TIME: "d",
    "step": "q",
    "loss": "d",
    "step_seconds": "d",
    "samples_per_second": "d",
    "goodput_ratio": "d",
    "active": "H",
    "wanted": "H",
    "unmirrored_blocks": "I",
}
"""Each column's type."""

POINT_BYTES = 56
"""Memory that a point takes: the sum over the columns."""

HIGHEST: Mapping[str, int] = {"H": (1 << 16) - 1, "I": (1 << 32) - 1, "q": (1 << 63) - 1}
"""What fits into a column of whole numbers. A larger one is shown as this: no claim of a worker is an error here."""

Value = float | int | None
Point = Mapping[str, Value]


class Ring:
    """The newest points, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        """It takes memory as points come."""
        self._capacity = capacity
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in TYPECODES.items()}
        self._oldest = 0
        """Where the oldest point is."""

    def __len__(self) -> int:
        return len(self._columns[TIME])

    @property
    def bytes(self) -> int:
        """Memory that the points take."""
        return sum(column.itemsize * len(column) for column in self._columns.values())

    @property
    def newest(self) -> float | None:
        """Time of the newest point; None: there is none."""
        return float(self._columns[TIME][self._oldest - 1]) if len(self) else None

    def put(self, point: Point) -> None:
        """Add a point of all columns. Where the clock was set back, points of what is now the future are forgotten."""
        time = point[TIME]
        if time is None or time == self.newest:
            return
        if self.newest is not None and time < self.newest:
            self._forget_from(time)
        if len(self) < self._capacity:
            for name, column in self._columns.items():
                column.append(_kept(column.typecode, point[name]))
            return
        for name, column in self._columns.items():
            column[self._oldest] = _kept(column.typecode, point[name])
        self._oldest = (self._oldest + 1) % self._capacity

    def _forget_from(self, time: float) -> None:
        """Keep what is older than that."""
        count = bisect_left(self.column(TIME), time)
        for name, code in TYPECODES.items():
            self._columns[name] = array(code, self.column(name)[:count])
        self._oldest = 0

    def after(self, time: float) -> dict[str, list[Value]]:
        """All columns of the points beyond that time, oldest first; None where there was nothing."""
        begin = bisect_right(self.column(TIME), time)
        return {name: _shown(code, self.column(name)[begin:]) for name, code in TYPECODES.items()}

    def column(self, name: str) -> Sequence[float]:
        """One column as it is kept, oldest first; NaN where there was nothing."""
        column = self._columns[name]
        return column[self._oldest :] + column[: self._oldest] if self._oldest else column


def _kept(code: str, value: Value) -> float | int:
    """As it lies in a column."""
    if code in HIGHEST:
        return min(max(0, int(value or 0)), HIGHEST[code])
    return float(value) if value is not None and isfinite(value) else nan


def _shown(code: str, values: Sequence[float]) -> list[Value]:
    """As people see them: JSON has no NaN, which is the one number that differs from itself."""
    return list(values) if code in HIGHEST else [value if value == value else None for value in values]
