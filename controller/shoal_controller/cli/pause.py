"""`shoal pause`: stop stepping, keep the world."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def pause(job: Job, url: Url = DEFAULT_URL) -> None:
    """Pause training; workers stay connected."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import changed

    async with Client(url) as client:
        changed(await client.pause(job))
