"""How fast a job goes, from the step counts that were seen, and how long it will take. Pure: whoever watches brings the
time.
"""

from __future__ import annotations

from collections import deque

from shoal_protos.readable import duration

WINDOW_SECONDS = 5.0
"""Long enough for several heartbeats, short enough to show a change of the world."""


class Rate:
    """Growth per second of a count over the last few seconds; a count that went back starts it anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def see(self, count: float, now: float) -> None:
        if not count:
            return  # it has not begun
        seen = self._seen
        if seen and count < seen[-1][1]:
            seen.clear()
        if not seen or count > seen[-1][1]:
            seen.append((now, count))
        while len(seen) > 2 and now - seen[0][0] > WINDOW_SECONDS:
            seen.popleft()

    @property
    def per_second(self) -> float | None:
        """None until two counts were seen."""
        if len(self._seen) < 2:
            return None
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        return (last - first) / (until - since) if until > since else None


def seconds_left(step: int, last: int | None, samples: int | None, samples_per_second: float | None) -> float | None:
    """Until the last step, at this speed; None: not known. `samples`: those of the steps up to `step`."""
    if not last or not samples or not samples_per_second or not step:
        return None
    return max(0, last - step) * (samples / step) / samples_per_second


def time_left(seconds: float | None) -> str:
    """Return "42 s left" or "2 h 5 min left"; empty if the time is not known."""
    return "" if seconds is None else f"{duration(seconds)} left"
