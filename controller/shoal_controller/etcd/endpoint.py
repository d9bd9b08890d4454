"""One etcd server: a channel to it, single attempts at calls, and what its errors mean.

Whether a request was sent decides whether anything can have happened, so an attempt first waits for the connection.
Which endpoint is asked, and how often, is decided in `cluster.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import StatusCode
from grpc.aio import AioRpcError

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.errors import Compacted, Denied, Exhausted, LeaseNotFound, Rejected

Answer = TypeVar("Answer", bound=Message)
Metadata = tuple[tuple[str, str], ...]

OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # what is asked for is bounded
    ("grpc.keepalive_time_ms", 6_000),  # etcd refuses more than one in 5 s
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # only the caller knows what may be sent twice
    ("grpc.use_local_subchannel_pool", 1),  # another client's broken connection is not this one's
)
TOKEN_IS_OLD = (
    "etcdserver: invalid auth token", "auth: revision in header is old", "etcdserver: revision of auth store is old",
)  # fmt: skip
NOT_BEGUN = ("etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable")
"""Answers of a server that may do it later."""
REFUSALS = (
    (StatusCode.PERMISSION_DENIED, "", Denied), (StatusCode.RESOURCE_EXHAUSTED, "", Exhausted),
    (StatusCode.NOT_FOUND, "lease", LeaseNotFound), (StatusCode.NOT_FOUND, "", Rejected),
    (StatusCode.OUT_OF_RANGE, "compacted", Compacted), (StatusCode.OUT_OF_RANGE, "", Rejected),
    (StatusCode.INVALID_ARGUMENT, "", Rejected), (StatusCode.ALREADY_EXISTS, "", Rejected),
    (StatusCode.FAILED_PRECONDITION, "", Rejected),
)  # fmt: skip
"""What etcd answers, by status and a word of it, to what it does not begin, or undoes as a whole."""


@dataclass(frozen=True, slots=True)
class Method(Generic[Answer]):
    path: str
    answer: type[Answer]


STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusResponse)


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates as PEM; without one of its own, servers must not ask for it."""

    authorities: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class NotSent(Exception):
    """Nothing has happened, and another attempt may succeed."""


class TokenRefused(NotSent):
    """… after a new login."""


class Unanswered(Exception):
    """It was sent, and nobody knows what became of it."""


TRANSIENT = (NotSent, Unanswered, TimeoutError)
"""After these another attempt may succeed."""


class Endpoint:
    """A server by its address, `HOST:PORT`."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self.address = address
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
            self.channel = grpc.aio.secure_channel(address, credentials, OPTIONS)

    def __str__(self) -> str:
        return f"etcd at {self.address}"

    async def connect(self, seconds: float) -> None:
        """Returns once there is a connection. Raises `NotSent` with the reason why there is none."""
        try:
            async with asyncio.timeout(seconds):
                while (state := self.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.SHUTDOWN:
                        raise NotSent(f"the channel to {self} is closed")
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise NotSent(f"{self} cannot be reached: {await self._why(seconds)}")
                    await self.channel.wait_for_state_change(state)
        except TimeoutError:
            raise NotSent(f"{self} cannot be reached: no connection within {seconds:g} s") from None

    async def attempt(self, method: Method[Answer], request: Message, seconds: float, metadata: Metadata) -> Answer:
        """One attempt. Raises `NotSent`, `Unanswered`, or what etcd refuses it with."""
        await self.connect(seconds)
        try:
            return await self._call(method, request, seconds, metadata)
        except AioRpcError as error:
            raise self.meaning(error) from None

    async def _call(self, method: Method[Answer], request: Message, seconds: float, metadata: Metadata) -> Answer:
        call = self.channel.unary_unary(method.path, serialized, method.answer.FromString)
        answer: Answer = await call(request, timeout=seconds, metadata=metadata)
        return answer

    async def _why(self, seconds: float) -> str:
        """Why there is no connection: only a call tells, so one that changes nothing."""
        try:
            await self._call(STATUS, pb.StatusRequest(), seconds, ())
        except AioRpcError as error:
            return _cause(error.details() or str(error.code()))
        return "it has just come back"

    def meaning(self, error: AioRpcError) -> Exception:
        """What an error of a call means for whoever made it."""
        code, details = error.code(), error.details() or ""
        sentence = f"{self} answers: {details}"
        if code is StatusCode.UNAUTHENTICATED or details.startswith(TOKEN_IS_OLD):
            return TokenRefused(sentence)
        if details.startswith(NOT_BEGUN):
            return NotSent(sentence)
        if details.startswith("etcdserver: user name is empty"):
            return Denied(f"{self} asks for a user and a password")
        if code is StatusCode.UNIMPLEMENTED:
            return Rejected(f"{self} does not speak etcd's API of version 3 ({details})")
        for status, word, refusal in REFUSALS:
            if code is status and word in details:
                return refusal(sentence)
        return Unanswered(f"{self} does not answer: {details or code}")


def serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _cause(details: str) -> str:
    """The last cause in gRPC's account of a failed connection."""
    for before in ("connect: ", "remote host: ", "OPENSSL_internal:", "handshake failed: ", "last error: "):
        if before in details:
            return details.rpartition(before)[2]
    return details
