"""The newest events of all jobs, as they become durable, for whoever follows them all: `GET /v1/events`.

In memory and bounded; each job's whole history is in the store. An entry's id tells which controller's feed it is of
and where in it: a reader that comes again with an id of another one, or of an entry that is gone, is told to begin
anew. The shell has one; `JobRepository` gives it what it has written.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from shoal_controller.jobs.records import JobEvent

MOST_EVENTS = 2000
MOST_CHARACTERS = 1 << 20
"""Over all messages that are kept."""

ID = re.compile(r"(?P<life>[0-9a-f]{16})-(?P<number>[0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """An event of some job. `event` is None where the reader must begin anew: what lay between is not here."""

    id: str
    job: str = ""
    event: JobEvent | None = None


class EventFeed:
    """See the module's text. `life`: 16 hexadecimal digits that no other controller's feed has."""

    def __init__(self, life: str) -> None:
        self._life = life
        self._entries: deque[tuple[str, JobEvent]] = deque()
        self._first = 1
        """The number of the oldest entry."""
        self._characters = 0
        self._news = asyncio.Event()
        self._closed = False

    def put(self, job: str, events: Sequence[JobEvent]) -> None:
        """Events of a job that are in the store now."""
        for event in events:
            self._entries.append((job, event))
            self._characters += len(event.message)
        while len(self._entries) > MOST_EVENTS or (self._characters > MOST_CHARACTERS and len(self._entries) > 1):
            self._characters -= len(self._entries.popleft()[1].message)
            self._first += 1
        self._wake()

    def close(self) -> None:
        """Nothing more will come: whoever follows may go."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    @property
    def newest(self) -> str:
        """Id of the newest entry, or of the beginning: what comes later is what a reader lacks that has seen all."""
        return self._id(self._first + len(self._entries) - 1)

    def _id(self, number: int) -> str:
        return f"{self._life}-{number}"

    def after(self, cursor: str | None) -> list[FeedEntry]:
        """The entries beyond an id, oldest first; None: all that are kept. Where the entry after it is not here (any
        more), the first one says that the reader must begin anew.
        """
        number = self._number_of(cursor) if cursor is not None else self._first - 1
        if number is None:
            return [FeedEntry(self.newest)]
        begin = number + 1 - self._first
        found = list(self._entries)[begin:] if begin >= 0 else []
        return [FeedEntry(self._id(number + 1 + at), job, event) for at, (job, event) in enumerate(found)]

    def _number_of(self, cursor: str) -> int | None:
        """Which of this feed's entries it names; None: none that can be gone on from."""
        found = ID.fullmatch(cursor)
        if found is None or found["life"] != self._life:
            return None
        number = int(found["number"])
        return number if self._first - 1 <= number < self._first + len(self._entries) else None

    async def follow(self, cursor: str | None, idle_seconds: float) -> AsyncGenerator[FeedEntry | None]:
        """The same, and then every entry as it comes; None whenever nothing came for so long. Ends with the shell.
        A reader without an id gets what comes from now on.
        """
        cursor = self.newest if cursor is None else cursor
        while not self._closed:
            news = self._news
            found = self.after(cursor)
            for entry in found:
                yield entry
                cursor = entry.id
            if not found:
                try:
                    async with asyncio.timeout(idle_seconds):
                        await news.wait()
                except TimeoutError:
                    yield None
