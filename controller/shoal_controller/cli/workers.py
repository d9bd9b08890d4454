"""`shoal workers`, `drain`, `lost`: a job's workers, and what is done with one of them."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.jobs import change
from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url, Worker


async def workers(job: Job, url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List a job's workers, including those that were lost or have left."""
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import listed, workers_table

    async with client_of(url, job) as client:
        listed("workers", await client.workers(job), workers_table, output)


async def drain(
    job: Job,
    worker: Worker,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, for the job's history.")] = "",
    url: Url = DEFAULT_URL,
) -> None:
    """Let one worker go.

    Nothing that it holds is lost. A launcher replaces it; to have fewer workers, use scale.
    """
    await change(url, job, lambda client: client.drain_worker(job, worker, why=why))


async def lost(job: Job, worker: Worker, url: Url = DEFAULT_URL) -> None:
    """Confirm that a silent worker is dead.

    The job then continues without it. Use this only if the process is certainly gone: once all workers of a world are
    confirmed dead, another world may begin.
    """
    await change(url, job, lambda client: client.confirm_worker_lost(job, worker))
