"""Parameters of the routes: the jobs to read or change, pages of lists, and filters of events.

Reading uses the jobs as far as this controller knows them; changing needs the leader. A follower forwards what it can
(`forwarding.py`); a request that arrives here nevertheless is answered from the store, or refused.

A page has `limit` entries after the entry `after`. The order of a list does not depend on changes of its entries, so
the `next` of one page continues the list even if that entry has been deleted. Both lists of events, of a job and of
all jobs, have the same filter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Query, Request
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.errors import UserError

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.spec import WorkerView
from shoal_controller.jobs.records import JobEvent
from shoal_controller.jobs.shell import Shell
from shoal_controller.leadership.controller_state import ControllerState


def controller_of(request: Request) -> ControllerState:
    """What `app.py` was given."""
    controller = request.app.state.controller
    assert isinstance(controller, ControllerState)
    return controller


async def shell_to_read(request: Request) -> Shell:
    """All jobs, as far as this controller knows them."""
    return await controller_of(request).readable()


def shell_to_change(request: Request) -> Shell:
    """All jobs, of the controller that leads."""
    return controller_of(request).leading()


@dataclass(frozen=True, slots=True)
class NamedWorker:
    """The worker that a path names."""

    job: str
    worker: str


Readable = Annotated[Shell, Depends(shell_to_read)]
Leading = Annotated[Shell, Depends(shell_to_change)]
AWorker = Annotated[NamedWorker, Depends(NamedWorker)]


MOST_ENTRIES = 10_000

Limit = Annotated[
    int | None, Query(ge=1, le=MOST_ENTRIES, description="Most entries of the answer. Default: as many as there are.")
]
After = Annotated[
    str | None, Query(max_length=300, description="`next` of the page before. Default: from the first entry on.")
]

One = TypeVar("One")
Place = tuple[object, ...]
"""Where in its list an entry stands; places can be compared."""


def page(
    entries: Sequence[One], place: Callable[[One], Place], begin: Place | None, limit: int | None
) -> tuple[list[One], bool]:
    """The entries beyond `begin`, and whether more follow."""
    found = [entry for entry in entries if begin is None or place(entry) > begin]
    return (found, False) if limit is None else (found[:limit], len(found) > limit)


def by_number(name: str) -> Place:
    """w2 stands before w10, and both before any other name of theirs."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts if part)


def workers_in_order(workers: Sequence[WorkerView]) -> list[WorkerView]:
    return sorted(workers, key=lambda worker: by_number(worker.worker))


def place_of(checkpoint: CheckpointRef) -> Place:
    """Newest first."""
    return -checkpoint.generation, -checkpoint.step


def cursor_of(checkpoint: CheckpointRef) -> str:
    return f"{checkpoint.generation}-{checkpoint.step}"


def checkpoint_place(cursor: str) -> Place:
    """The inverse of `cursor_of`. Raises `UserError`."""
    found = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", cursor)
    if found is None:
        raise UserError(f"`after` is {cursor[:80]!r}; expected `next` of the page before, such as 3-400")
    return -int(found[1]), -int(found[2])


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
    """Which events a request asks for."""

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
    """Return the filter that a request asks for."""
    return EventFilter(frozenset(one.value for one in kind or ()), worker)


AFilter = Annotated[EventFilter, Depends(event_filter)]
