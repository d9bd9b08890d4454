"""`shoal jobs`: one line per job."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Form, Output, Url


async def jobs(url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List all jobs."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import jobs_table, listed

    async with Client(url) as client:
        listed("jobs", await client.jobs(), jobs_table, output)
