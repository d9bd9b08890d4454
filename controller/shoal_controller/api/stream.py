"""A job's events as server-sent events: what was, then what happens, until the reader or the controller goes.

A comment every few seconds keeps the connection alive, and tells a reader that a quiet job is not a dead controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from shoal_protos.errors import UserError
from starlette.types import Message, Send

from shoal_controller.api.answers import EventAnswer
from shoal_controller.shell import Shell

IDLE_SECONDS = 10.0
"""After so long without an event comes a comment."""

MOST_FOLLOWERS = 256
"""Streams at a time: other requests, those for health among them, keep their connections."""

SEND_SECONDS = 30.0
"""A reader that takes nothing for so long is cut off."""


class Busy(UserError):
    """There are as many of something as can be served."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class EventStream(StreamingResponse):
    """A stream whose reader may not stop reading."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        await super().stream_response(bounded)


def wants_stream(request: Request) -> bool:
    """Whether the reader asks for server-sent events."""
    return "text/event-stream" in request.headers.get("accept", "")


def event_stream(shell: Shell, job: str, after: int, followers: set[object]) -> EventStream:
    """The stream. An unknown job is refused before it begins, and one reader too many (`followers`: all there are)."""
    shell.view(job)
    if len(followers) >= MOST_FOLLOWERS:
        raise Busy(f"{MOST_FOLLOWERS} readers follow events already; ask without Accept: text/event-stream")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventStream(_written(shell, job, after, followers), headers=headers)


async def _written(shell: Shell, job: str, after: int, followers: set[object]) -> AsyncGenerator[bytes]:
    me = object()
    followers.add(me)
    try:
        async with aclosing(_lines(shell, job, after)) as lines:
            async for line in lines:
                yield line
    finally:
        followers.discard(me)


async def _lines(shell: Shell, job: str, after: int) -> AsyncGenerator[bytes]:
    async with aclosing(shell.follow(job, after, IDLE_SECONDS)) as events:
        async for event in events:
            if event is None:
                yield KEEPALIVE_COMMENT
            else:
                answer = EventAnswer.of(event)
                yield format_sse_event(data_str=answer.model_dump_json(), id=str(event.revision))
