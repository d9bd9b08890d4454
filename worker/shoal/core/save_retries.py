"""Saves that have failed and are to be tried again: when, and for how long.

Later and later, for a bounded time: an outage of a minute must cost no checkpoint, and at a job's end the workers hold
the only copy of what was trained. Called by training/checkpoint_saving.py. Pure: times are the caller's clock.
"""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class SaveRetries:
    """See the module's text."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When the first save of a row failed; None: the last one did not."""
        self._pause, self._not_before = FIRST_PAUSE_SECONDS, 0.0

    def on_saved(self) -> None:
        """The place works: the next failure is the first one of a row."""
        self._since, self._pause, self._not_before = None, FIRST_PAUSE_SECONDS, 0.0

    def on_end(self) -> None:
        """All steps are done: what failed before is tried at once, and has its whole time again."""
        self.on_saved()

    def on_failed(self, now: float, patience_seconds: float) -> bool:
        """Return whether the save is to be tried again: for so long after the first failure of a row."""
        self._since = now if self._since is None else self._since
        if now - self._since >= patience_seconds:
            return False
        self._not_before = min(now + self._pause, self._since + patience_seconds)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True

    def is_waiting(self, now: float) -> bool:
        """Return whether the next try is still to wait."""
        return now < self._not_before
