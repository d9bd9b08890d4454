"""Which of a job's events the cluster is told, and in how few: a storm of a hundred kills makes a handful. Pure.

The first of a kind goes out at once. Those that come while its pause lasts are one event when it is over, which counts
them and repeats the last one's sentence; the pause doubles as long as the storm goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_controller.core.machine.event_kind import EventKind

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 300.0

NORMAL, WARNING = "Normal", "Warning"

KINDS: Mapping[str, tuple[str, str]] = {
    EventKind.RESIZED: ("Resized", NORMAL),
    EventKind.SCALED: ("Scaled", NORMAL),
    EventKind.LOST: ("WorkerLost", WARNING),
    EventKind.DRAINING: ("Draining", NORMAL),
    EventKind.PARTING: ("Draining", NORMAL),
    EventKind.STALLED: ("Stalled", WARNING),
    EventKind.ANEW: ("StartedAnew", WARNING),
    EventKind.CHECKPOINT_SAVED: ("Saved", NORMAL),
    EventKind.CHECKPOINT_FAILED: ("SaveFailed", WARNING),
    EventKind.REFUSED: ("Refused", WARNING),
    EventKind.SUCCEEDED: ("Succeeded", NORMAL),
    EventKind.FAILED: ("Failed", WARNING),
    EventKind.CANCELLED: ("Cancelled", NORMAL),
}
"""Kinds of a job's history that the cluster is told, with Kubernetes' reason and type. The rest is in REST."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One event as the cluster gets it."""

    reason: str
    severity: str
    sentence: str
    number: int
    """Of the job's event that it tells, or ends with: makes its name."""
    time: float


@dataclass(slots=True)
class _Burst:
    until: float
    pause: float
    count: int = 0
    last: ClusterEvent | None = None


class EventBursts:
    """One resource's. The time is passed in, and never goes back."""

    def __init__(self) -> None:
        self._bursts: dict[str, _Burst] = {}

    def put(self, event: ClusterEvent, now: float) -> ClusterEvent | None:
        """What goes out at once; None: it waits for others."""
        burst = self._bursts.get(event.reason)
        if burst is None:
            self._bursts[event.reason] = _Burst(now + FIRST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS)
            return event
        burst.count, burst.last = burst.count + 1, event
        return None

    def take_due(self, now: float, *, all_of_them: bool = False) -> list[ClusterEvent]:
        """What has waited long enough."""
        due: list[ClusterEvent] = []
        for reason, burst in list(self._bursts.items()):
            if now < burst.until and not (all_of_them and burst.count):
                continue
            if burst.last is None:
                del self._bursts[reason]
                continue
            due.append(_counted(burst.last, burst.count))
            burst.pause = min(2 * burst.pause, LONGEST_PAUSE_SECONDS)
            burst.until, burst.count, burst.last = now + burst.pause, 0, None
        return due


def _counted(last: ClusterEvent, count: int) -> ClusterEvent:
    if count == 1:
        return last
    sentence = f"{count} times since the last event of this kind; the last: {last.sentence}"
    return ClusterEvent(last.reason, last.severity, sentence, last.number, last.time)
