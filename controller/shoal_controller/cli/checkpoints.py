"""`shoal checkpoints`: one line per checkpoint of a job."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url


async def checkpoints(job: Job, url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List a job's checkpoints, newest first."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import checkpoints_table, listed

    async with Client(url) as client:
        listed("checkpoints", await client.checkpoints(job), checkpoints_table, output)
