"""`shoal top`: all jobs and their workers, once a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shoal_controller.cli.options import DEFAULT_URL, Url

if TYPE_CHECKING:
    import asyncio

    from rich.console import Group

    from shoal_controller.cli.client import Client

EVERY_SECONDS = 1.0


async def top(url: Url = DEFAULT_URL) -> None:
    """Watch all jobs and their workers.

    Until `q` or Ctrl-C; where standard output is no terminal, they are shown once.
    """
    import asyncio

    from rich.live import Live

    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import console, show

    async with Client(url) as client:
        if not sys.stdout.isatty():
            show(await _all(client))
            return
        with quit_key() as quitting, Live(await _all(client), console=console(), screen=True) as live:
            while not quitting.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_SECONDS):
                        await quitting.wait()
                live.update(await _all(client))


@contextmanager
def quit_key() -> Iterator[asyncio.Event]:
    """Set when `q` is typed; the terminal is as it was afterwards."""
    import asyncio
    import termios
    import tty

    quitting, keys = asyncio.Event(), sys.stdin
    if not keys.isatty():
        yield quitting
        return

    def pressed() -> None:
        if b"q" in os.read(keys.fileno(), 64).lower():
            quitting.set()

    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    asyncio.get_running_loop().add_reader(keys, pressed)
    try:
        yield quitting
    finally:
        asyncio.get_running_loop().remove_reader(keys)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


async def _all(client: Client) -> Group:
    """Every job with its workers below it."""
    from rich.console import Group
    from rich.padding import Padding

    from shoal_controller.cli.tables import job_lines, workers_table

    parts: list[object] = []
    for job in await client.jobs():
        parts += [*job_lines(job), Padding(workers_table(await client.workers(job["job"])), (0, 0, 1, 2))]
    return Group(*(parts or ["no jobs"]))  # type: ignore[arg-type]
