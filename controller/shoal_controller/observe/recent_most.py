"""The greatest of the values that were seen in the last minute: what a gauge shows of what is over in milliseconds.

Cheap enough for every batch of events. Used by `job_inbox.py` and `own_figures.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 60.0
PARTS = 6
"""It forgets in so many steps."""


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
