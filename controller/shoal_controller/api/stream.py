"""A job's events as server-sent events: what was, then what happens, until the reader or the controller goes, or the
reader's token opens nothing any more.

A comment every few seconds keeps the connection alive, and tells a reader that a quiet job is not a dead controller.
One that stops reading is cut off by `web.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import UserError

from shoal_controller.api.answers import EventAnswer
from shoal_controller.shell import Shell

IDLE_SECONDS = 10.0
"""After so long without an event comes a comment."""

MOST_FOLLOWERS = 256
"""Streams at a time: other requests, those for health among them, keep their connections."""
MOST_OF_TOKEN = 128
"""Streams that show one token: its holder does not take all."""

MEDIA_TYPE = "text/event-stream"


class Busy(UserError):
    """There are as many of something as can be served."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE
    problem_code = ErrorCode.TOO_MANY_READERS


@dataclass(frozen=True, slots=True)
class Follower:
    """Whoever follows a job's events."""

    token: str
    """Name of its token; empty where none is asked for."""
    is_let_in: Callable[[], bool]
    """Whether its token opens anything at this moment: it may be revoked, or expire, while it reads."""


def wants_stream(request: Request) -> bool:
    """Whether the reader asks for server-sent events."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def event_stream(shell: Shell, job: str, after: int, follower: Follower, followers: Counter[str]) -> StreamingResponse:
    """The stream. An unknown job is refused before it begins, and one reader too many (`followers`: how many there are
    of each token).
    """
    shell.view(job)
    if followers.total() >= MOST_FOLLOWERS:
        raise Busy(f"{MOST_FOLLOWERS} readers follow events already; ask without Accept: {MEDIA_TYPE}")
    if followers[follower.token] >= MOST_OF_TOKEN:
        raise Busy(
            f"{MOST_OF_TOKEN} readers with the token {follower.token} follow events already; ask without Accept: "
            f"{MEDIA_TYPE}, or give programs tokens of their own"
        )
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_written(shell, job, after, follower, followers), headers=headers, media_type=MEDIA_TYPE)


async def _written(
    shell: Shell, job: str, after: int, follower: Follower, followers: Counter[str]
) -> AsyncGenerator[bytes]:
    followers[follower.token] += 1
    try:
        async with aclosing(shell.follow(job, after, IDLE_SECONDS)) as events:
            async for event in events:
                if not follower.is_let_in():
                    return
                if event is None:
                    yield KEEPALIVE_COMMENT
                else:
                    answer = EventAnswer.of(event)
                    yield format_sse_event(data_str=answer.model_dump_json(), id=str(event.revision))
    finally:
        followers[follower.token] -= 1
        if not followers[follower.token]:
            del followers[follower.token]
