"""A controller in this process, for the commands that bring their own: `controller`, `run`, `demo`.

The client of `run` and `demo` reaches it without a port (`InProcess`), so that no other process on that port can
interfere. Answers have a deadline, as over a connection; event streams need a port.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from shoal_protos.rest import ANSWER_SECONDS
from starlette.types import ASGIApp

from shoal_controller.cli.client import Client
from shoal_controller.cli.endings import Interrupted
from shoal_controller.process.tasks import end_task

if TYPE_CHECKING:
    from shoal_controller.server import Server
    from shoal_controller.settings import Settings


LINGER_SECONDS = 10.0
"""How long the workers of a job that is over may take to end by themselves."""


@dataclass(frozen=True, slots=True)
class Here:
    """A controller in this process, and its client."""

    client: Client
    server: Server

    async def kill_workers(self, job: str) -> None:
        """End every process that was started here for this job at once, whether it has said hello or not."""
        await self.server.launcher.kill_all(job)

    async def give_up(self, job: str) -> None:
        """The same for a job whose end the store does not take: none is started again if it answers once more."""
        await self.server.launcher.give_up(job)

    async def end_the_rest(self) -> None:
        """Leave no process of any other job either: nothing would watch it once this controller has ended."""
        await asyncio.gather(*map(self.give_up, self.server.launcher.jobs))

    async def end_what_is_over(self) -> None:
        """Leave no process of a job that is over behind."""
        over = [view.job for view in self.server.controller.jobs() if view.phase.is_over]
        await asyncio.gather(*(self.server.launcher.end_all(job, LINGER_SECONDS) for job in over))


@dataclass(frozen=True, slots=True)
class Places:
    """The flags with which a controller is started; None: the setting's default."""

    http: str | None
    grpc: str | None
    store: str | None
    data: Path | None
    open: bool = False
    no_page: bool = False
    logs: Path | None = None
    """Of local workers."""
    adopt: bool = False

    def check(self) -> None:
        """Raises `UserError` where a command cannot start its own controller with them; nothing is made."""
        from shoal_controller.settings import Settings

        Settings(**self._of_its_own(lambda: "made when it starts"))

    def settings(self, own: bool) -> Settings:
        """`own`: a command's own controller, which makes its token and shows a display instead of its log."""
        from shoal_controller.access.tokens import made_token
        from shoal_controller.settings import Settings, data_folder

        return Settings(**(self._of_its_own(lambda: made_token(data_folder(self.data))) if own else self._given()))

    def _of_its_own(self, token: Callable[[], str]) -> dict[str, Any]:
        given = self._given()
        if not os.environ.get("SHOAL_TOKEN"):
            given["token"] = token()
        if not os.environ.get("SHOAL_LOG_LEVEL"):
            given["log_level"] = "warning"
        return given

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = {"http": self.http, "grpc": self.grpc, "store": self.store, "data": self.data}
        given |= {"open": self.open or None, "page": False if self.no_page else None, "log_dir": self.logs}
        given["adopt"] = self.adopt or None
        return {name: value for name, value in given.items() if value is not None}


@asynccontextmanager
async def serving(places: Places, own: bool, signals: Interrupts) -> AsyncIterator[Here]:
    """A running controller. Its addresses are the first line on standard output. Raises `Interrupted` for a signal that
    comes before it runs: a store, or a leader, may be waited for without an end.
    """
    from shoal_protos.errors import UserError
    from shoal_protos.log_stream import LogStream, standard_output

    from shoal_controller.process.descriptors import raise_descriptor_limit
    from shoal_controller.server import serve

    settings = places.settings(own)
    raise_descriptor_limit()
    with signals.ending_this() as begun:
        async with serve(settings) as server:
            begun()
            if own and (leader := server.controller.other) is not None:
                raise UserError(
                    f"another controller leads with the store {settings.store} (at {leader.url}); submit the job there "
                    "with `shoal submit --url`, or give this one another --store"
                )
            LogStream(stream=standard_output).write(f"http={server.http} grpc={server.grpc}\n")
            token = settings.token.get_secret_value() if settings.token is not None else ""
            async with Client(server.url, token, InProcess(server.app)) as client:
                here = Here(client, server)
                try:
                    yield here
                finally:
                    await here.end_what_is_over()
                    if own:
                        await here.end_the_rest()


class Interrupts:
    """Ctrl-C (and SIGTERM) as events: the first asks for an end, the second for an end at once. A terminal that was
    closed (SIGHUP) asks for an end only, for the kernel and a shell may both say so.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.terminated = False
        """Whether the first was SIGTERM, the ordinary end of a service."""

    def on_signal(self, number: signal.Signals) -> None:
        self.terminated |= number == signal.SIGTERM and not self.first.is_set()
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        again = self.first.is_set() and number != signal.SIGHUP
        (self.second if again else self.first).set()

    @contextmanager
    def ending_this(self) -> Iterator[Callable[[], object]]:
        """Inside, the first signal ends this task by `Interrupted`, until what is yielded has been called."""
        from shoal_controller.process.tasks import cancelled_when

        asked = asyncio.create_task(self.first.wait(), name="until a signal")
        try:
            with cancelled_when(asked, Interrupted):
                yield asked.cancel
        finally:
            asked.cancel()


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Signals are events inside, and what they were before afterwards. `nohup` has SIGHUP ignored, and it stays so."""
    loop, found = asyncio.get_running_loop(), Interrupts()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, found.on_signal, number)
    try:
        yield found
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _let_go_of_terminal() -> None:
    """What is written to one that was closed fails, and must not keep a command from its end: it goes nowhere."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


HERE = ("127.0.0.1", 0)
"""Address of the caller, as the history of a job shows it."""


class InProcess(httpx.AsyncBaseTransport):
    """Answers whole requests; event streams need a port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = httpx.ASGITransport(app, raise_app_exceptions=False, client=HERE)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answers: list[httpx.Response] = []

        async def answer() -> None:
            answers.append(await self._app.handle_async_request(request))

        # In a task of its own: REST answers a request that is cancelled, and its caller would not see its own end.
        answering = asyncio.create_task(answer(), name=f"{request.method} {request.url.path}")
        try:
            await asyncio.wait([answering], timeout=ANSWER_SECONDS)
            if not answering.done():
                raise httpx.ReadTimeout(f"no answer within {ANSWER_SECONDS:g} s", request=request)
            answering.result()
        finally:
            await end_task(answering)
        return answers[0]
