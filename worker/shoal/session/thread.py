"""The session's thread: one stream to the controller, opened again with back-off for ever while training goes on.

It moves messages between the stream and the `SessionDriver`, keeps the heartbeat, and reads SIGTERM. It decides
nothing; what is sent and what comes of an answer is the dialogue's. If it ends unexpectedly the link is informed
(`on_failure`).

Two pure objects are asked before each stream. `ControllerAddresses` is where to try next: the addresses that the worker
was given and those it was told of, the leader's first. `ShownTokens` is what to show: a fresh session token by itself,
so that the token that the worker was started with travels as little as can be; later, or when the fresh one was of no
use, both.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial

import grpc
import grpc.aio
from shoal_protos.addresses import split_address
from shoal_protos.channel import CHANNEL_OPTIONS, METHOD, SESSION_TOKEN, SILENT_SECONDS
from shoal_protos.errors import UserError
from shoal_protos.messages import Refusal, Result, Seat, SessionToken, Shutdown, Welcome
from shoal_protos.training_log import get_logger
from shoal_protos.wire import decode_controller, encode_worker

from shoal.process.forks import Connections
from shoal.session.driver import SeatDriver, SessionDriver
from shoal.session.settings import SessionSettings
from shoal.session.signals import TermSignal
from shoal.session.unreachable import why_unreachable

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
"""Between two attempts to reach the controller."""
STEADY_SECONDS = 1.0
"""A stream that ends sooner has failed: the next attempt waits longer."""
CONNECT_SECONDS = 4.0
"""How long a connection may take. A frozen controller's never comes, and those that are not frozen are waiting: in
`reconnect_seconds` there must be time for some of them.
"""
WELCOME_SECONDS = 10.0
"""A stream on which nothing was received for so long after the hello is given up."""
EXPLAIN_SECONDS = 5.0
"""Between two looks at why no session comes about, and for each."""
MOST_COMPLAINTS = 16
FAREWELL_SECONDS = 5.0
"""Time for the controller to read what was sent before the stream ended."""

OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # every attempt connects anew: the back-off is ours
    ("grpc.enable_http_proxy", 0),
)

log = get_logger("shoal.session")

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class SessionThread:
    """Started once per process; `wake` says that something is due, `close` ends it."""

    def __init__(self, driver: SessionDriver | SeatDriver, settings: SessionSettings, term: TermSignal | None) -> None:
        self._driver, self._settings, self._term = driver, settings, term
        self._credentials = settings.credentials()
        self._addresses = ControllerAddresses(settings.addresses)
        self._tokens = ShownTokens(settings.token.get_secret_value() if settings.token is not None else None)
        self._incarnation = ""
        """Whose stream is open."""
        self._leader = ""
        """The leader, as a controller named it that does not lead."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._closing = False
        self._welcomed = False
        self._why = ""
        """Why there is no controller, as it was last said."""
        self._patience: asyncio.Timeout | None = None
        """Timeout of the controller while a stream is being opened."""
        self._complaints: set[str] = set()
        """What has been said since the last welcome."""
        self._explained = float("-inf")
        """When it was last looked why no session came about."""
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-session", daemon=True)
        self._thread.start()
        self._running.wait()

    def wake(self) -> None:
        """Wake the session; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to wake
                self._loop.call_soon_threadsafe(self._stir)

    def close(self) -> None:
        """What is due goes out first, where a controller listens."""
        self._closing = True
        self.wake()
        self._thread.join(2 * FAREWELL_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as error:
            log.exception("session_failed")
            self._driver.on_failure(error)
        finally:
            self._running.set()

    async def _live(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        if self._term is not None:
            loop.add_reader(self._term.reader, self._read_signals, self._term)
        self._running.set()
        pause, lost = FIRST_PAUSE_SECONDS, time.monotonic()
        while not self._closing:
            if self._driver.silent:
                await self._rest(None)
                continue
            began = time.monotonic()
            await self._converse()
            now = time.monotonic()
            if self._welcomed:
                lost = now
            else:
                self._driver.on_controller_unreachable(now - lost, self._why)
                if self._addresses.on_failure(self._leader):
                    continue
            steady = self._welcomed and now - began > STEADY_SECONDS
            pause = FIRST_PAUSE_SECONDS if steady else min(2 * pause, LONGEST_PAUSE_SECONDS)
            if not self._closing and not self._driver.silent:
                await self._rest(pause)

    def _read_signals(self, term: TermSignal) -> None:
        if term.has_come():
            self._driver.on_sigterm()

    def _stir(self) -> None:
        self._woken.set()
        if self._closing and self._patience is not None:
            self._patience.reschedule(0.0)

    async def _rest(self, seconds: float | None) -> None:
        """Until woken, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    # ---- one stream

    async def _converse(self) -> None:
        """One stream, from hello to end."""
        self._welcomed, self._leader = False, ""
        address, credentials = self._addresses.current, self._current_credentials()
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        self._connections = Connections(split_address(address)[1])
        with self._connections:
            await self._converse_over(channel)

    def _current_credentials(self) -> grpc.ChannelCredentials | None:
        """Read again for every stream: certificates are renewed in place. What cannot be read changes nothing."""
        try:
            self._credentials = self._settings.credentials()
        except UserError as error:
            self._complain(str(error))
        return self._credentials

    async def _converse_over(self, channel: grpc.aio.Channel) -> None:
        async with channel:
            hello = self._driver.say_hello()
            self._incarnation = hello.incarnation
            shown = self._tokens.headers(hello.incarnation, time.monotonic())
            call: Call = channel.stream_stream(METHOD)(metadata=shown)
            try:
                async with asyncio.timeout(CONNECT_SECONDS) as self._patience:
                    await call.write(encode_worker(hello))
                self._patience = None
                await self._talk(call)
            except grpc.aio.AioRpcError as error:
                await self._explain(error)
            except asyncio.InvalidStateError:  # it ended just before something was to be written
                self._complain("the stream has ended")
            except TimeoutError:
                seconds = CONNECT_SECONDS if self._patience is not None else self._silence_seconds
                self._complain(f"nothing was received for {seconds:g} s")
                self._welcomed = False
            except UserError as error:
                log.error("message_not_understood", controller=self._addresses.current, why=str(error))
            finally:
                self._patience = None
                call.cancel()

    @property
    def _silence_seconds(self) -> float:
        """How long the controller may say nothing."""
        return SILENT_SECONDS if self._welcomed else WELCOME_SECONDS

    async def _explain(self, error: grpc.aio.AioRpcError) -> None:
        """Say what keeps the session from coming about. It is looked for now and then, not at every attempt."""
        details, now = error.details() or error.code().name, time.monotonic()
        if self._welcomed or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return self._complain(details)
        if now - self._explained < EXPLAIN_SECONDS or self._closing:
            return None
        self._explained = now
        look = partial(why_unreachable, self._addresses.current, self._settings.certificates, details)
        with contextlib.suppress(TimeoutError):  # a name server that does not answer, say: it must hold up no attempt
            async with asyncio.timeout(EXPLAIN_SECONDS):
                details = await asyncio.to_thread(look)
        return self._complain(details)

    def _complain(self, why: str) -> None:
        """Once for each reason, until a controller welcomes this worker again."""
        self._why = why
        if why not in self._complaints and len(self._complaints) < MOST_COMPLAINTS and not self._closing:
            self._complaints.add(why)
            log.warning("no_controller", controller=self._addresses.current, why=why, means="tries again")

    async def _talk(self, call: Call) -> None:
        """Both directions at once, until either ends."""
        reading = asyncio.create_task(self._read(call), name="session reads")
        writing = asyncio.create_task(self._write(call), name="session writes")
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if reading not in done:  # all is said: the end of the stream shows that it was heard
                await asyncio.wait({reading}, timeout=FAREWELL_SECONDS)
        finally:
            reading.cancel()
            writing.cancel()
            ends = await asyncio.gather(reading, writing, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if not any(ends):
            self._driver.on_last_word()

    async def _read(self, call: Call) -> None:
        while True:
            async with asyncio.timeout(self._silence_seconds):
                data = await call.read()
            if not isinstance(data, bytes):
                return
            message = decode_controller(data)
            if isinstance(message, Welcome | Seat):
                self._welcomed, self._why = True, ""
                self._complaints.clear()
                self._connections.settle()
            if isinstance(message, Welcome):
                self._addresses.on_welcome(message.controllers)
            elif isinstance(message, SessionToken):
                self._tokens.on_given(message, self._incarnation, time.monotonic())
                continue
            elif isinstance(message, Refusal):
                self._leader = message.leader
                self._tokens.on_refused()
            self._driver.on_message(message)
            if isinstance(message, Shutdown | Refusal | Seat):
                return

    async def _write(self, call: Call) -> None:
        """Says what is due at once, and a heartbeat when it is time; ends after the last word."""
        beat = time.monotonic() + self._driver.heartbeat_seconds
        while True:
            now = time.monotonic()
            beat = min(beat, now + self._driver.heartbeat_seconds)
            messages = self._driver.take_outgoing(beat=now >= beat)
            if now >= beat:
                beat = now + self._driver.heartbeat_seconds
            for message in messages:
                await call.write(encode_worker(message))
            if self._closing or any(isinstance(message, Result) and message.failure for message in messages):
                await call.done_writing()
                return
            await self._rest(max(0.0, beat - time.monotonic()))


class ControllerAddresses:
    """`current` is to be tried; `on_failure` when it was of no use."""

    def __init__(self, given: Sequence[str]) -> None:
        self._given = tuple(given)
        self._all = self._given
        self._at = 0
        self._leader = ""

    @property
    def current(self) -> str:
        """The address to try."""
        return self._leader or self._all[self._at]

    def on_welcome(self, addresses: Sequence[str]) -> None:
        """A controller that welcomed this worker names all of its store. Those that were given stay."""
        here = self.current
        self._all = tuple(dict.fromkeys([*self._given, *addresses]))
        if not self._leader:
            self._at = self._all.index(here) if here in self._all else 0

    def on_failure(self, leader: str = "") -> bool:
        """The controller at `current` was of no use; it may have named the one that leads, which is next. Whether that
        one is to be tried at once: not where this one had been named itself, or two that name each other would be asked
        without a pause.
        """
        failed, was_named, self._leader = self.current, bool(self._leader), ""
        if leader and leader != failed:
            self._leader = leader
            return not was_named
        self._at = (self._at + 1) % len(self._all)
        return False


Headers = tuple[tuple[str, str], ...]


class ShownTokens:
    """`given`: what the process was started with; None: nothing. A session token is one incarnation's."""

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._token = ""
        self._incarnation = ""
        self._fresh_until = 0.0

    def headers(self, incarnation: str, now: float) -> Headers:
        """What a stream of this incarnation shows."""
        token = self._token if self._incarnation == incarnation else ""
        if token and (self._given is None or now < self._fresh_until):
            return (_bearer(token),)
        given = () if self._given is None else (_bearer(self._given),)
        return (*given, (SESSION_TOKEN, token)) if token else given

    def on_given(self, message: SessionToken, incarnation: str, now: float) -> None:
        """The controller gave it on a stream of this incarnation."""
        self._token, self._incarnation = message.token, incarnation
        self._fresh_until = now + message.seconds

    def on_refused(self) -> None:
        """A stream was refused: both are shown from now on, until there is a new one."""
        self._fresh_until = 0.0


def _bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")
