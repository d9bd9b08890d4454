"""A controller's gRPC port in a test: a shell that writes down what it hears, and a worker's end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
from shoal_controller.core.machine.events import Connected, Disconnected, MessageReceived
from shoal_controller.jobs.streams import Streams
from shoal_controller.sessions.service import SessionService
from shoal_controller.sessions.settings import SessionSettings
from shoal_protos.channel import CHANNEL_OPTIONS, METHOD
from shoal_protos.description import Description
from shoal_protos.errors import NotFound
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    MemberState,
    Refusal,
    Status,
    Telemetry,
    ToController,
    ToWorker,
    Welcome,
)
from shoal_protos.wire import decode_controller, encode_worker

SECONDS = 100.0
"""No wait of a test takes longer."""

OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
"""As a worker's: each has a connection of its own."""

HELLO = Hello(
    version=PROTOCOL_VERSION, job="demo", worker="w0", incarnation="a1", address="127.0.0.1:29500", host="here",
    pid=1, domain="here", description=Description(8, 40, 4096, 1, 1, 0, 10, (), "AdamW", {}, {}, False, False),
    status=Status(1, 0, MemberState.WARMING_UP, 0, -1, 0),
)  # fmt: skip
BEAT = Heartbeat(replace(HELLO.status, sequence=2), Telemetry())
WELCOME = Welcome("w0", 1.0, 10.0, 1800.0)

Event = Connected | MessageReceived | Disconnected


class Jobs:
    """A shell that knows one job, `demo`, welcomes everybody and writes down what it hears."""

    is_leading = True

    def __init__(self, **settings: object) -> None:
        session_settings = SessionSettings.model_validate(settings)
        self.streams = Streams(session_settings.worker_tokens())
        self.service = SessionService(self, self.streams, session_settings)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.answer: Callable[[Event], Awaitable[None]] = self.welcome

    def expect(self, job: str) -> None:
        if job != "demo":
            raise NotFound(f"there is no job {job}; the only one is demo")

    async def submit(self, job: str, event: Event) -> None:
        self.expect(job)
        await self.answer(event)
        await self.events.put(event)

    def hear(self, job: str, event: Event) -> None:
        self.expect(job)
        self.events.put_nowait(event)

    async def welcome(self, event: Event) -> None:
        if isinstance(event, Connected):
            self.streams.send(event.connection, WELCOME)

    async def next(self) -> Event:
        async with asyncio.timeout(SECONDS):
            return await self.events.get()


class Worker:
    """A worker's end of a stream."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self.call = call

    async def send(self, *messages: ToController) -> None:
        for message in messages:
            await self.call.write(encode_worker(message))

    async def receive(self) -> ToWorker | None:
        """The next message, None where the stream has ended (`code` says how)."""
        async with asyncio.timeout(SECONDS):
            try:
                data = await self.call.read()
            except grpc.aio.AioRpcError:
                return None
        return decode_controller(data) if isinstance(data, bytes) else None

    async def code(self) -> grpc.StatusCode:
        async with asyncio.timeout(SECONDS):
            return await self.call.code()


class Port:
    """A service that listens, its jobs, and ways in."""

    def __init__(self, jobs: Jobs, port: int) -> None:
        self.jobs = jobs
        self.streams, self.service = jobs.streams, jobs.service
        self.number = port

    @asynccontextmanager
    async def worker(
        self, token: str | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> AsyncIterator[Worker]:
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        address = f"localhost:{self.number}"
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        async with channel:
            yield Worker(channel.stream_stream(METHOD)(metadata=metadata))

    async def is_unharmed(self) -> None:
        """A worker that behaves is still served."""
        while not self.jobs.events.empty():
            self.jobs.events.get_nowait()
        async with self.worker() as worker:
            await worker.send(HELLO)
            assert await worker.receive() == WELCOME
            assert isinstance(await self.jobs.next(), Connected)


def on_port(scene: Callable[[Port], Coroutine[object, object, None]], **settings: object) -> None:
    """Play a scene with a service that listens, and see that nothing is left of it."""

    async def play() -> None:
        jobs = Jobs(**settings)
        port = Port(jobs, jobs.service.bind("localhost:0"))
        try:
            await jobs.service.serve()
            await scene(port)
        finally:
            await jobs.service.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert [task.get_name() for task in left if task.get_name().startswith("session")] == []

    asyncio.run(play())


async def receives_only(worker: Worker, refusal: Refusal) -> None:
    assert await worker.receive() == refusal
    await worker.call.done_writing()
    assert await worker.receive() is None
