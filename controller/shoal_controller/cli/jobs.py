"""`shoal jobs`, `describe`, `scale`, `pause`, `resume`, `cancel`: jobs, and what is done with one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from shoal_protos.errors import Conflict, UserError

from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shoal_protos.rest import Json

    from shoal_controller.cli.client import Client


async def jobs(url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List all jobs."""
    from shoal_controller.cli.runs import clients_of
    from shoal_controller.cli.tables import jobs_table, listed

    found = []
    for one in clients_of(url):
        async with one as client:
            found += await client.jobs()
    listed("jobs", found, jobs_table, output)


async def describe(
    job: Job,
    spec: Annotated[bool, typer.Option("--spec", help="Print the job's specification, as YAML or JSON.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = Form.TABLE,
) -> None:
    """Show a job, its workers and its resizes.

    With --spec, print its specification instead, defaults filled in: `shoal submit` takes it.
    """
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import job_lines, resizes_table, show, workers_table, written

    async with client_of(url, job) as client:
        if spec:
            echo(written(await client.spec(job), Form.YAML if output is Form.TABLE else output))
            return
        described = await client.job(job)
        workers = await client.workers(job)
        report = await client.report(job)
    if output is not Form.TABLE:
        echo(written({"job": described, "workers": workers, "report": report}, output))
        return
    show(*job_lines(described), workers_table(workers), resizes_table(report["generations"]))


async def change(url: str, job: str, ask: Callable[[Client], Awaitable[Json]]) -> None:
    """Ask for a change of a job, or for a new one (""), and show the job as it is then."""
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import changed

    async with client_of(url, job) as client:
        changed(await ask(client))


async def scale(
    job: Job,
    workers: Annotated[
        int | None, typer.Argument(metavar="N", help="New number of workers.", show_default=False)
    ] = None,
    least: Annotated[
        int | None, typer.Option("--min-workers", metavar="N", help="New fewest workers to train with.")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max-workers", metavar="N", help="New most workers to scale to.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Change how many workers are wanted, and between which numbers that may be.

    A launcher starts missing workers; if there are too many, the youngest are drained.
    """
    if workers is least is most is None:
        raise UserError("there is nothing to change; expected N, --min-workers or --max-workers")
    await change(url, job, lambda client: client.scale_job(job, workers, min=least, max=most))


async def pause(job: Job, url: Url = DEFAULT_URL) -> None:
    """Pause training; workers stay connected."""
    await change(url, job, lambda client: client.pause_job(job))


async def resume(job: Job, url: Url = DEFAULT_URL) -> None:
    """Resume a paused job."""
    await change(url, job, lambda client: client.resume_job(job))


async def cancel(job: Job, url: Url = DEFAULT_URL) -> None:
    """End a job early.

    Its workers stop after the current step; its history and its checkpoints stay.
    """
    from shoal_controller.cli.client import IsOver

    try:
        await change(url, job, lambda client: client.stop(job))
    except IsOver as error:
        raise Conflict(f"{error}; there is nothing to cancel") from None
