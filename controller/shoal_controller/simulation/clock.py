"""Virtual time: events in the order of their times, and nothing else moves it.

`shoal what-if` and the tests' simulation run on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any


class Clock:
    """`after` puts a call on the line, `run_until` makes what is due; equal times keep their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._line: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    @property
    def next_at(self) -> float:
        """The time of the next event; infinite: there is none."""
        return self._line[0][0] if self._line else inf

    def after(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._line, (self.now + delay, self._count, call, args))

    def step(self) -> None:
        """The next event."""
        self.now, _, call, args = heapq.heappop(self._line)
        call(*args)

    def run_until(self, time: float) -> None:
        line = self._line
        while line and line[0][0] <= time:
            self.now, _, call, args = heapq.heappop(line)
            call(*args)
        self.now = max(self.now, time)
