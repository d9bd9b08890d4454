"""The gRPC side of the controller, met by real clients over loopback: workers, impostors and noise.

`Jobs` stands for the shell; `Worker` is a small asyncio client that says messages and hears answers.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from pydantic import SecretStr, ValidationError
from shoal_controller.core.events import Connected, Disconnected, Said
from shoal_controller.sessions.service import SessionService
from shoal_controller.sessions.settings import SessionSettings
from shoal_protos.channel import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, METHOD
from shoal_protos.description import Description
from shoal_protos.errors import Conflict, NotFound, StoreError, UserError
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    Carry,
    Ending,
    Heartbeat,
    Hello,
    Ping,
    Point,
    Prepare,
    Refusal,
    Shutdown,
    Status,
    Telemetry,
    ToController,
    ToWorker,
    Welcome,
)
from shoal_protos.plan import Member, Plan, Reason, Share
from shoal_protos.runs import every
from shoal_protos.wire import decode_controller, encode_worker

SECONDS = 20.0
"""No wait of a test takes longer."""

HELLO = Hello(
    version=PROTOCOL_VERSION, job="demo", worker="w0", incarnation="a1", address="127.0.0.1:29500", host="here",
    pid=1, domain="here", description=Description(8, 40, 4096, 1, 1, 0, 10, (), "AdamW", {}, {}, False, False),
    status=Status(1, 0, Point.REHEARSING, 0, -1, 0),
)  # fmt: skip
BEAT = Heartbeat(replace(HELLO.status, sequence=2), Telemetry())
WELCOME = Welcome("w0", 1.0, 10.0, 1800.0)

Event = Connected | Said | Disconnected


class Jobs:
    """A shell that knows one job, `demo`, welcomes everybody and writes down what it hears."""

    def __init__(self) -> None:
        self.service = SessionService(self, SessionSettings())
        self.heard: asyncio.Queue[Event] = asyncio.Queue()
        self.answer: Callable[[Event], Awaitable[None]] = self.welcome

    async def submit(self, job: str, event: Event) -> None:
        if job != "demo":
            raise NotFound(f"there is no job {job}; the only one is demo")
        await self.answer(event)
        await self.heard.put(event)

    async def welcome(self, event: Event) -> None:
        if isinstance(event, Connected):
            self.service.send(event.connection, WELCOME)

    async def next(self) -> Event:
        async with asyncio.timeout(SECONDS):
            return await self.heard.get()


class Worker:
    """A worker's end of a stream."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self.call = call

    async def say(self, *messages: ToController) -> None:
        for message in messages:
            await self.call.write(encode_worker(message))

    async def hear(self) -> ToWorker | None:
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
        self.service = jobs.service
        self.number = port

    @asynccontextmanager
    async def worker(
        self, token: str | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> AsyncIterator[Worker]:
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        address = f"localhost:{self.number}"
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        async with channel:
            yield Worker(channel.stream_stream(METHOD)(metadata=metadata))

    async def is_unharmed(self) -> None:
        """A worker that behaves is still served."""
        while not self.jobs.heard.empty():
            self.jobs.heard.get_nowait()
        async with self.worker() as worker:
            await worker.say(HELLO)
            assert await worker.hear() == WELCOME
            assert isinstance(await self.jobs.next(), Connected)


def on_port(scene: Callable[[Port], Coroutine[object, object, None]], **settings: object) -> None:
    """Play a scene with a service that listens, and see that nothing is left of it."""

    async def play() -> None:
        jobs = Jobs()
        jobs.service = SessionService(jobs, SessionSettings.model_validate(settings))
        port = Port(jobs, jobs.service.bind("localhost:0"))
        try:
            await jobs.service.serve()
            await scene(port)
        finally:
            await jobs.service.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert [task.get_name() for task in left if task.get_name().startswith("session")] == []

    asyncio.run(play())


def test_a_worker_says_hello_is_welcomed_and_goes() -> None:
    async def scene(port: Port) -> None:
        async with port.worker() as worker:
            await worker.say(HELLO, BEAT)
            assert await worker.hear() == WELCOME
            connected = await port.jobs.next()
            assert isinstance(connected, Connected) and connected.hello == HELLO
            assert await port.jobs.next() == Said(connected.connection, BEAT)
            await worker.call.done_writing()
            assert await worker.hear() is None
            assert await worker.code() is grpc.StatusCode.OK
        assert await port.jobs.next() == Disconnected(connected.connection, "its stream ended")

    on_port(scene)


def test_every_stream_has_a_number_of_its_own_and_a_killed_client_is_noticed() -> None:
    async def scene(port: Port) -> None:
        numbers = []
        for _ in range(3):
            async with port.worker() as worker:
                await worker.say(HELLO)
                connected = await port.jobs.next()
                assert isinstance(connected, Connected)
                numbers.append(connected.connection)
                worker.call.cancel()
            assert await port.jobs.next() == Disconnected(connected.connection, "its stream ended")
        assert numbers == sorted(set(numbers))

    on_port(scene)


def test_what_is_sent_before_a_close_arrives_and_the_stream_ends() -> None:
    async def scene(port: Port) -> None:
        last = Shutdown(Ending.DRAINED, "drained", 3)
        async with port.worker() as worker:
            await worker.say(HELLO)
            connected = await port.jobs.next()
            assert isinstance(connected, Connected)
            for message in (Prepare(3), last):
                port.service.send(connected.connection, message)
            port.service.close(connected.connection)
            port.service.send(connected.connection, Prepare(4))
            assert [await worker.hear() for _ in range(3)] == [WELCOME, Prepare(3), last]
            await worker.call.done_writing()
            assert await worker.hear() is None
        assert await port.jobs.next() == Disconnected(connected.connection, "the controller closed the stream")
        port.service.send(connected.connection, Prepare(5))
        port.service.close(connected.connection)

    on_port(scene)


def test_a_worker_in_the_middle_of_speaking_still_hears_the_last_message() -> None:
    async def scene(port: Port) -> None:
        last = Shutdown(Ending.DONE, "the job is over")
        async with port.worker() as worker:
            await worker.say(HELLO)
            connected = await port.jobs.next()
            assert isinstance(connected, Connected)
            port.service.send(connected.connection, last)
            port.service.close(connected.connection)
            for _ in range(50):
                await worker.say(BEAT)
            assert [await worker.hear(), await worker.hear()] == [WELCOME, last]
        assert await port.jobs.next() == Disconnected(connected.connection, "the controller closed the stream")

    on_port(scene)


def test_a_worker_that_does_not_hang_up_is_left() -> None:
    async def scene(port: Port) -> None:
        async with port.worker() as worker:
            await worker.say(HELLO)
            connected = await port.jobs.next()
            assert isinstance(connected, Connected)
            port.service.close(connected.connection)
            assert [await worker.hear(), await worker.hear()] == [WELCOME, None]
            assert await worker.code() is grpc.StatusCode.OK

    on_port(scene)


def test_a_plan_reaches_all_its_members() -> None:
    async def scene(port: Port) -> None:
        shares = (Share((0,), every(4)), Share((1,)))
        members = tuple(Member(f"w{n}", f"i{n}", f"h:{n + 1}") for n in range(2))
        plan = Plan(5, 4, Reason.JOIN, 2, 4, members, shares, (), 1, 0, True)
        async with port.worker() as first, port.worker() as second:
            for number, worker in enumerate((first, second)):
                await worker.say(replace(HELLO, worker=f"w{number}"))
                connected = await port.jobs.next()
                assert isinstance(connected, Connected)
                port.service.send(connected.connection, Carry(plan))
            for worker in (first, second):
                assert [await worker.hear(), await worker.hear()] == [WELCOME, Carry(plan)]

    on_port(scene)


async def _hears_only(worker: Worker, refusal: Refusal) -> None:
    assert await worker.hear() == refusal
    await worker.call.done_writing()
    assert await worker.hear() is None


def test_an_unknown_job_is_refused_with_the_shell_s_sentence() -> None:
    async def scene(port: Port) -> None:
        async with port.worker() as worker:
            await worker.say(replace(HELLO, job="other"))
            await _hears_only(
                worker,
                Refusal(
                    "there is no job other; the only one is demo. "
                    "Set SHOAL_JOB to the job's name, or submit the job first."
                ),
            )
            assert await worker.code() is grpc.StatusCode.NOT_FOUND
        await port.is_unharmed()

    on_port(scene)


def test_a_job_that_is_over_refuses_and_a_store_that_is_away_asks_to_come_again() -> None:
    async def scene(port: Port) -> None:
        for error, final in ((Conflict("job demo has succeeded"), True), (StoreError("the store is away"), False)):

            async def refuse(event: Event, error: Exception = error) -> None:
                if isinstance(event, Connected):
                    raise error

            port.jobs.answer = refuse
            async with port.worker() as worker:
                await worker.say(HELLO)
                await _hears_only(worker, Refusal(str(error), final=final))
        port.jobs.answer = port.jobs.welcome
        await port.is_unharmed()

    on_port(scene)


def test_a_stream_without_a_hello_is_ended_in_time() -> None:
    async def scene(port: Port) -> None:
        async with port.worker() as worker:
            await worker.call.wait_for_connection()
            await _hears_only(worker, Refusal("no hello came within 0.05 s of opening the stream"))

    on_port(scene, hello_seconds=0.05)


def test_a_broken_message_is_refused_with_its_sentence_and_the_job_hears_only_that_the_stream_ended() -> None:
    async def scene(port: Port) -> None:
        async with port.worker() as worker:
            await worker.say(HELLO)
            connected = await port.jobs.next()
            assert await worker.hear() == WELCOME
            await worker.call.write(b"\xff\xfe nonsense")
            why = "11 bytes are not a worker's message of this version of Shoal"
            await _hears_only(worker, Refusal(why))
            assert isinstance(connected, Connected)
            assert await port.jobs.next() == Disconnected(connected.connection, f"it was refused: {why}")
        async with port.worker() as worker:
            await worker.say(replace(HELLO, version=2))
            refusal = await worker.hear()
            assert isinstance(refusal, Refusal)
            assert refusal.sentence.startswith("the worker speaks protocol version 2, this controller speaks 1.")
        await port.is_unharmed()

    on_port(scene)


def test_a_message_beyond_all_bounds_never_reaches_the_job() -> None:
    async def scene(port: Port) -> None:
        channel = grpc.aio.insecure_channel(f"localhost:{port.number}", options=[("grpc.max_send_message_length", -1)])
        async with channel:
            worker = Worker(channel.stream_stream(METHOD)())
            await worker.call.write(bytes(MAX_MESSAGE_BYTES + 1))
            assert await worker.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert port.jobs.heard.empty()
        await port.is_unharmed()

    on_port(scene)


def test_noise_on_the_raw_socket_harms_nothing() -> None:
    async def scene(port: Port) -> None:
        rng = random.Random(1)
        noises = [
            rng.randbytes(4096),
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(999),
        ]
        for noise in noises:
            reader, writer = await asyncio.open_connection("localhost", port.number)
            writer.write(noise)
            writer.write_eof()
            async with asyncio.timeout(SECONDS):
                try:
                    await reader.read()
                except ConnectionError:
                    continue
                finally:
                    writer.close()
        assert port.jobs.heard.empty()
        await port.is_unharmed()

    on_port(scene)


def test_a_worker_that_never_reads_is_cut_off_and_the_others_hear_on() -> None:
    async def scene(port: Port) -> None:
        big = Shutdown(Ending.FAILED, "x" * 16_000)
        async with port.worker() as deaf, port.worker() as other:
            await deaf.say(HELLO)
            connected = await port.jobs.next()
            assert isinstance(connected, Connected)
            await other.say(replace(HELLO, worker="w1"))
            neighbour = await port.jobs.next()
            assert isinstance(neighbour, Connected)
            cut = asyncio.create_task(port.jobs.next())
            while not cut.done():
                port.service.send(connected.connection, big)
                await asyncio.sleep(0)
            why = "it left 64 messages unread and was cut off"
            assert await cut == Disconnected(connected.connection, why)
            port.service.send(neighbour.connection, Ping(1))
            assert [await other.hear(), await other.hear()] == [WELCOME, Ping(1)]

    on_port(scene)


def test_only_who_shows_the_token_is_heard() -> None:
    async def scene(port: Port) -> None:
        for token, found in ((None, "no token"), ("guess", "another token"), ("", "another token")):
            async with port.worker(token) as worker:
                await worker.say(HELLO)
                sentence = f"the worker showed {found}; set SHOAL_TOKEN to this controller's token"
                await _hears_only(worker, Refusal(sentence))
                assert await worker.code() is grpc.StatusCode.PERMISSION_DENIED
        assert port.jobs.heard.empty()
        async with port.worker("secret") as worker:
            await worker.say(HELLO)
            assert await worker.hear() == WELCOME

    on_port(scene, token=SecretStr("secret"))


def test_a_port_in_use_is_refused_in_one_sentence() -> None:
    async def scene(port: Port) -> None:
        second = SessionService(port.jobs, SessionSettings())
        with pytest.raises(UserError, match=rf"^cannot listen for workers on localhost:{port.number}: it is in use"):
            second.bind(f"localhost:{port.number}")
        await second.stop()
        await port.is_unharmed()

    on_port(scene)


def test_stopping_ends_every_stream_and_tells_the_jobs() -> None:
    async def scene(port: Port) -> None:
        async with port.worker() as worker:
            await worker.say(HELLO)
            assert await worker.hear() == WELCOME
            connected = await port.jobs.next()
            await port.service.stop()
            assert isinstance(connected, Connected)
            assert port.jobs.heard.get_nowait() == Disconnected(connected.connection, "its stream ended")
            assert await worker.hear() is None
            assert await worker.code() is not grpc.StatusCode.OK

    on_port(scene)


def test_a_port_that_was_taken_and_never_served_is_given_back() -> None:
    async def play() -> None:
        service = SessionService(Jobs(), SessionSettings())
        port = service.bind("localhost:0")
        await service.stop()
        assert service.bind(f"localhost:{port}") == port
        await service.stop()

    asyncio.run(play())


def test_a_worker_that_comes_before_the_jobs_are_restored_waits() -> None:
    async def play() -> None:
        jobs = Jobs()
        port = Port(jobs, jobs.service.bind("localhost:0"))
        async with port.worker() as worker:
            hello = asyncio.create_task(worker.say(HELLO))
            done, _ = await asyncio.wait([hello], timeout=0.1)
            assert not done
            await jobs.service.serve()
            assert await worker.hear() == WELCOME
            await hello
        await jobs.service.stop()

    asyncio.run(play())


# ---- mutual TLS


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def _authority(folder: Path, name: str) -> None:
    subject = ["-subj", f"/CN={name}", "-days", "1", "-nodes"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    _openssl(folder, "req", "-x509", *key, *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem")


def _certificate(folder: Path, name: str, authority: str) -> None:
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    _openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr")
    signed = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "names"]
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-days", "1", "-out", f"{name}.pem")


def _credentials(folder: Path, name: str | None) -> grpc.ChannelCredentials:
    roots = (folder / "house.pem").read_bytes()
    if name is None:
        return grpc.ssl_channel_credentials(roots)
    key, chain = (folder / f"{name}.key").read_bytes(), (folder / f"{name}.pem").read_bytes()
    return grpc.ssl_channel_credentials(roots, key, chain)


def test_with_certificates_only_a_worker_with_one_of_the_house_is_heard(tmp_path: Path) -> None:
    for authority in ("house", "stranger"):
        _authority(tmp_path, authority)
    for name, authority in (("controller", "house"), ("worker", "house"), ("impostor", "stranger")):
        _certificate(tmp_path, name, authority)

    async def scene(port: Port) -> None:
        for name in (None, "impostor"):
            async with port.worker(credentials=_credentials(tmp_path, name)) as worker:
                assert await worker.code() is grpc.StatusCode.UNAVAILABLE
        async with port.worker() as worker:
            assert await worker.code() is grpc.StatusCode.UNAVAILABLE
        assert port.jobs.heard.empty()
        async with port.worker(credentials=_credentials(tmp_path, "worker")) as worker:
            await worker.say(HELLO)
            assert await worker.hear() == WELCOME

    files = {"certificate": "controller.pem", "key": "controller.key", "client_ca": "house.pem"}
    on_port(scene, **{field: tmp_path / name for field, name in files.items()})


def test_half_a_set_of_certificates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="mutual TLS needs certificate, key and client_ca; only key given"):
        SessionSettings(key=tmp_path / "key")
    missing = SessionSettings(key=tmp_path / "k", certificate=tmp_path / "c", client_ca=tmp_path / "a")
    with pytest.raises(UserError, match=r"key of the gRPC port cannot be read from .*/k: No such file or directory"):
        missing.credentials()
