"""A controller in this process, for the commands that bring their own: `controller`, `run`, `demo`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import typer

from shoal_controller.cli.client import Client


@asynccontextmanager
async def serving(http: str | None, grpc: str | None, store: str | None, shown: bool) -> AsyncIterator[Client]:
    """A running controller's client. Its addresses are the first line on standard output.

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
            yield client


class Interrupts:
    """Ctrl-C (and SIGTERM) as events: the first asks for an end, the second for an end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def heard(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Signals are events inside, and what they were before afterwards."""
    loop, heard = asyncio.get_running_loop(), Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard.heard)
    try:
        yield heard
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
