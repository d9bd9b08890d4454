"""`shoal events`: what happened to a job, in the order in which it did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from shoal_protos.rest import Json


async def events(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new events.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = Form.TABLE,
) -> None:
    """Print a job's events.

    With --follow and --output json or yaml, each event is a document of its own.
    """
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import event_line, written

    def line(event: Json) -> str:
        return event_line(event) if output is Form.TABLE else written(event, output)

    async with client_of(url, job) as client:
        known = await client.events(job)
        if output is not Form.TABLE and not follow:
            echo(written({"events": known}, output))
            return
        for event in known:
            echo(line(event))
        if follow:
            async for event in client.follow(job, after=known[-1]["revision"] if known else 0):
                echo(line(event))
