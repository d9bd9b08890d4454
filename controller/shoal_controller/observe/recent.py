"""What was seen lately: the greatest value of the last minute, and how long the writes of one job take.

`RecentMost` is what a gauge shows of what is over in milliseconds, cheap enough for every batch of events
(`job_inbox.py`, `own_figures.py`). By `WriteSpeed` a store that is slow, and does not fail, is told of
(`job_repository.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

SECONDS = 60.0
PARTS = 6
"""It forgets in so many steps."""
SLOW_SECONDS = 1.0
"""A write that takes longer is told of."""

log = structlog.get_logger("shoal.write_speed")


class RecentMost:
    """See `most`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[int, float] = {}
        """The greatest value of each sixth of a minute."""

    def see(self, value: float) -> None:
        part = int(self._clock() * PARTS / SECONDS)
        if part not in self._parts:
            self._parts = {known: most for known, most in self._parts.items() if known > part - PARTS}
        self._parts[part] = max(value, self._parts.get(part, value))

    @property
    def most(self) -> float:
        """Of the last minute; 0 where nothing was seen."""
        now = int(self._clock() * PARTS / SECONDS)
        return max((most for part, most in self._parts.items() if part > now - PARTS), default=0.0)


class WriteSpeed:
    """Of the last write, and of the one under way."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._began: float | None = None
        self._took = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """One attempt at a write."""
        loop = asyncio.get_running_loop()
        self._began = began = loop.time()
        try:
            yield
        finally:
            self._began, self._took = None, loop.time() - began
        if self._took >= SLOW_SECONDS:
            log.warning("the store is slow", job=self._job, seconds=round(self._took, 1))

    @property
    def sentence(self) -> str:
        """That writes are slow; empty where they are not."""
        took = self._took
        if self._began is not None:
            took = max(took, asyncio.get_running_loop().time() - self._began)
        if took < SLOW_SECONDS:
            return ""
        return f"the store is slow: a write takes {took:.1f} s (its disk?), and every change of the job waits for it"
