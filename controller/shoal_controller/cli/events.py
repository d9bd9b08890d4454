"""`shoal events`: what happened to a job, in the order in which it did."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def events(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what happens from now on.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Print a job's events."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import event_line

    async with Client(url) as client:
        revision = 0
        for event in await client.events(job):
            typer.echo(event_line(event))
            revision = event["revision"]
        if follow:
            async for event in client.follow(job, after=revision):
                typer.echo(event_line(event))
