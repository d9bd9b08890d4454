"""Requests to a controller that follows: the one that leads answers them.

Whatever is below `/v1/` is asked of the leader and its answer handed on as it comes, streams of events too. Where the
leader is not reached, what only reads is answered here from the store, and `Age` says how old that may be; the rest
waits for the next leader for a moment, or gets a 503. A request is forwarded once: two controllers that take each other
for the leader do not pass it to and fro.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import httpx
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.election import ControllerPlace
from shoal_controller.leadership.neighbours import client_for
from shoal_controller.store.store import UnknownOutcome

FORWARDED = "shoal-forwarded"
"""The header of a request that another controller has handed on."""

PASSED_ON = ("authorization", "accept", "content-type", "last-event-id", "if-match")
"""What the leader hears of a request's headers."""

HANDED_BACK = ("content-type", "cache-control", "retry-after", "location", "etag", "age", "www-authenticate")

CONNECT_SECONDS = 1.0

ANSWER_SECONDS = 30.0
"""How long the leader may be silent: longer than any request takes, or the next comment on a stream of events."""

ELECTION_SECONDS = 5.0
"""How long what changes something waits for the next leader: longer than an election takes."""

READS = ("GET", "HEAD", "OPTIONS")

log = structlog.get_logger("shoal.api")


class Forwarding:
    """ASGI middleware before the routes."""

    def __init__(self, app: ASGIApp, controller: ControllerState) -> None:
        self._app = app
        self._controller = controller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if scope["method"] not in READS:
            await self._controller.await_leader(ELECTION_SECONDS)
        leader = self._controller.other
        if leader is not None and FORWARDED not in Headers(scope=scope):
            request = Request(scope, receive)
            body = await request.body()
            async with AsyncExitStack() as ends:
                answer = await self._ask(leader, request, body, ends)
                if answer is not None:
                    await answer(scope, receive, send)
                    return
            receive = _repeated(body, receive)
        await self._app(scope, receive, self._dated(send))

    async def _ask(
        self, leader: ControllerPlace, request: Request, body: bytes, ends: AsyncExitStack
    ) -> StreamingResponse | None:
        """What the leader answers; None where it does not, and nothing can have come of the request."""
        patience = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        client = await ends.enter_async_context(client_for(patience))
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = httpx.URL(f"http://{leader.http}").join(str(request.url.replace(scheme="", netloc="")))
        asked = client.build_request(request.method, url, headers={**headers, FORWARDED: "1"}, content=body or None)
        try:
            answer = await client.send(asked, stream=True)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            log.warning("the leader does not answer", leader=leader.http, error=why)
            if request.method in READS or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                return None
            raise UnknownOutcome(
                f"the controller at {leader.http}, which leads, was asked and has not answered ({why}); it may have "
                "been done: look before you try again"
            ) from error
        ends.push_async_callback(answer.aclose)
        back = {name: answer.headers[name] for name in HANDED_BACK if name in answer.headers}
        return StreamingResponse(_content(answer), answer.status_code, back)

    def _dated(self, send: Send) -> Send:
        """Says how old an answer of this controller's own may be, where nobody surely leads."""
        age = int(self._controller.age_seconds)

        async def dated(message: Message) -> None:
            if age and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Age"] = str(age)
            await send(message)

        return dated


async def _content(answer: httpx.Response) -> AsyncGenerator[bytes]:
    """As it comes. A leader that goes away in the middle of it ends it there, as its own end would."""
    try:
        async for data in answer.aiter_raw():
            yield data
    except httpx.HTTPError as error:
        log.info("the leader's answer broke off", error=str(error) or type(error).__name__)


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
