"""Virtual time: events in the order of their times, and nothing else moves it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulation import Simulation

EPOCH = 1_000_000.0
"""What a clock that will be set says at first: it stays above zero."""
STEPS = (-7200.0, -60.0, -3.0, 0.0, 0.0, 3.0, 60.0, 7200.0)
"""By how many seconds it is set between two lives."""
SHARE_OF_SEEDS = 0.3


class Clock:
    """`at` puts a call on the line, `run_until` makes what is due; equal times keep their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._line: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

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


class SetClock:
    """The clock of the controller's machine, which is set while no controller lives there: each life reads it once."""

    def __init__(self, simulation: Simulation) -> None:
        self._chance = Random(f"{simulation.seed} clock")
        self._is_set = simulation.has_operators and self._chance.random() < SHARE_OF_SEEDS
        self._say = simulation.say
        self.by = EPOCH if self._is_set else 0.0
        """How much later it is there than in truth."""
        self.forward = 0.0
        """By how much it was set forward, in all: so much time has passed for whoever waits by the clock."""

    def begin_life(self, life: int) -> None:
        if self._is_set and life > 1:
            seconds = self._chance.choice(STEPS)
            self.by += seconds
            self.forward += max(0.0, seconds)
            self._say("the controller's clock was set by", seconds)
