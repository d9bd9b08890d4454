"""The timeline of one change of the world, cut from a job's history: what led to it, and what it went through. Pure.

Events carry the generation that trained when they were noted, so those before a world began bear an older one. They are
found between its cause and its first figures: a world may have trained for days before that, and what happened
meanwhile is not of this change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_protos.plan import Reason, WorkerId

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.jobs.records import JobEvent

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

ASKED_BY = {
    Reason.START: "create", Reason.DRAIN: "drain", Reason.SCALE_UP: "scale", Reason.SCALE_DOWN: "scale",
}  # fmt: skip
"""The request (`audit.py`) by which an operator may have asked for a change of that reason."""

CAUSES = {
    Reason.JOIN: (EventKind.JOINED, EventKind.RETURNED),
    Reason.DRAIN: (EventKind.DRAINING,),
    Reason.SCALE_UP: (EventKind.SCALED, EventKind.JOINED, EventKind.RETURNED),
    Reason.SCALE_DOWN: (EventKind.SCALED, EventKind.DRAINING),
}
"""What leads to a planned change of that reason, perhaps long before: of each kind and worker the last."""

MOMENT = 1.0
"""Seconds: a connection that ended so shortly before a change was prepared belongs to it."""

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
    before = _before(events, begins, Reason(reason))
    after = [event for event in _until_next(events[begins + 1 :]) if event.kind in AFTER_IT_BEGAN]
    found = (*before, events[begins], *after)
    slowest = next((event.worker for event in after if event.kind == EventKind.RESIZED), "")
    return Timeline(found, _noticed_by(before, Reason(reason)), _waited_for(found), slowest)


def _before(events: Sequence[JobEvent], begins: int, reason: Reason) -> list[JobEvent]:
    """From its cause on."""
    end_of_last, beginning = _end_of_last(events, begins), events[begins]
    found = [event for event in events[end_of_last:begins] if event.kind in BEFORE_IT_BEGAN]
    if reason is Reason.START and not end_of_last:
        return found  # of the job's first world all is of its beginning
    planned = _plan_of(found, beginning) if beginning.kind == EventKind.BEGUN else None
    noticed = planned.time if planned is not None else _noticed_at(found, beginning)
    causes = [event.time for event in _causes(found, planned, reason)]
    since = min([noticed, *causes]) - MOMENT
    return [event for event in found if event.time >= since]


def _noticed_at(before: Sequence[JobEvent], beginning: JobEvent) -> float:
    """When the controller knew of the cause of a loss or a start, less the time in which nobody had noticed it; of a
    planned change whose plan is not there any more when it began.
    """
    if beginning.kind == EventKind.BEGUN:
        return beginning.time
    first = next((event for event in before if event.kind in (EventKind.PREPARE, EventKind.ANEW)), beginning)
    seconds = first.data.get("detect_seconds", 0.0)
    return first.time - (seconds if isinstance(seconds, int | float) else 0.0)


def _plan_of(before: Sequence[JobEvent], beginning: JobEvent) -> JobEvent | None:
    """By which a planned change was announced."""
    words = f"generation {beginning.generation} will replace "
    plans = (event for event in reversed(before) if event.kind == EventKind.PLAN and event.message.startswith(words))
    return next(plans, None)


def _causes(before: Sequence[JobEvent], planned: JobEvent | None, reason: Reason) -> list[JobEvent]:
    """What led to a planned change: of those whom its plan adds or removes, and requests of operators for it. Where the
    plan's sentence names nobody, the last of each kind.
    """
    names = frozenset(NAME.findall(planned.message)) if planned is not None else frozenset()
    last: dict[tuple[str, WorkerId], JobEvent] = {}
    for event in before:
        concerns = not names or not event.worker or event.worker in names
        if concerns and (_asks_for(event, reason) or event.kind in CAUSES.get(reason, ())):
            last[event.kind, event.worker if names else ""] = event
    return list(last.values())


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
    if reason in (Reason.KILL, Reason.RESTORE):
        return str(next((event.data["noticed_by"] for event in before if "noticed_by" in event.data), "the controller"))
    if reason is Reason.JOIN:
        return next((event.worker for event in before if event.kind == EventKind.JOINED), "the controller")
    return _asker(before, reason)


def _asker(before: Sequence[JobEvent], reason: Reason) -> str:
    """Whether an operator has asked for it: by a request of that kind, of a worker that it concerns."""
    drained = {event.worker for event in before if event.kind == EventKind.DRAINING}
    for event in before:
        if _asks_for(event, reason) and (reason is not Reason.DRAIN or event.worker in drained):
            return "an operator"
    return "the controller"


def _asks_for(event: JobEvent, reason: Reason) -> bool:
    return event.kind == EventKind.AUDIT and reason in ASKED_BY and event.data.get("action") == ASKED_BY[reason]


def _waited_for(events: Sequence[JobEvent]) -> tuple[WorkerId, ...]:
    """Named by the sentences that say so."""
    named: dict[WorkerId, None] = {}
    for event in events:
        if event.kind == EventKind.WAITING:
            named |= dict.fromkeys(NAME.findall(event.message))
        elif found := WAITED.search(event.message):
            named |= dict.fromkeys(NAME.findall(found["whom"]))
    return tuple(named)
