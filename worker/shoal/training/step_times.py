"""What this worker's loop spends its time on, by phase: reading, forward, backward, step. For people who ask for it.

A forward is all between a batch and its backward, the loop's own code too. Called by the engine; what is measured is
taken by `shoal.callbacks`, once a step.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("read", "forward", "backward", "step")


class StepTimes:
    """Seconds by phase since they were last taken."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._forward_began: float | None = None

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """A context whose time is that phase's."""
        if not self._wanted:
            yield
            return
        began = time.monotonic()
        if self._forward_began is not None:
            self._seconds["forward"] += began - self._forward_began
            self._forward_began = None
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - began

    def reading(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The same batches."""
        if not self._wanted:
            yield from batches
            return
        try:
            while True:
                with self.measure("read"):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                self._forward_began = time.monotonic()
                yield batch
        finally:
            batches.close()

    def take(self) -> dict[str, float]:
        """Seconds by phase; from now on they begin at zero. Empty where nobody wants them."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken if self._wanted else {}
