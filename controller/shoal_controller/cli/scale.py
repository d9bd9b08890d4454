"""`shoal scale`: how many workers a job shall have."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def scale(
    job: Job,
    workers: Annotated[int, typer.Argument(metavar="N", help="New number of workers.", show_default=False)],
    url: Url = DEFAULT_URL,
) -> None:
    """Change how many workers are wanted.

    A launcher starts joiners; where there are too many, the youngest are drained.
    """
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    async with Client(url) as client:
        changed(await client.scale(job, workers))
