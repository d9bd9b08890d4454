"""Which events a reader wants: the query of both lists of events, of a job and of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.records import JobEvent

MOST_NAME = 300

Kinds = Annotated[
    list[EventKind] | None,
    Query(max_length=len(EventKind), description="Kinds of events, once for each. Default: all kinds."),
]
OfWorker = Annotated[
    str | None, Query(max_length=MOST_NAME, description="Only events that concern this worker. Default: all events.")
]


@dataclass(frozen=True, slots=True)
class EventFilter:
    """What is wanted."""

    kinds: frozenset[str]
    """Empty: all kinds."""
    worker: str | None
    """None: whichever worker it concerns, or none."""

    @property
    def admits_all(self) -> bool:
        return not self.kinds and self.worker is None

    def admits(self, event: JobEvent) -> bool:
        """Whether the reader wants this one."""
        return (not self.kinds or event.kind in self.kinds) and self.worker in (None, event.worker)


def event_filter(kind: Kinds = None, worker: OfWorker = None) -> EventFilter:
    """Of a request."""
    return EventFilter(frozenset(one.value for one in kind or ()), worker)


AFilter = Annotated[EventFilter, Depends(event_filter)]
