"""The inbox of a job's loop: a bounded queue of events with their submitters, and the backlog while the store fails.

Used by `runner.py` alone. It decides nothing: the loop says when it takes a batch, and when events must wait.

`Backlog` keeps, in order, what was said while the store could not be written. Its size is bounded by the streams and
workers there are: of each kind only the latest event of a stream or a worker counts. A stream that came and went in the
meantime has said nothing, and one that only went has left how its script ended, which is not sent again. The job sees a
slow controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_protos.acts import OperatorRequest
from shoal_protos.errors import StoreError
from shoal_protos.messages import Result

from shoal_controller.access.callers import Caller
from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Event,
    Exited,
    MessageReceived,
    NeverStarted,
    Probed,
    SeatAsked,
    Spawned,
    Tick,
    first_batch,
)
from shoal_controller.jobs.only_if import OnlyIf
from shoal_controller.observe.recent import RecentMost

INBOX = 1024
"""Events that may wait for one job; whoever brings more waits too."""

SUBMIT_SECONDS = 30.0
"""How long an event may wait for a place in the line."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An event, and who waits for it to be handled."""

    event: Event
    done: asyncio.Future[None] | None = None
    """None: nobody waits for it."""
    by: Caller | None = None
    """Who asked for it; None: no operator."""
    only_if: OnlyIf | None = None
    """None: whatever the job's version is."""

    @property
    def is_request(self) -> bool:
        return isinstance(self.event, OperatorRequest)


class JobInbox:
    """The line of one job, first come, first served."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._line: asyncio.Queue[Submission] = asyncio.Queue(INBOX)
        self._tick_waits = False
        self._backlog = Backlog()
        self._depths = RecentMost()

    @property
    def deepest(self) -> int:
        """Most events that stood in line when a batch was taken, in the last minute."""
        return int(self._depths.most)

    async def put(self, submission: Submission) -> None:
        """Raises `StoreError` where no place becomes free in time."""
        if not self._line.full():
            return self._line.put_nowait(submission)  # a timer for each heartbeat would cost more than to hear it
        try:
            async with asyncio.timeout(SUBMIT_SECONDS):
                await self._line.put(submission)
        except TimeoutError as error:
            raise StoreError(f"job {self._job} is too busy; try again later") from error

    def put_tick(self) -> None:
        """At the end of the line, unless one stands there already."""
        if not (self._tick_waits or self._line.full()):
            self._tick_waits = True
            self._line.put_nowait(Submission(Tick()))

    def wake(self) -> None:
        """Whoever waits for the first in line gets one, though nothing may have come."""
        if self._line.empty():
            self._line.put_nowait(Submission(Tick()))

    async def take_first(self) -> Submission:
        return await self._line.get()

    def take_batch(self, first: Submission) -> list[Submission]:
        """What stands in line behind `first`, as far as it is one batch with it."""
        self._depths.see(self._line.qsize() + 1)
        batch, later = first_batch([first, *self._empty()], lambda submission: submission.event)
        for submission in later:
            self._line.put_nowait(submission)
        if any(isinstance(submission.event, Tick) for submission in batch):
            self._tick_waits = False
        return batch

    def end(self, why: BaseException | None) -> None:
        """Tell all that stand in line."""
        settle(self._empty(), why)

    # ---- while nothing can be handled

    def keep(self, event: Event) -> None:
        """For `take_kept`, when it can."""
        self._backlog.add(event)

    def take_kept(self) -> list[Event]:
        """What was kept, oldest first."""
        return self._backlog.take()

    def set_aside(self, *taken: Submission) -> list[Submission]:
        """Keep `taken` and all that stand in line, but for ticks; the operators' requests among them are returned."""
        everything = [*taken, *self._empty()]
        others = [one for one in everything if not one.is_request]
        for one in others:
            if not isinstance(one.event, Tick):
                self.keep(one.event)
        settle(others, None)
        self._tick_waits = False
        return [one for one in everything if one.is_request]

    def set_aside_but_requests(self) -> None:
        """Keep all that stand in line, but for the operators' requests, which stay there."""
        for request in self.set_aside():
            self._line.put_nowait(request)

    def _empty(self) -> list[Submission]:
        """What stands in line now, which nobody finds there any more."""
        return [self._line.get_nowait() for _ in range(self._line.qsize())]


def settle(submissions: Sequence[Submission], error: BaseException | None) -> None:
    """Tell whoever submitted them, unless they have gone."""
    for submission in submissions:
        if submission.done is None or submission.done.done():
            continue
        if error is None:
            submission.done.set_result(None)
        else:
            submission.done.set_exception(error)


Key = tuple[object, ...]


class Backlog:
    """Events of one job that wait for its runner."""

    def __init__(self) -> None:
        self._events: dict[Key, Event] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, Disconnected):
            came = any((kind, event.connection) in self._events for kind in (Connected, SeatAsked))
            lasting = () if came else ((MessageReceived, event.connection, Result),)
            self._events = {
                key: one for key, one in self._events.items() if key[1] != event.connection or key in lasting
            }
            if came:
                return
        key = _key(event)
        self._events.pop(key, None)
        self._events[key] = event

    def take(self) -> list[Event]:
        """All of them, oldest first; they are not kept any longer."""
        events = list(self._events.values())
        self._events = {}
        return events


def _key(event: Event) -> Key:
    """What a later event must share with an earlier one to take its place."""
    match event:
        case MessageReceived(connection, message):
            return MessageReceived, connection, type(message)
        case Connected(connection) | SeatAsked(connection) | Disconnected(connection):
            return type(event), connection
        case Probed(worker) | Spawned(worker) | Exited(worker) | NeverStarted(worker):
            return type(event), worker
        case _:
            return type(event), None
