"""`shoal workers`: one line per worker of a job."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url


async def workers(job: Job, url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List a job's workers, including those that are gone."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import listed, workers_table

    async with Client(url) as client:
        listed("workers", await client.workers(job), workers_table, output)
