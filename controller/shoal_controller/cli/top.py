"""`shoal top`: all jobs and their workers, once a second, in the order and with the sentences of the page."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from shoal_protos.errors import NotFound, StoreError

from shoal_controller.cli.options import DEFAULT_URL, Url

if TYPE_CHECKING:
    import asyncio

    from rich.console import Group
    from rich.live import Live

    from shoal_controller.cli.client import Client

EVERY_SECONDS = 1.0


async def top(url: Url = DEFAULT_URL) -> None:
    """Watch all jobs and their workers.

    Press `q` or Ctrl-C to leave. If standard output is not a terminal that can be redrawn, they are shown once.
    """
    import asyncio

    from rich.live import Live

    from shoal_controller.cli.attend import interrupted_before
    from shoal_controller.cli.runs import clients_of
    from shoal_controller.cli.tables import console, is_redrawn, show

    async with AsyncExitStack() as ends:
        clients = [await ends.enter_async_context(one) for one in clients_of(url)]
        on = console()
        if not is_redrawn(sys.stdout, on):
            show(await _all(*clients))
            return
        with asked_to_quit() as quitting, Live(await _all(*clients), console=on, screen=True) as live:
            showing = asyncio.create_task(_keep_showing(clients, live), name="show all jobs")
            try:
                await interrupted_before(showing, quitting)
            finally:
                showing.cancel()
                with suppress(asyncio.CancelledError):
                    await showing


async def _keep_showing(clients: Sequence[Client], live: Live) -> None:
    """Once a second, also while no controller answers: it may come back."""
    import asyncio

    while True:
        await asyncio.sleep(EVERY_SECONDS)
        live.update(await _screen(*clients))


async def _screen(*clients: Client) -> Group | str:
    """All jobs, or why they cannot be shown now."""
    from rich.markup import escape
    from shoal_protos.errors import NoController

    try:
        return await _all(*clients)
    except (NoController, StoreError) as error:
        return escape(f"{error}; trying again")


@contextmanager
def asked_to_quit() -> Iterator[asyncio.Event]:
    """Set when `q` is typed, or by SIGTERM, so that the terminal is as it was afterwards."""
    import asyncio
    import signal

    quitting, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, quitting.set)
    try:
        with _when_typed(quitting):
            yield quitting
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def _when_typed(quitting: asyncio.Event) -> Iterator[None]:
    import asyncio
    import termios
    import tty

    keys = sys.stdin
    if not keys.isatty():
        yield
        return

    def pressed() -> None:
        if b"q" in os.read(keys.fileno(), 64).lower():
            quitting.set()

    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    asyncio.get_running_loop().add_reader(keys, pressed)
    try:
        yield
    finally:
        asyncio.get_running_loop().remove_reader(keys)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


async def _all(*clients: Client) -> Group:
    """Every job with its workers below it, those that need attention first."""
    from rich.console import Group
    from rich.padding import Padding

    from shoal_controller.cli.tables import overview_lines, workers_table

    parts: list[object] = []
    for client, row in [(one, row) for one in clients for row in await one.overview()]:
        with suppress(NotFound):  # it was forgotten in the meantime
            workers = await client.workers(row["job"]["job"])
            parts += [*overview_lines(row), Padding(workers_table(workers), (0, 0, 1, 2))]
    return Group(*(parts or ["no jobs"]))  # type: ignore[arg-type]
