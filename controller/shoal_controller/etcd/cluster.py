"""Calls to a cluster of etcd servers: which one is asked, how often, for how long, and as whom.

One server is asked until it fails, then the next; an attempt has a second, because a proposal to a dead leader never
returns. A read is tried again until its time is up, a write only where sending it twice does no harm. A server without
a leader says so at once (`hasleader`). With a user, a token is had by a login, and a new one when it is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic

from google.protobuf.message import Message
from grpc.aio import AioRpcError

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.endpoint import (
    STATUS,
    TRANSIENT,
    Answer,
    Endpoint,
    Metadata,
    Method,
    NotSent,
    Tls,
    TokenRefused,
    Unanswered,
    serialized,
)  # fmt: skip
from shoal_controller.etcd.errors import Closed, Denied, Rejected, Unavailable, UnknownOutcome

ATTEMPT_SECONDS = 1.0
"""How long one server may take for one attempt."""

REQUEST_SECONDS = 5.0
"""How long a request is tried. An election among etcd's servers takes 1 to 3 s."""

PAUSE_SECONDS = 0.05
"""Before the next attempt."""

LEADER = ("hasleader", "true")

AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)


@dataclass(frozen=True, slots=True)
class Login:
    """A user of etcd's."""

    user: str
    password: str = field(repr=False)


class Cluster:
    """The servers of one cluster. Ended by `close`, which cancels what is in flight."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None = None, login: Login | None = None) -> None:
        self.endpoints = [Endpoint(address, tls) for address in addresses]
        self._former: list[Endpoint] = []
        self.login = login
        self._current = 0
        self._token = ""
        self._logging_in = asyncio.Lock()
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(endpoint.channel.close() for endpoint in (*self.endpoints, *self._former)))

    def renew(self, tls: Tls) -> None:
        """Connect with other certificates from now on. What is in flight ends as it began."""
        self._former += self.endpoints
        self.endpoints = [Endpoint(one.address, tls) for one in self.endpoints]

    async def call(self, method: Method[Answer], request: Message, seconds: float = REQUEST_SECONDS) -> Answer:
        """What may be sent any number of times. Raises `Unavailable`, `Closed`, or what etcd refuses it with."""
        try:
            return (await self.send(method, request, True, seconds))[0]
        except UnknownOutcome as error:
            raise self.closed() if self._is_closed else Unavailable(str(error)) from None

    async def send(
        self, method: Method[Answer], request: Message, repeatable: bool, seconds: float = REQUEST_SECONDS
    ) -> tuple[Answer, str]:
        """The answer, and why an earlier attempt may have been carried out too (empty: none was). `repeatable`:
        sending it twice does no harm. Raises `UnknownOutcome` too.
        """
        loop, doubt, why = asyncio.get_running_loop(), "", ""
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0 and not self._is_closed:
            endpoint = self.endpoints[self._current]
            try:
                async with self._asked_as(endpoint) as metadata:
                    return await endpoint.attempt(method, request, min(left, ATTEMPT_SECONDS), metadata), doubt
            except NotSent as error:
                why = str(error)
            except (Unanswered, Closed) as error:
                doubt = str(error)
            except Rejected as error:
                if doubt:
                    raise UnknownOutcome(f"{doubt}; then {error}") from error
                raise
            self.leave(endpoint)
            if doubt and not repeatable:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        if doubt:
            raise UnknownOutcome(doubt)
        raise self.closed() if self._is_closed else Unavailable(why)

    @asynccontextmanager
    async def stream(self, method: Method[Answer]) -> AsyncIterator[CallStream[Answer]]:
        """A stream to the server that is asked now; where it fails, another is. Raises what its use raises, `NotSent`,
        `Denied` and `Closed`.
        """
        if self._is_closed:
            raise self.closed()
        endpoint = self.endpoints[self._current]
        try:
            async with self._asked_as(endpoint) as metadata:
                await endpoint.connect(ATTEMPT_SECONDS)
                opened = CallStream(endpoint, method, metadata)
                try:
                    yield opened
                finally:
                    opened.cancel()
        except TRANSIENT:
            self.leave(endpoint)
            raise

    async def versions(self) -> dict[str, str | BaseException]:
        """What each server says that it is, by its address, or why it does not."""
        asked = (one.attempt(STATUS, pb.StatusRequest(), ATTEMPT_SECONDS, ()) for one in self.endpoints)
        answers = zip(self.endpoints, await asyncio.gather(*asked, return_exceptions=True), strict=True)
        return {one.address: answer if isinstance(answer, BaseException) else answer.version for one, answer in answers}

    def leave(self, endpoint: Endpoint) -> None:
        """Ask another one from now on, unless that is so already."""
        if self.endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self.endpoints)

    def closed(self) -> Closed:
        return Closed(f"the client of etcd at {', '.join(one.address for one in self.endpoints)} is closed")

    # ---- who asks

    @asynccontextmanager
    async def _asked_as(self, endpoint: Endpoint) -> AsyncIterator[Metadata]:
        """What shows a server who asks. A token that it refuses is not shown again. Raises `Closed` where `close`
        cancels a call, and not whoever wants this task to end.
        """
        shown: Metadata = (LEADER,)
        try:
            if self.login is not None:
                async with self._logging_in:
                    self._token = self._token or await self._log_in(endpoint, self.login)
                    shown = (LEADER, ("token", self._token))
            yield shown
        except TokenRefused as error:
            if self.login is None:
                raise Denied(str(error)) from error
            if ("token", self._token) in shown:
                self._token = ""
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task and task.cancelling()):
                raise self.closed() from None
            raise

    async def _log_in(self, endpoint: Endpoint, login: Login) -> str:
        request = pb.AuthenticateRequest(name=login.user, password=login.password)
        try:
            return (await endpoint.attempt(AUTHENTICATE, request, ATTEMPT_SECONDS, ())).token
        except Unanswered as error:
            raise NotSent(f"{error} (to the login of user {login.user})") from None
        except Rejected as error:
            raise Denied(f"{error} (to the login of user {login.user})") from None


class CallStream(Generic[Answer]):
    """A stream to one server, in both directions."""

    def __init__(self, endpoint: Endpoint, method: Method[Answer], metadata: Metadata) -> None:
        self.endpoint = endpoint
        call = endpoint.channel.stream_stream(method.path, serialized, method.answer.FromString)
        self._call = call(metadata=metadata)
        self._answer = method.answer

    async def ask(self, message: Message) -> Answer:
        """Send it, and read the next message, which may be of another."""
        await self.write(message)
        return await self.read()

    async def write(self, message: Message) -> None:
        """Send it, if the stream has not ended: reading says why it has."""
        with suppress(AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    async def read(self) -> Answer:
        """The next message. Raises `NotSent`, `Unanswered`, and what etcd refuses it with."""
        try:
            message = await self._call.read()
        except AioRpcError as error:
            raise self.endpoint.meaning(error) from None
        if not isinstance(message, self._answer):
            raise Unanswered(f"{self.endpoint} has ended a stream")
        return message

    def cancel(self) -> None:
        self._call.cancel()
