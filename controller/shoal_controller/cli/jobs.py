"""`shoal jobs`: one line per job."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Url


async def jobs(url: Url = DEFAULT_URL) -> None:
    """List the jobs."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import jobs_table, show

    async with Client(url) as client:
        show(jobs_table(await client.jobs()))
