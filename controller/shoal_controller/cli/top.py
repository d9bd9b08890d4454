"""`shoal top`: all jobs and their workers, once a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shoal_controller.cli.options import DEFAULT_URL, Url

if TYPE_CHECKING:
    from rich.console import Group

    from shoal_controller.cli.client import Client

EVERY_SECONDS = 1.0


async def top(url: Url = DEFAULT_URL) -> None:
    """Watch all jobs and their workers.

    Until Ctrl-C; where standard output is no terminal, they are shown once.
    """
    import asyncio

    from rich.live import Live

    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import console, show

    async with Client(url) as client:
        if not sys.stdout.isatty():
            show(await _all(client))
            return
        with Live(await _all(client), console=console(), screen=True) as live:
            while True:
                await asyncio.sleep(EVERY_SECONDS)
                live.update(await _all(client))


async def _all(client: Client) -> Group:
    """Every job with its workers below it."""
    from rich.console import Group
    from rich.padding import Padding

    from shoal_controller.cli.tables import job_lines, workers_table

    parts: list[object] = []
    for job in await client.jobs():
        parts += [*job_lines(job), Padding(workers_table(await client.workers(job["job"])), (0, 0, 1, 2))]
    return Group(*(parts or ["no jobs"]))  # type: ignore[arg-type]
