"""The gRPC side of the controller: one stream per worker, and the proof that its tokens give when it opens.

A thin driver of `Dialogue`: it moves bytes between streams and dialogues and hands events to the shell of the leader,
which answers on the streams (`jobs/streams.py`). Callers reach gRPC through `front.py`, which learns here who is a
worker. It knows no job and decides nothing. gRPC carries bytes and the wire reads them, so that an unreadable message
is answered by a sentence. See docs/decisions/0011-how-a-plan-travels.md.

`Door` reads `authorization: Bearer TOKEN`: the operators' token, the join token of a run, or a fresh session token;
later the join token there and the session token with it. An expired session token opens nothing, but still names its
worker, which keeps its identity however long no controller was there. Whom the proof admits is the job's decision
(`phases/claims.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import grpc
import grpc.aio
import structlog
from shoal_protos.channel import ALIVE_SECONDS, CHANNEL_OPTIONS, KEEPALIVE_SECONDS, METHOD, SESSION_TOKEN
from shoal_protos.errors import NotFound, Refused, ShoalError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

from shoal_controller.access.failed_logins import FailedLogins
from shoal_controller.access.worker_tokens import ShownToken, WorkerTokens, is_for_workers
from shoal_controller.core.machine.events import Connected, Disconnected, MessageReceived, Proof, SeatAsked
from shoal_controller.jobs.dialogue import Dialogue
from shoal_controller.jobs.streams import Context, Stream, Streams
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.process.tasks import end_task, guarded, only_logged
from shoal_controller.process.worker_port import listen
from shoal_controller.sessions.front import Front
from shoal_controller.sessions.private_port import PrivatePort
from shoal_controller.sessions.settings import SessionSettings
from shoal_controller.sessions.stream_counts import StreamCounts

MOST_STREAMS = 1 << 14
"""Most streams of all workers together; one more is told to try again later by gRPC."""
FLUSH_SECONDS = 5.0
"""How long a stream that ends may take to carry its last messages."""
LINGER_SECONDS = 1.0
"""How long a worker may take to hang up after the last one."""
ALIVE_PARTS = 20
"""In so many parts the streams are shown that the controller lives, each in its own turn within `ALIVE_SECONDS`."""
STOP_SECONDS = 5.0
"""How long the jobs may take to hear that their streams ended when the service stops."""

MAX_HEADER_BYTES = 8192
"""Two tokens have less than 1 KiB."""

IDLE_SECONDS = 15
"""How long a connection may have no stream: each holds a file descriptor, whether it shows a token or not."""

SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # or a second controller would take half of the workers
    ("grpc.max_concurrent_streams", 8),  # a worker has one
    ("grpc.server_handshake_timeout_ms", IDLE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", MAX_HEADER_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
)

log = structlog.get_logger("shoal.sessions")


class SessionService:
    """Opens the port, with a front before gRPC's, and serves the streams."""

    def __init__(self, controller: ControllerState, streams: Streams, settings: SessionSettings) -> None:
        self._controller = controller
        self._streams = streams
        self._settings = settings
        self._door = Door(streams.tokens)
        self._counts = StreamCounts(settings.limits)
        self._ending: set[asyncio.Task[None]] = set()
        """What `stop` waits for: the streams' tasks and their farewells."""
        self._server: grpc.aio.Server | None = None
        self._front: Front | None = None
        self._serving = False
        self._showing_life: asyncio.Task[None] | None = None

    # ---- life

    def bind(self, address: str) -> int:
        """Take `HOST:PORT`; returns the port (of use where 0 was asked for). Workers that come wait until `serve`."""
        credentials = self._settings.credentials()
        with ExitStack() as undone:
            listening = [undone.enter_context(one) for one in listen(address)]
            private = PrivatePort()
            server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MOST_STREAMS)
            service, _, method = METHOD.removeprefix("/").partition("/")
            handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
            with private.offered() as place:
                if credentials is None:
                    server.add_insecure_port(place)
                else:
                    server.add_secure_port(place, credentials)
            undone.pop_all()
        self._server, self._front = server, Front(listening, private)
        return self._front.port

    async def serve(self) -> None:
        """Hear workers. To be called when the shell has restored its jobs: an unknown job is refused for good."""
        assert self._server is not None and self._front is not None, "bind comes before serve"
        self._serving = True
        await self._server.start()
        self._front.open()
        self._showing_life = guarded("signs of life", self._show_life(), only_logged)

    async def stop(self) -> None:
        """End all streams without a word (their workers will be back) and wait until the jobs have heard of it."""
        if self._showing_life is not None:
            await end_task(self._showing_life)
        if self._server is not None and self._front is not None:
            self._front.close()
            if not self._serving:
                await self._server.start()  # one that was never started does not let go of its port
            await self._server.stop(grace=None)
            await self._front.stop()
            self._server = None
        await self._door.stop()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                while self._ending:
                    await asyncio.wait(self._ending)
        except TimeoutError:
            late = sorted(task.get_name() for task in self._ending)
            log.error("streams did not end in time", seconds=STOP_SECONDS, tasks=late)

    async def _show_life(self) -> None:
        for part in itertools.cycle(range(ALIVE_PARTS)):
            await asyncio.sleep(ALIVE_SECONDS / ALIVE_PARTS)
            self._streams.show_life(part, ALIVE_PARTS)

    # ---- one stream

    async def _serve(self, _: object, context: Context) -> None:
        self._stop_waits_for(asyncio.current_task())
        assert self._front is not None, "gRPC knows of no connection but through it"
        guest = self._front.find(context.peer())
        if guest is None:  # its connection has ended meanwhile
            return
        stream = self._streams.open(context, guest)
        try:
            with ExitStack() as places:
                await self._admit(stream, places)
                await self._converse(stream)
            _set_status(stream)
        finally:
            self._streams.forget(stream)
            self._say_farewell(stream.dialogue)

    async def _admit(self, stream: Stream, places: ExitStack) -> None:
        """Who shows a wrong token, or has too many streams, is refused before anything that it says is read. Where a
        token is asked for, a right one makes its connection a worker's, whatever the hello is.
        """
        guest = stream.guest
        try:
            places.enter_context(self._counts.of_address(guest.address))
            stream.dialogue.proof = await self._door.proof_of(_metadata(stream.context), guest.address, guest.refuse)
            if self._door.asks:
                guest.let_in()
            places.enter_context(self._counts.of_token(stream.dialogue.proof))
        except ShoalError as error:
            self._refuse(stream, error)

    async def _converse(self, stream: Stream) -> None:
        """Read and write until one side is done, then let go of the stream."""
        name = f"session {stream.dialogue.connection}"
        reading = asyncio.create_task(self._read(stream), name=f"{name} reads")
        writing = asyncio.create_task(stream.write(), name=f"{name} writes")
        late = asyncio.get_running_loop().call_later(self._settings.hello_seconds, self._expect_hello, stream)
        try:
            await asyncio.wait({reading, writing, stream.cut}, return_when=asyncio.FIRST_COMPLETED)
            if stream.dialogue.closing:
                await _linger(stream, reading, writing)
            elif reading.done():
                stream.hang_up()
                await _flush(stream, writing)
        finally:
            late.cancel()
            reading.cancel()
            writing.cancel()
            ends = await asyncio.gather(reading, writing, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _read(self, stream: Stream) -> None:
        """Hand what the worker says to its job; once the stream is closing, drop it."""
        while isinstance(data := await stream.context.read(), bytes):
            if stream.dialogue.is_over:
                continue
            try:
                await self._hear(stream, data)
            except ShoalError as error:
                self._refuse(stream, error)

    async def _hear(self, stream: Stream, data: bytes) -> None:
        dialogue = stream.dialogue
        if not dialogue.job:
            with _hint():
                self._controller.expect(dialogue.job_named(data))
        event = dialogue.hear(data)
        stream.guest.let_in()
        if not dialogue.routine:
            return await self._submit(dialogue.job, event)
        with _hint():
            return self._controller.hear(dialogue.job, event)

    def _expect_hello(self, stream: Stream) -> None:
        if not stream.dialogue.job and not stream.dialogue.is_over:
            self._refuse(stream, stream.dialogue.late(self._settings.hello_seconds))

    def _refuse(self, stream: Stream, error: ShoalError) -> None:
        connection = stream.dialogue.connection
        log.warning("a stream was refused", connection=connection, peer=stream.guest.peer, why=str(error))
        stream.guest.refuse()
        self._streams.refusals.count(error)
        stream.dialogue.refuse(error, leading=self._controller.is_leading)
        stream.stir()

    async def _submit(self, job: str, event: Connected | SeatAsked | MessageReceived) -> None:
        with _hint():
            await self._controller.submit(job, event)

    def _say_farewell(self, dialogue: Dialogue) -> None:
        """Tell the job that the stream ended, in a task of its own: gRPC may have cancelled the stream's."""
        if not dialogue.job:
            return
        event = Disconnected(dialogue.connection, dialogue.farewell())
        name = f"session {dialogue.connection} says farewell"
        task = guarded(name, self._submit_farewell(dialogue.job, event), only_logged)
        self._stop_waits_for(task)

    def _stop_waits_for(self, task: asyncio.Task[None] | None) -> None:
        assert task is not None
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _submit_farewell(self, job: str, event: Disconnected) -> None:
        try:
            await self._controller.submit(job, event)
        except ShoalError as error:
            log.info("a stream ended that its job does not know", job=job, connection=event.connection, why=str(error))


async def _linger(stream: Stream, reading: asyncio.Task[None], writing: asyncio.Task[None]) -> None:
    """Carry the last messages, then wait for the worker to hang up.

    gRPC loses what a client has not read yet when the stream ends under a message that it is writing.
    """
    await _flush(stream, writing)
    await asyncio.wait({reading, stream.cut}, timeout=LINGER_SECONDS, return_when=asyncio.FIRST_COMPLETED)


async def _flush(stream: Stream, writing: asyncio.Task[None]) -> None:
    """Let the writer come to its end: gRPC cannot end a stream under a message, and the worker would wait for that."""
    await asyncio.wait({writing, stream.cut}, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)


@contextmanager
def _hint() -> Iterator[None]:
    """Where a job is not there, the sentence says what a worker can do about it."""
    try:
        yield
    except NotFound as error:
        raise NotFound(f"{error}. Set SHOAL_JOB to the job's name, or submit the job first.") from error


def _metadata(context: Context) -> Mapping[str, str | bytes]:
    return dict(context.invocation_metadata() or ())


def _set_status(stream: Stream) -> None:
    """For clients that look at gRPC's status: the same sentence as in the last message."""
    dialogue = stream.dialogue
    if dialogue.overflowed:
        stream.context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        stream.context.set_details(dialogue.farewell())
    elif dialogue.refusal is not None:
        stream.context.set_code(grpc.StatusCode[dialogue.refusal.grpc_status])
        stream.context.set_details(str(dialogue.refusal)[:1000])


Headers = Mapping[str, str | bytes]


class TokenExpired(ShoalError):
    """A session token came too late, and alone. Not final: the worker shows its join token beside it next."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Door:
    """`tokens`: None where everybody who reaches the port may open any session."""

    def __init__(self, tokens: WorkerTokens | None, clock: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._clock = clock
        self._failed_logins = FailedLogins()
        self._late: set[asyncio.Task[None]] = set()
        """Wrong tokens that wait for their answers, each to its end: whoever hangs up has not made room for a guess."""

    @property
    def asks(self) -> bool:
        """Whether a stream must show a token."""
        return self._tokens is not None

    async def proof_of(self, headers: Headers, address: str, wrong: Callable[[], None]) -> Proof | None:
        """What a stream's tokens prove; None: it may open any session. Raises `Refused`, `TokenExpired`, or
        `TooManyFailures`. A right token never waits, however many wrong ones of its address do; `wrong` hears of one
        before it does.
        """
        if self._tokens is None:
            return None
        authorization = _text(headers.get("authorization"))
        kind, _, bearer = authorization.partition(" ")
        shown = self._tokens.read(bearer) if kind == "Bearer" else None
        if shown is not None:
            return self._proof_of(shown, headers)
        if kind == "Bearer" and self._tokens.is_operators(bearer):
            return None
        self._failed_logins.check(address)
        wrong()
        await self._keep_waiting(address)
        raise Refused(
            f"the worker showed {_found(authorization)}; set SHOAL_TOKEN to what `shoal token JOB` prints there"
        )

    async def stop(self) -> None:
        """Nobody waits any more."""
        for task in list(self._late):
            await end_task(task)

    def _proof_of(self, shown: ShownToken, headers: Headers) -> Proof:
        proof = shown.proof
        if shown.expires is not None:
            if shown.expires <= self._clock():
                raise TokenExpired(
                    f"the session token of worker {proof.worker} of job {proof.job} has expired; expected the job's "
                    f"join token beside it (SHOAL_TOKEN, as `shoal token {proof.job}` prints it)"
                )
            return proof
        assert self._tokens is not None
        beside = self._tokens.read(_text(headers.get(SESSION_TOKEN)))
        is_of_the_run = beside is not None and (beside.proof.job, beside.proof.run) == (proof.job, proof.run)
        return beside.proof if beside is not None and is_of_the_run else proof

    async def _keep_waiting(self, address: str) -> None:
        task = guarded("a wrong token waits for its answer", self._failed_logins.delay(address), only_logged)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        await asyncio.wait([task])


def _found(authorization: str) -> str:
    """What was shown in place of a right token. Of one that only looks like a worker's, what it may be."""
    kind, _, bearer = authorization.partition(" ")
    if kind == "Bearer" and is_for_workers(bearer):
        return (
            f"another token: one for workers that this controller (of {of_shoal(RELEASE)}) has not made, so it was "
            "made from another SHOAL_TOKEN, or by a controller of another release of shoal"
        )
    return "another token" if authorization else "no token"


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
