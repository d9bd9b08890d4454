"""`shoal resume`: step again after a pause."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def resume(job: Job, url: Url = DEFAULT_URL) -> None:
    """Resume a paused job."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    async with Client(url) as client:
        changed(await client.resume(job))
