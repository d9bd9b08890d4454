"""Requests to a controller that follows: the one that leads answers them.

Whatever is below `/v1/` is asked of the leader, by the very path that was sent, and its answer handed on as it comes,
streams of events too. Where the leader is not reached, what only reads is answered here from the store, and `Age` says
how old that may be; the rest waits for the next leader for a moment, or gets a 503. A leader that says nothing is
waited for while it leads: a frozen one takes connections. A request is forwarded once: two controllers that take each
other for the leader do not pass it to and fro.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

import httpx
import structlog
from shoal_protos.release import RELEASE_HEADER
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_controller.api.neighbours import Neighbours
from shoal_controller.api.problems import problem_of
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.election import ControllerPlace
from shoal_controller.leadership.introductions import HEADER, HandedOn
from shoal_controller.store.store import NotLeading, UnknownOutcome

CLOCK = "shoal-clock"
"""Seconds since the epoch: `Date` has the machine's clock, which may have been set since the jobs' was."""
NOT_LEADING = "shoal-not-leading"
"""The header of an answer to such a request by a controller that does not lead: nothing has come of it."""

PASSED_ON = ("authorization", "accept", "content-type", "last-event-id", "if-match", "idempotency-key")
"""What the leader hears of a request's headers."""

HANDED_BACK = (
    "allow", "content-type", "cache-control", "retry-after", "location", "etag", "age", CLOCK, "www-authenticate",
    RELEASE_HEADER,
)  # fmt: skip

CONNECT_SECONDS = 1.0

ANSWER_SECONDS = 30.0
"""How long the leader may be silent: longer than any request takes, or the next comment on a stream of events."""

LATE_SECONDS = 0.5
"""How long an answer may be under way of one that leads no longer."""

ELECTION_SECONDS = 5.0
"""How long what changes something waits for the next leader: longer than an election takes."""

READS = ("GET", "HEAD", "OPTIONS")

EVENTS = "text/event-stream"

Result = TypeVar("Result")
log = structlog.get_logger("shoal.api")


class LeadsNoLonger(Exception):
    """The leader that was asked has not answered, and is one no more."""


class Forwarding:
    """ASGI middleware before the routes."""

    def __init__(self, app: ASGIApp, controller: ControllerState, neighbours: Neighbours) -> None:
        self._app = app
        self._controller = controller
        self._neighbours = neighbours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if HEADER in Headers(scope=scope):
            await self._answer_forwarded(scope, receive, send)
            return
        if scope["method"] not in READS:
            await self._controller.await_leader(ELECTION_SECONDS)
        if self._controller.other is not None:
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return
            receive = _repeated(body, receive)
            if await self._handed_on(Request(scope, receive), body, send):
                return
        await self._app(scope, receive, self._dated(send))

    async def _answer_forwarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """At once also where this controller does not lead: whoever has forwarded it may know better by now."""
        if self._controller.shell is not None:
            await self._app(scope, receive, self._dated(send))
            return
        try:
            self._controller.leading()
        except NotLeading as error:
            answer = problem_of(scope["path"], error)
            answer.headers[NOT_LEADING] = "1"
            await answer(scope, receive, send)

    async def _handed_on(self, request: Request, body: bytes, send: Send) -> bool:
        """Whether a leader has answered; if not, nothing can have come of the request."""
        loop, reads = asyncio.get_running_loop(), request.method in READS
        deadline = loop.time() + ELECTION_SECONDS
        while (leader := self._controller.other) is not None:
            async with AsyncExitStack() as ends:
                answer = await self._ask(leader, request, body, ends)
                if answer is not None:
                    await answer(request.scope, request.receive, send)
                    return True
            if (reads and self._controller.other == leader) or loop.time() >= deadline:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._controller.until_succeeded(leader)
            if not reads:
                await self._controller.await_leader(deadline - loop.time())
        return False

    async def _ask(
        self, leader: ControllerPlace, request: Request, body: bytes, ends: AsyncExitStack
    ) -> StreamingResponse | None:
        """What the leader answers; None where it does not, and nothing can have come of the request."""
        patience = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        client = await ends.enter_async_context(self._neighbours.client_for(leader, patience))
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") in PASSED_ON]
        known = HandedOn.of(request.scope, leader.id)
        headers.append((HEADER.encode(), self._controller.word(request.state.caller.address, known).encode()))
        asked = client.build_request(
            request.method, leader.url, headers=headers, content=body or None,
            extensions={"target": known.target},
        )  # fmt: skip
        try:
            answer = await self._while_it_leads(leader, client.send(asked, stream=True))
        except (httpx.HTTPError, LeadsNoLonger) as error:
            why = self._neighbours.why(error, leader)
            log.warning("the leader does not answer", leader=leader.http, error=why)
            if request.method in READS or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                return None
            raise UnknownOutcome(
                f"the controller at {leader.http}, which leads or has led, was asked and has not answered ({why}); it "
                "may have been done: look before you try again"
            ) from error
        ends.push_async_callback(answer.aclose)
        if NOT_LEADING in answer.headers:
            return None
        back = {name: answer.headers[name] for name in HANDED_BACK if name in answer.headers}
        is_events = back.get("content-type", "").startswith(EVENTS)
        content = self._events(leader, answer) if is_events else answer.aiter_raw()
        return StreamingResponse(content, answer.status_code, back)

    async def _events(self, leader: ControllerPlace, answer: httpx.Response) -> AsyncGenerator[bytes]:
        """As they come. When the leader goes away or is one no more they end, as at its own end: whoever reads them
        asks for the next ones.
        """
        try:
            parts = answer.aiter_raw()
            while part := await self._while_it_leads(leader, anext(parts, b"")):
                yield part
        except (httpx.HTTPError, LeadsNoLonger) as error:
            log.info("the leader's events broke off", error=str(error) or type(error).__name__)

    async def _while_it_leads(self, leader: ControllerPlace, work: Awaitable[Result]) -> Result:
        """Raises `LeadsNoLonger` where somebody else may lead, and the work is not done soon after."""
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(self._until_late(leader))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise LeadsNoLonger("it leads no longer")
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_late(self, leader: ControllerPlace) -> None:
        """It may be elected again at once, as where its key was deleted."""
        while True:
            await self._controller.until_succeeded(leader)
            await asyncio.sleep(LATE_SECONDS)
            if self._controller.other != leader:
                return

    def _dated(self, send: Send) -> Send:
        """Says what the clock shows by which times are in an answer of this controller's own, and how old that may be
        where nobody surely leads.
        """
        age = int(self._controller.age_seconds)

        async def dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[CLOCK] = f"{self._controller.clock:.3f}"
                if age:
                    headers["Age"] = str(age)
            await send(message)

        return dated


def _repeated(body: bytes, receive: Receive) -> Receive:
    """The request once more, whose body has been read."""
    read = False

    async def repeated() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return repeated
