"""The loop that looks at every job once a second, so that its series go on. The shell runs it while it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

EVERY_SECONDS = 1.0
"""From one point of every job's series to the next."""

AT_A_TIME = 25
"""Jobs that are looked at before others have their turn."""

log = structlog.get_logger("shoal.series")


class Recorded(Protocol):
    """A job that can be looked at."""

    def record(self) -> None:
        """Put a point into its series."""


async def record_series(jobs: Callable[[], Iterable[Recorded]]) -> None:
    """Look at them all, for ever. A job that cannot be looked at (a bug) has no series any more; it goes on itself."""
    unseen: set[Recorded] = set()
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        for number, job in enumerate(list(jobs())):
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)
            try:
                if job not in unseen:
                    job.record()
            except Exception as error:
                unseen.add(job)
                log.error("a job's series have ended", error=str(error), exc_info=error)
