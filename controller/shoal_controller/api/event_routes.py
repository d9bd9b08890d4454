"""The route of all jobs' events: those that this controller has in memory (`event_feed.py`), and those to come."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from shoal_controller.api.answers import EventOfJobAnswer, NewestEventsAnswer
from shoal_controller.api.dependencies import MOST_NAME, AFilter, Readable, shell_to_change
from shoal_controller.api.stream import Follower, feed_stream, wants_stream

A_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""What else events may come as."""

OfJob = Annotated[str | None, Query(max_length=MOST_NAME, description="Only events of this job. Default: of all jobs.")]


def cursor_of_reader(
    after: Annotated[
        str | None,
        Query(max_length=MOST_NAME, description="`next` of the answer before, or an event's `id`. Default: see above."),
    ] = None,
    last_event_id: Annotated[str | None, Header(max_length=MOST_NAME, include_in_schema=False)] = None,
) -> str | None:
    """Of a reader that comes again, the header says what it has had."""
    return last_event_id or after


ACursor = Annotated[str | None, Depends(cursor_of_reader)]

router = APIRouter()


@router.get("/events", tags=["events"], response_model=NewestEventsAnswer, responses=A_STREAM)
async def list_newest_events(
    shell: Readable, request: Request, cursor: ACursor, only: AFilter, job: OfJob = None
) -> NewestEventsAnswer | StreamingResponse:
    """List the newest events of all jobs that this controller has in memory, oldest first.

    With `Accept: text/event-stream`, stream them as they happen, from `after` on, else from now on. `anew`, and the
    event of that name, say that what lay between is not here any more: look at everything again.
    """
    if wants_stream(request):
        return feed_stream(shell_to_change(request), cursor, job, Follower.of(request), only)
    found = shell.feed.after(cursor)
    admitted = [
        EventOfJobAnswer.made(entry.job, entry.event)
        for entry in found
        if entry.event is not None and job in (None, entry.job) and only.admits(entry.event)
    ]
    anew = any(entry.event is None for entry in found)
    return NewestEventsAnswer(events=admitted, anew=anew, next=found[-1].id if found else cursor or shell.feed.newest)
