"""`shoal drain`: let one worker go."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def drain(
    job: Job,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker (w0, w1, …).", show_default=False)],
    url: Url = DEFAULT_URL,
) -> None:
    """Let one worker go.

    Nothing of what it holds is lost. A launcher puts another one in its place: to have fewer, scale.
    """
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    async with Client(url) as client:
        changed(await client.drain(job, worker))
