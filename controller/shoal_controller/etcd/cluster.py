"""Calls to a cluster of etcd servers: which one is asked, how often, for how long, and as whom.

One server is asked until it fails, then the next; an attempt has a second, because a proposal to a dead leader never
returns. A read is tried again until its time is up, a write only where sending it twice does no harm. A server without
a leader says so at once (`hasleader`). With a user, a token is had by a login, and a new one when it is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic

from google.protobuf.message import Message
from grpc.aio import AioRpcError

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.endpoint import (
    STATUS,
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
        self.login = login
        self._current = 0
        self._token = ""
        self._logging_in = asyncio.Lock()
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self.endpoints))

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
                return await self._attempt(endpoint, method, request, min(left, ATTEMPT_SECONDS)), doubt
            except NotSent as error:
                why = str(error)
                if not isinstance(error, TokenRefused):
                    self.leave(endpoint)
            except Unanswered as error:
                doubt = str(error)
                self.leave(endpoint)
                if not repeatable:
                    break
            except Rejected as error:
                if doubt:
                    raise UnknownOutcome(f"{doubt}; then {error}") from error
                raise
            await asyncio.sleep(PAUSE_SECONDS)
        if doubt:
            raise UnknownOutcome(doubt)
        raise self.closed() if self._is_closed else Unavailable(why)

    async def _attempt(self, endpoint: Endpoint, method: Method[Answer], request: Message, seconds: float) -> Answer:
        metadata: Metadata = ()
        try:
            metadata = await self._metadata(endpoint)
            return await endpoint.attempt(method, request, seconds, metadata)
        except TokenRefused as error:
            self.refuse_token(metadata, error)
            raise
        except asyncio.CancelledError:
            if self.is_cut():
                raise Unanswered(str(self.closed())) from None
            raise

    async def stream(self, method: Method[Answer]) -> CallStream[Answer]:
        """A stream to the server that is asked now; one attempt. Raises `NotSent`, `Denied`, `Closed`."""
        if self._is_closed:
            raise self.closed()
        endpoint = self.endpoints[self._current]
        try:
            metadata = await self._metadata(endpoint)
            await endpoint.connect(ATTEMPT_SECONDS)
        except NotSent:
            self.leave(endpoint)
            raise
        except asyncio.CancelledError:
            if self.is_cut():
                raise self.closed() from None
            raise
        return CallStream(self, endpoint, method, metadata)

    async def versions(self) -> dict[str, str | BaseException]:
        """What each server says that it is, by its address, or why it does not."""
        asked = (one.attempt(STATUS, pb.StatusRequest(), ATTEMPT_SECONDS, ()) for one in self.endpoints)
        answers = zip(self.endpoints, await asyncio.gather(*asked, return_exceptions=True), strict=True)
        return {
            one.address: answer.version if isinstance(answer, pb.StatusResponse) else answer for one, answer in answers
        }

    def leave(self, endpoint: Endpoint) -> None:
        """Ask another one from now on, unless that is so already."""
        if self.endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self.endpoints)

    def is_cut(self) -> bool:
        """Whether a `CancelledError` comes from `close`, and not from whoever wants this task to end."""
        task = asyncio.current_task()
        return self._is_closed and (task is None or not task.cancelling())

    def closed(self) -> Closed:
        return Closed(f"the client of etcd at {', '.join(one.address for one in self.endpoints)} is closed")

    # ---- who asks

    async def _metadata(self, endpoint: Endpoint) -> Metadata:
        leader = ("hasleader", "true")
        if self.login is None:
            return (leader,)
        async with self._logging_in:
            if not self._token:
                self._token = await self._log_in(endpoint, self.login)
            return (leader, ("token", self._token))

    async def _log_in(self, endpoint: Endpoint, login: Login) -> str:
        request = pb.AuthenticateRequest(name=login.user, password=login.password)
        try:
            return (await endpoint.attempt(AUTHENTICATE, request, ATTEMPT_SECONDS, ())).token
        except Unanswered as error:
            raise NotSent(f"{error} (to the login of user {login.user})") from None
        except Rejected as error:
            raise Denied(f"{error} (to the login of user {login.user})") from None

    def refuse_token(self, metadata: Metadata, error: Exception) -> None:
        """Log in again before the next attempt. Raises `Denied` where there is no user to log in as."""
        if self.login is None:
            raise Denied(str(error)) from error
        if ("token", self._token) in metadata:
            self._token = ""


class CallStream(Generic[Answer]):
    """A stream to one server, in both directions."""

    def __init__(self, cluster: Cluster, endpoint: Endpoint, method: Method[Answer], metadata: Metadata) -> None:
        self._cluster = cluster
        self.endpoint = endpoint
        self.metadata = metadata
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
        """The next message. Raises `NotSent`, `Unanswered`, what etcd refuses it with, and `Closed`."""
        try:
            message = await self._call.read()
        except AioRpcError as error:
            meaning = self.endpoint.meaning(error)
            if isinstance(meaning, TokenRefused):
                self._cluster.refuse_token(self.metadata, meaning)
            raise meaning from None
        except asyncio.CancelledError:
            if self._cluster.is_cut():
                raise self._cluster.closed() from None
            raise
        if not isinstance(message, self._answer):
            raise Unanswered(f"{self.endpoint} has ended a stream")
        return message

    def drop(self) -> None:
        """It has failed: let go of it, and of its server."""
        self._cluster.leave(self.endpoint)
        self.cancel()

    def cancel(self) -> None:
        self._call.cancel()
