"""When a change of a resource's size is passed on to its job: at once, but not as often as it goes to and fro. Pure.

A change in the direction of the last one is passed on at once. One that turns back waits until the last one is some
seconds old, so that what is under way comes to its end; each further turn waits twice as long. What is passed on then
is the newest size, and nothing where that is the job's by then. So an autoscaler that flaps for an hour makes a dozen
of changes, not hundreds.
"""

from __future__ import annotations

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
QUIET_SECONDS = 600.0
"""After so long without a change the first pause counts again."""


class SizeSettling:
    """One resource's. The time is passed in, and never goes back."""

    def __init__(self) -> None:
        self._direction = 0
        self._changed_at = float("-inf")
        self._pause = FIRST_PAUSE_SECONDS

    def due(self, wanted: int, asked: int, now: float) -> float:
        """When to pass on a change from `wanted` to `asked`: now, or later."""
        return max(now, self._changed_at + self._pause) if self._turns(wanted, asked) else now

    def note(self, wanted: int, asked: int, now: float) -> None:
        """It was passed on."""
        if asked == wanted:
            return
        if now - self._changed_at > QUIET_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        elif self._turns(wanted, asked):
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._direction, self._changed_at = _sign(asked - wanted), now

    def _turns(self, wanted: int, asked: int) -> bool:
        return _sign(asked - wanted) * self._direction < 0


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
