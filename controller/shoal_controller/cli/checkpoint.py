"""`shoal checkpoint`: save one now."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def checkpoint(job: Job, url: Url = DEFAULT_URL) -> None:
    """Save a checkpoint after the next step."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    async with Client(url) as client:
        changed(await client.checkpoint(job))
