"""`shoal lost`: say that a silent worker's process is gone."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def lost(
    job: Job,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker (w0, w1, …).", show_default=False)],
    url: Url = DEFAULT_URL,
) -> None:
    """Confirm that a silent worker is dead, so that the job goes on without it.

    Only for a process that is certainly gone: where all workers of a world are said to be, another world may begin.
    """
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    async with Client(url) as client:
        changed(await client.lost(job, worker))
