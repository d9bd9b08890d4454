"""The workers' step log: who had committed which step when, in which generation. train.py writes it.

A step is done when every trainer of its world has it; a world's normal step is the median of the times between steps
that are done in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

POLL_SECONDS = 0.01
PATIENCE_SECONDS = 180.0

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """One worker's line."""

    time: float
    worker: str
    step: int
    generation: int
    lanes: int
    cpu: float = 0.0
    """Seconds that its process had computed by then."""
    began: float = 0.0
    """When its first lane began."""


def until(
    goal: str, seen: Callable[[], T | None], patience: float = PATIENCE_SECONDS, pause: float = POLL_SECONDS
) -> T:
    """The first true value of `seen()`. Looks again and again: what other processes do sends no event here."""
    deadline = time.monotonic() + patience
    while not (value := seen()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:.0f} s for {goal}")
        time.sleep(pause)
    return value


class StepLog:
    """Reads what has been appended since it last looked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[Step] = []
        self._at = 0

    def look(self) -> list[Step]:
        """All lines so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._at += len(whole)
            self.steps += [Step(**json.loads(line)) for line in whole.splitlines()]
        return self.steps

    def until(self, goal: str, seen: Callable[[list[Step]], T], patience: float = PATIENCE_SECONDS) -> T:
        """The first true value of `seen(all lines)`."""
        return until(goal, lambda: seen(self.look()), patience)

    def next_of(self, worker: str) -> Step:
        """The worker's next line from now on."""
        before = sum(step.worker == worker for step in self.look())
        return self.until(f"a step of {worker}", lambda steps: [s for s in steps if s.worker == worker][before:])[0]


def done(steps: list[Step], since: int, trainers: int) -> list[float]:
    """When each step of the generations from `since` on was done by so many trainers, in order."""
    times: dict[int, list[float]] = {}
    for step in steps:
        if step.generation >= since:
            times.setdefault(step.step, []).append(step.time)
    return [max(each) for _, each in sorted(times.items()) if len(each) >= trainers]


def normal_step(times: list[float]) -> float:
    """The median seconds between steps that are done one after the other."""
    return median(later - earlier for earlier, later in pairwise(times))
