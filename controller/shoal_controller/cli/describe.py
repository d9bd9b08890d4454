"""`shoal describe`: a job, its workers, and what became of its worlds."""

from __future__ import annotations

from shoal_controller.cli.options import DEFAULT_URL, Job, Url


async def describe(job: Job, url: Url = DEFAULT_URL) -> None:
    """Show a job, its workers and its resizes."""
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.tables import job_lines, resizes_table, show, workers_table

    async with Client(url) as client:
        described = await client.job(job)
        workers = await client.workers(job)
        report = await client.report(job)
    show(*job_lines(described), workers_table(workers), resizes_table(report["generations"]))
