"""A controller in this process, for the commands that bring their own: `controller`, `run`, `demo`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from shoal_controller.cli.client import Client

if TYPE_CHECKING:
    from shoal_controller.server import Server

LINGER_SECONDS = 10.0
"""How long the workers of a job that is over may take to end by themselves."""


@dataclass(frozen=True, slots=True)
class Here:
    """A controller in this process, and its client."""

    client: Client
    server: Server

    async def kill_workers(self, job: str) -> None:
        """End every process that was started here for this job at once, whether it has said hello or not."""
        await self.server.launcher.end_all(job, 0.0)

    async def end_what_is_over(self) -> None:
        """Leave no process of a job that is over behind."""
        over = [view.job for view in self.server.shell.jobs() if view.phase.over]
        await asyncio.gather(*(self.server.launcher.end_all(job, LINGER_SECONDS) for job in over))


@asynccontextmanager
async def serving(http: str | None, grpc: str | None, store: str | None, shown: bool) -> AsyncIterator[Here]:
    """A running controller. Its addresses are the first line on standard output.

    `shown`: standard error has a live display, so the log keeps to warnings unless SHOAL_LOG_LEVEL says otherwise.
    """
    from shoal_controller.server import running
    from shoal_controller.settings import Settings

    given = {"http": http, "grpc": grpc, "store": store, "log_level": "warning" if shown else None}
    if os.environ.get("SHOAL_LOG_LEVEL"):
        del given["log_level"]
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    async with running(settings) as server:
        typer.echo(f"http={server.http} grpc={server.grpc}")
        sys.stdout.flush()
        async with Client(f"http://{server.http}") as client:
            here = Here(client, server)
            try:
                yield here
            finally:
                await here.end_what_is_over()


class Interrupts:
    """Ctrl-C (and SIGTERM) as events: the first asks for an end, the second for an end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.terminated = False
        """Whether the first was SIGTERM, the ordinary end of a service."""

    def heard(self, number: signal.Signals) -> None:
        self.terminated |= number == signal.SIGTERM and not self.first.is_set()
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Signals are events inside, and what they were before afterwards."""
    loop, heard = asyncio.get_running_loop(), Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard.heard, number)
    try:
        yield heard
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
