"""The series of a job: its last hour and day, and the lanes of its last worlds, in memory and bounded.

A job's `Runner` owns one, `curves.py` has it fed once a second, and REST reads it. The next leader begins anew, and
`since_sentence` says so. Times are the shell's, in seconds since the epoch. A `Ring` holds columns of numbers whose
oldest points make room; time only grows, and a gap in the measurements stays a gap. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite, nan
from typing import Any

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.view import Sample, missing_copies

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


HOUR_SECONDS, HOUR_EVERY = 3600, 1
DAY_SECONDS, DAY_EVERY = 86_400, 30

MOST_WORLDS = 200
"""Worlds whose lanes are remembered, as many as a job's history has."""
MOST_LANES = 1 << 16
"""Lanes that are remembered over all worlds: those of the oldest worlds go first."""

MINUTES = 60
"""Of the small picture of a job's last hour."""

DIGITS = 6
"""Significant digits of what is measured: more are noise, and cost bytes in every answer."""

RATE_SECONDS = 10.0
"""Over how long samples per second are counted: a step may take longer than the second between two points."""

MOST_BYTES = (HOUR_SECONDS // HOUR_EVERY + DAY_SECONDS // DAY_EVERY) * POINT_BYTES
"""Memory of a job's two rings, when they are full."""


class Span(StrEnum):
    """How far back a series goes."""

    HOUR = "hour"
    DAY = "day"

    @property
    def seconds(self) -> int:
        return HOUR_SECONDS if self is Span.HOUR else DAY_SECONDS

    @property
    def every_seconds(self) -> int:
        """From one point to the next."""
        return HOUR_EVERY if self is Span.HOUR else DAY_EVERY


@dataclass(frozen=True, slots=True)
class WorldSeen:
    """A world that began while this controller led."""

    generation: int
    lanes: Mapping[WorkerId, tuple[int, ...]]
    """Of every member."""


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of a job."""

    number: int
    """Since the epoch."""
    active: int
    """Fewest workers."""
    wanted: int
    loss: float | None
    """The last one."""


class JobSeries:
    """The series of one job. `record` about once a second, `see_world` whenever another world may train."""

    def __init__(self, since: float) -> None:
        self.since = since
        """Since when it is recorded."""
        self._rings = {span: Ring(span.seconds // span.every_seconds) for span in Span}
        self._minutes: deque[Minute] = deque(maxlen=MINUTES)
        self._worlds: deque[WorldSeen] = deque(maxlen=MOST_WORLDS)
        self._unmirrored = 0
        self._samples: deque[tuple[float, int]] = deque()
        """The samples read by some time, of the last `RATE_SECONDS`; the first may be older."""
        self._newest_rate: float | None = None
        self._fewest_active: int | None = None
        """Since the last point of the day: a dip is not to be missed there."""

    # ---- feeding

    def record(self, sample: Sample, now: float) -> None:
        """A look at the job."""
        self._newest_rate = self._rate(sample.samples, now)
        point: Point = {
            TIME: now, "step": sample.step, "loss": sample.loss, "step_seconds": short(sample.step_seconds),
            "samples_per_second": short(self._newest_rate), "goodput_ratio": short(sample.goodput_ratio),
            "active": sample.active, "wanted": sample.wanted, "unmirrored_blocks": self._unmirrored,
        }  # fmt: skip
        self._rings[Span.HOUR].put(point)
        self._see_minute(sample, now)
        active = sample.active if self._fewest_active is None else min(self._fewest_active, sample.active)
        newest = self._rings[Span.DAY].newest
        if newest is None or not 0 <= now - newest < DAY_EVERY:
            self._rings[Span.DAY].put({**point, "active": active})
            self._fewest_active = None
        else:
            self._fewest_active = active

    def see_world(self, world: Plan | None, copies_wanted: int | None) -> None:
        """The world that may train now."""
        if world is None or (self._worlds and self._worlds[-1].generation == world.generation):
            return
        self._worlds.append(WorldSeen(world.generation, world.lanes_by_worker))
        self._unmirrored = len(missing_copies(world, copies_wanted))
        while len(self._worlds) > 1 and len(self._worlds) * world.lanes > MOST_LANES:
            self._worlds.popleft()

    def forget_the_old(self, now: float) -> None:
        """Of a job that is over nothing new comes: what is older than its span goes."""
        for span in Span:
            newest = self._rings[span].newest
            if newest is not None and now - newest > span.seconds:
                self._rings[span] = Ring(span.seconds // span.every_seconds)

    def _see_minute(self, sample: Sample, now: float) -> None:
        """What the small picture of the last hour shows of the minute that it is."""
        number, active, loss = int(now // 60), sample.active, sample.loss
        while self._minutes and self._minutes[-1].number > number:
            self._minutes.pop()  # the clock was set back
        if self._minutes and self._minutes[-1].number == number:
            last = self._minutes.pop()
            active = min(active, last.active)
            loss = loss if loss is not None and isfinite(loss) else last.loss
        self._minutes.append(Minute(number, active, sample.wanted, loss if loss is None or isfinite(loss) else None))

    def _rate(self, samples: int | None, now: float) -> float | None:
        """Samples per second lately; None: not known, or fewer than before, as after a loss of steps."""
        recent = self._samples
        if samples is None:
            recent.clear()
            return None
        if recent and recent[-1][0] > now:
            recent.clear()  # the clock was set back
        while len(recent) > 1 and recent[1][0] <= now - RATE_SECONDS:
            recent.popleft()
        recent.append((now, samples))
        seconds = now - recent[0][0]
        read = samples - recent[0][1]
        return read / seconds if seconds > 0 and read >= 0 else None

    # ---- reading

    def points(self, span: Span, after: float, now: float) -> dict[str, list[Value]]:
        """Columns of equal length, oldest first, of the points beyond `after` within the span."""
        begin = max(after, now - span.seconds) if isfinite(after) else now
        return self._rings[span].after(begin)

    def minutes(self, now: float) -> list[Minute | None]:
        """The last hour minute by minute, oldest first, the present one last; None where nothing was recorded."""
        present = int(now // 60)
        known = {minute.number: minute for minute in self._minutes}
        return [known.get(number) for number in range(present - MINUTES + 1, present + 1)]

    @property
    def samples_per_second(self) -> float | None:
        """Over the last seconds; None: not known."""
        return self._newest_rate

    def lanes_of(self, generation: int) -> Mapping[WorkerId, tuple[int, ...]] | None:
        """Who trained which lanes in a world; None: it began before this was recorded, or too long ago."""
        return next((world.lanes for world in self._worlds if world.generation == generation), None)

    @property
    def bytes(self) -> int:
        """Memory of the rings."""
        return sum(ring.bytes for ring in self._rings.values())


def short(value: float | None) -> float | None:
    """Without digits that are noise."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def since_sentence(since: float | None) -> str:
    """`since`: when the controller began to record; None: it does not lead, and records nothing."""
    if since is None:
        return "this controller does not lead, and the one that does cannot be asked: it has no series"
    began = datetime.fromtimestamp(since, UTC)
    return f"recorded since {began:%Y-%m-%d %H:%M:%S} UTC; a controller that takes over begins anew"
