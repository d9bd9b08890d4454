"""How long the writes of one job take: a store that is slow, and does not fail, is told of. Used by the repository."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

SLOW_SECONDS = 1.0
"""A write that takes longer is told of."""

log = structlog.get_logger("shoal.write_speed")


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
