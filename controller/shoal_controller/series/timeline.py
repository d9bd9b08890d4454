"""The timeline of one change of the world, cut from a job's history: what led to it, and what it went through. Pure.

Events carry the generation that trained when they were noted, so those before a world began bear an older one: they
are found between the end of the change before and the first figures of this one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_protos.plan import Reason, WorkerId

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.records import JobEvent

BEGINNINGS = (EventKind.OPEN, EventKind.BEGUN)
"""Of each world there is one."""

AFTER_IT_BEGAN = (EventKind.TRAINS, EventKind.RESIZED)

BEFORE_IT_BEGAN = frozenset(
    {
        EventKind.ANEW, EventKind.AUDIT, EventKind.CORRUPT_BLOCK, EventKind.DISCONNECTED, EventKind.DISMISSED,
        EventKind.DRAINING, EventKind.FAILED, EventKind.HEARD, EventKind.JOINED, EventKind.KEPT_OUT, EventKind.KILLED,
        EventKind.LEFT, EventKind.LOST, EventKind.PARTING, EventKind.PAUSED, EventKind.PLAN, EventKind.PREPARE,
        EventKind.RESTORING, EventKind.RESUMED, EventKind.RETURNED, EventKind.SCALED, EventKind.SILENT,
        EventKind.STALLED, EventKind.STARTING, EventKind.STAYS, EventKind.STRAGGLER, EventKind.SUSPECTED,
        EventKind.UNREACHABLE, EventKind.WAITING,
    }
)  # fmt: skip
"""Kinds that may lead to a change, or belong to it."""

ASKED_FOR = (Reason.START, Reason.DRAIN, Reason.SCALE_UP, Reason.SCALE_DOWN)
"""Reasons for which an operator may have asked."""

WAITED = re.compile(r"; waiting for (?P<whom>[^;]*?)(?: to | \(|: [0-9.]+ s|$)")
NAME = re.compile(r"\bw[0-9]+\b")


@dataclass(frozen=True, slots=True)
class Timeline:
    """One change of the world."""

    events: tuple[JobEvent, ...]
    """Oldest first."""
    noticed_by: str
    """Who noticed its cause: the controller, a launcher, a worker, an operator; empty: nobody has said so."""
    waited_for: tuple[WorkerId, ...]
    """Whom the others waited for."""
    slowest: WorkerId
    """Whose pause was the longest; empty: not known yet."""


def timeline(events: Sequence[JobEvent], generation: int, reason: str) -> Timeline:
    """Of a world that has begun for this reason. `events`: the job's, by revision."""
    begins = _index_of_beginning(events, generation)
    if begins is None:
        return Timeline((), "", (), "")
    before = [event for event in events[_end_of_last(events, begins) : begins] if event.kind in BEFORE_IT_BEGAN]
    after = [event for event in _until_next(events[begins + 1 :]) if event.kind in AFTER_IT_BEGAN]
    found = (*before, events[begins], *after)
    slowest = next((event.worker for event in after if event.kind == EventKind.RESIZED), "")
    return Timeline(found, _noticed_by(before, Reason(reason)), _waited_for(found), slowest)


def _index_of_beginning(events: Sequence[JobEvent], generation: int) -> int | None:
    found = (at for at, one in enumerate(events) if one.kind in BEGINNINGS and one.generation == generation)
    return next(found, None)


def _end_of_last(events: Sequence[JobEvent], begins: int) -> int:
    """Where the change before was through: what comes from there on is of this one."""
    for at in range(begins - 1, -1, -1):
        if events[at].kind in BEGINNINGS:
            return at + 1
    return 0


def _until_next(events: Sequence[JobEvent]) -> Sequence[JobEvent]:
    ends = (at for at, event in enumerate(events) if event.kind in BEGINNINGS)
    return events[: next(ends, len(events))]


def _noticed_by(before: Sequence[JobEvent], reason: Reason) -> str:
    """Whoever said first what the change is made for."""
    if not before:
        return ""
    if reason is Reason.KILL:
        lost = next((event for event in before if event.kind == EventKind.LOST), None)
        return str(lost.data.get("noticed_by", "the controller")) if lost is not None else "the controller"
    if reason is Reason.JOIN:
        return next((event.worker for event in before if event.kind == EventKind.JOINED), "the controller")
    return _asker(before) if reason in ASKED_FOR else "the controller"


def _asker(before: Sequence[JobEvent]) -> str:
    """Whether an operator has asked for it."""
    return "an operator" if any(event.kind == EventKind.AUDIT for event in before) else "the controller"


def _waited_for(events: Sequence[JobEvent]) -> tuple[WorkerId, ...]:
    """Named by the sentences that say so."""
    named: dict[WorkerId, None] = {}
    for event in events:
        if event.kind == EventKind.WAITING:
            named |= dict.fromkeys(NAME.findall(event.message))
        elif found := WAITED.search(event.message):
            named |= dict.fromkeys(NAME.findall(found["whom"]))
    return tuple(named)
