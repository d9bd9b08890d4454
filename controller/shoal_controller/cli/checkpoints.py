"""`shoal checkpoints`: one line per checkpoint of a job."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def checkpoints(job: Job, url: Url = DEFAULT_URL) -> None:
    """List a job's checkpoints, newest first."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import checkpoints_table, show

    async with Client(url) as client:
        show(checkpoints_table(await client.checkpoints(job)))
