"""The live display on standard error: world, step, loss, samples per second, current activity.

On a terminal it is redrawn in place with the job's events above it; elsewhere it is a line on every change and every
few seconds. `watch` feeds it from REST until the job has ended. `Rate` and `seconds_left` compute the speed and the
time left from step counts; they are pure.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from shoal_protos.errors import NoController, StoreError
from shoal_protos.rest import OVER, Json
from shoal_protos.text import duration, number, plural

from shoal_controller.cli.client import Client
from shoal_controller.cli.fitted import OneLine
from shoal_controller.cli.printed import Printed
from shoal_controller.cli.tables import display_console, event_line, is_free, is_redrawn, phase, reported, step_of
from shoal_controller.core.machine.event_kind import EventKind

POLL_SECONDS = 0.25
MOST_MISSES = 4
"""Requests in a row without an answer."""
TRACEBACK_LINES = 3
"""Lines of a traceback that are shown with a failed worker: its last frame and the exception."""
MOST_REPORTED = 4
"""Most reported numbers in a line; `shoal describe` has all."""
QUIET_SECONDS = 5.0
"""Interval of lines without a terminal and without a change."""

IN_PASSING = {
    EventKind.AUDIT, EventKind.BEGUN, EventKind.DISCONNECTED, EventKind.OPEN, EventKind.PLAN, EventKind.PREPARE,
    EventKind.TRAINS, EventKind.WAITING,
}  # fmt: skip
"""Kinds of events that the display leaves out: the job's reason, or what came of it, says so at that moment. `shoal
events` has them all.
"""


class Display(Protocol):
    """Where a job is shown. A context manager, because a terminal must be put back."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, job: Json, samples_per_second: float | None) -> None:
        """The job as it is now."""

    def tell(self, line: str) -> None:
        """Something that has happened."""


class Terminal:
    """Redraws in place."""

    def __init__(self, on: Console) -> None:
        self._live = Live(console=on, refresh_per_second=8, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, job: Json, samples_per_second: float | None) -> None:
        workers = job["workers"]
        line = OneLine(
            (0, f"[bold]{job['job']}[/] {phase(job['phase'])}"),
            (0, f"step [bold]{step_of(job)}[/]"),
            (1, f"loss [bold]{number(job['loss'])}[/]"),
            (3, escape(", ".join(reported(job)[:MOST_REPORTED]))),
            (4, f"{number(samples_per_second)} samples/s"),
            (2, _left(job, samples_per_second)),
            (5, f"{workers['active']} of {plural(workers['wanted'], 'worker')}"),
            (6, f"generation {job['generation']}"),
        )
        bar = ProgressBar(total=job["max_steps"] or 1, completed=job["step"] if job["max_steps"] else 0)
        self._live.update(Group(line, Padding(bar), f"[dim]{escape(_first_line(job['reason']))}[/]"))

    def tell(self, line: str) -> None:
        self._live.console.print(escape(line))


class Lines:
    """A line on every change of the world, and every few seconds."""

    def __init__(self, on: Console) -> None:
        self._out = on
        self._shown: tuple[object, ...] = ()
        self._at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.file.flush()

    def show(self, job: Json, samples_per_second: float | None) -> None:
        workers = job["workers"]
        change = (job["phase"], job["generation"], workers["active"], workers["wanted"])
        now = time.monotonic()
        if change == self._shown and now - self._at < QUIET_SECONDS:
            return
        self._shown, self._at = change, now
        reports = "".join(f"{one}, " for one in reported(job)[:MOST_REPORTED])
        left = f"{known}, " if (known := _left(job, samples_per_second)) else ""
        self._out.print(
            f"{job['job']} {job['phase']}: step {step_of(job)}, loss {number(job['loss'])}, {reports}"
            f"{number(samples_per_second)} samples/s, {left}world {workers['active']} of {workers['wanted']}, "
            f"generation {job['generation']}" + (f"; {reason}" if (reason := _first_line(job["reason"])) else ""),
            markup=False,
            soft_wrap=True,
        )

    def tell(self, line: str) -> None:
        self._out.print(line, markup=False, soft_wrap=True)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_free(event: Json) -> bool:
    """Whether the event reports an automatic change of the world without cost."""
    if event["kind"] != EventKind.RESIZED:
        return False
    data = event["data"]
    return is_free(data.get("reason", ""), data["pause_seconds"], data["pause_bytes"])


def _in_short(event: Json) -> str:
    """Return the first line of an event; of a failure, also the end of its traceback."""
    sentence, *below = event_line(event).splitlines()
    return "\n".join([sentence, *below[-TRACEBACK_LINES:]] if event["kind"] == EventKind.FAILED else [sentence])


def _left(job: Json, samples_per_second: float | None) -> str:
    if job["phase"] in OVER:
        return ""
    return time_left(seconds_left(job["step"], job["max_steps"], job["samples"], samples_per_second))


def display() -> Display:
    """The one that suits standard error."""
    on = display_console()
    return Terminal(on) if is_redrawn(sys.stderr, on) else Lines(on)


async def watch(client: Client, job: str, shown: Display, revision: int = 0, printed: Printed | None = None) -> Json:
    """Show a job, its events beyond a revision, and what it prints, until it is over; returns it as it ended.

    A controller that says that it cannot answer now is asked until it can. A machine that was suspended finds its own
    requests too late: only after several in a row is the controller gone.
    """
    rate, misses = Rate(), 0
    while True:
        try:
            view, events = await client.job(job), await client.events(job, after=revision)
            workers = await client.workers(job) if printed is not None else []
        except (NoController, StoreError) as error:
            misses += 1
            if isinstance(error, NoController) and misses >= MOST_MISSES:
                raise
            if isinstance(error, StoreError) and misses == 1:
                shown.tell(f"{error}; trying again")
            await asyncio.sleep(POLL_SECONDS)
            continue
        misses = 0
        for event in events:
            revision = event["revision"]
            if event["kind"] not in IN_PASSING and not _is_free(event):
                shown.tell(_in_short(event))
        if printed is not None:
            take = printed.take_last_lines if view["phase"] in OVER else printed.take_lines
            for line in take(workers):
                shown.tell(line)
        rate.see(view["samples"] or 0, time.monotonic())
        shown.show(view, rate.per_second)
        if view["phase"] in OVER:
            return view
        await asyncio.sleep(POLL_SECONDS)


WINDOW_SECONDS = 5.0
"""Long enough for several heartbeats, short enough to show a change of the world."""


class Rate:
    """Growth per second of a count over the last few seconds; a count that went back starts it anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def see(self, count: float, now: float) -> None:
        if not count:
            return  # it has not begun
        seen = self._seen
        if seen and count < seen[-1][1]:
            seen.clear()
        if not seen or count > seen[-1][1]:
            seen.append((now, count))
        while len(seen) > 2 and now - seen[0][0] > WINDOW_SECONDS:
            seen.popleft()

    @property
    def per_second(self) -> float | None:
        """None until two counts were seen."""
        if len(self._seen) < 2:
            return None
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        return (last - first) / (until - since) if until > since else None


def seconds_left(step: int, last: int | None, samples: int | None, samples_per_second: float | None) -> float | None:
    """Until the last step, at this speed; None: not known. `samples`: those of the steps up to `step`."""
    if not last or not samples or not samples_per_second or not step:
        return None
    return max(0, last - step) * (samples / step) / samples_per_second


def time_left(seconds: float | None) -> str:
    """Return "42 s left" or "2 h 5 min left"; empty if the time is not known."""
    return "" if seconds is None else f"{duration(seconds)} left"
