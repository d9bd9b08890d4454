"""Events as server-sent events, of a job or of all: what was, then what happens, until the reader or the controller
goes, or the reader's token opens nothing any more.

A comment every few seconds keeps the connection alive, and tells a reader that a quiet job is not a dead controller.
One that stops reading is cut off by `web.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import UserError
from starlette.types import Receive, Scope, Send

from shoal_controller.api.answers import EventAnswer, EventOfJobAnswer
from shoal_controller.api.dependencies import EventFilter
from shoal_controller.jobs.shell import Shell

IDLE_SECONDS = 10.0
"""After so long without an event comes a comment."""

MOST_FOLLOWERS = 256
"""Streams at a time: other requests, those for health among them, keep their connections."""
MOST_OF_TOKEN = 128
"""Streams that show one token: its holder does not take all."""

MEDIA_TYPE = "text/event-stream"

ANEW = "anew"
"""Name of the server-sent event that says: what lay between is not here, look at everything again."""


class Busy(UserError):
    """There are as many of something as can be served."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE
    problem_code = ErrorCode.TOO_MANY_READERS


@dataclass(frozen=True, slots=True)
class Follower:
    """Whoever follows events."""

    token: str
    """Name of its token; empty where none is asked for."""
    is_let_in: Callable[[], bool]
    """Whether its token opens anything at this moment: it may be revoked, or expire, while it reads."""
    readers: Counter[str]
    """How many streams there are of each token."""

    @classmethod
    def of(cls, request: Request) -> Self:
        return cls(request.state.caller.token, request.state.is_let_in, request.app.state.followers)

    def place(self) -> ExitStack:
        """Return a place among all streams, counted from now on until it is closed. Raises `Busy` where it would be one
        too many.
        """
        token, readers = self.token, self.readers
        if readers.total() >= MOST_FOLLOWERS:
            raise Busy(f"{MOST_FOLLOWERS} readers follow events already; ask without Accept: {MEDIA_TYPE}")
        if readers[token] >= MOST_OF_TOKEN:
            raise Busy(
                f"{MOST_OF_TOKEN} readers with the token {token} follow events already; ask without Accept: "
                f"{MEDIA_TYPE}, or give programs tokens of their own"
            )

        readers[token] += 1
        place = ExitStack()
        place.callback(self._leave)
        return place

    def _leave(self) -> None:
        self.readers[self.token] -= 1
        if not self.readers[self.token]:
            del self.readers[self.token]


class Following(StreamingResponse):
    """The answer whose server-sent events come as these parts. It closes its place in the end, also where its reader
    has gone before the first part.
    """

    def __init__(self, parts: AsyncGenerator[bytes], place: ExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(parts, headers=headers, media_type=MEDIA_TYPE)
        self.place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.place:
            await super().__call__(scope, receive, send)


def wants_stream(request: Request) -> bool:
    """Whether the reader asks for server-sent events."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def event_stream(shell: Shell, job: str, after: int, follower: Follower, only: EventFilter) -> Following:
    """A job's. An unknown job is refused before it begins."""
    shell.runner(job)
    return Following(_of_job(shell, job, after, follower, only), follower.place())


def feed_stream(shell: Shell, cursor: str | None, job: str | None, follower: Follower, only: EventFilter) -> Following:
    """Those of all jobs, or of one that there may not be yet. `cursor`: id of the last one that the reader has had."""
    return Following(_of_all(shell, cursor, job, follower, only), follower.place())


async def _of_job(shell: Shell, job: str, after: int, follower: Follower, only: EventFilter) -> AsyncGenerator[bytes]:
    async with aclosing(shell.follow(job, after, IDLE_SECONDS)) as events:
        async for event in events:
            if not follower.is_let_in():
                return
            if event is None:
                yield KEEPALIVE_COMMENT
            elif only.admits(event):
                answer = EventAnswer.of(event)
                yield format_sse_event(data_str=answer.model_dump_json(), id=str(event.revision))


async def _of_all(
    shell: Shell, cursor: str | None, job: str | None, follower: Follower, only: EventFilter
) -> AsyncGenerator[bytes]:
    async with aclosing(shell.feed.follow(cursor, IDLE_SECONDS)) as entries:
        async for entry in entries:
            if not follower.is_let_in():
                return
            if entry is None:
                yield KEEPALIVE_COMMENT
            elif entry.event is None:
                yield format_sse_event(data_str="{}", event=ANEW, id=entry.id)
            elif job in (None, entry.job) and only.admits(entry.event):
                answer = EventOfJobAnswer.made(entry.job, entry.event)
                yield format_sse_event(data_str=answer.model_dump_json(), id=entry.id)
