"""The commands of a job: `shoal jobs`, `describe`, `pause`, `resume`, `cancel`; of its workers: `workers`,
`drain`, `lost`; of its history: `events`; of its output: `logs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from shoal_protos.errors import Conflict, NotFound
from shoal_protos.text import shown_name

from shoal_controller.cli.completion import worker_names
from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Url, Worker
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shoal_protos.rest import Json

    from shoal_controller.cli.client import Client
    from shoal_controller.cli.printed import Tail

LOOK_SECONDS = 0.25

LoggedWorker = typer.Argument(
    metavar="WORKER",
    help="Id of the worker. Default: rank 0 or the last.",
    show_default=False,
    autocompletion=worker_names,
)


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
    from shoal_controller.cli.tables import cells_table, described_lines, resizes_table, show, workers_table, written

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
    cells = [cells_table(described, workers)] if "cell" in described else []
    show(*described_lines(described), *cells, workers_table(workers), resizes_table(report["generations"]))


async def change(url: str, job: str, ask: Callable[[Client], Awaitable[Json]]) -> None:
    """Ask for a change of a job, or for a new one (""), and show the job as it is then."""
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import changed

    async with client_of(url, job) as client:
        changed(await ask(client))


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


# ---- its workers


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


# ---- its events


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


# ---- its logs


async def logs(
    job: Job,
    worker: Annotated[str | None, LoggedWorker] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new output.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Print a worker's log: this machine's file, else what the controller has of it, as of a pod.

    With --follow and without WORKER, go on with the next rank 0 where a pod has ended.
    """
    from shoal_controller.cli.runs import client_of

    async with client_of(url, job) as client:
        meant = logged_worker(await client.workers(job), worker, job)
        if (tail := tail_here(meant)) is not None:
            await _print_file(client, job, tail, follow)
        else:
            await _print_stream(client, job, meant, follow, worker is None)


async def _print_file(client: Client, job: str, tail: Tail, follow: bool) -> None:
    import asyncio

    from shoal_protos.rest import OVER

    while True:
        over = not follow or (await client.job(job))["phase"] in OVER
        for line in tail.take_lines():
            echo(line)
        if over:
            break
        await asyncio.sleep(LOOK_SECONDS)
    for line in tail.take_rest():
        echo(line)


async def _print_stream(client: Client, job: str, worker: Json, follow: bool, moves: bool) -> None:
    """`moves`: to the next rank 0 once this one has ended. A log that broke off is read again, past what was shown, up
    to the deadline of `display.watch`.
    """
    import asyncio

    from shoal_protos.errors import NoController, PeerError, StoreError

    from shoal_controller.cli.client import BrokeOff
    from shoal_controller.cli.display import MOST_MISSES, POLL_SECONDS
    from shoal_controller.cli.printed import ShownLines

    shown, failures, misses, reads = ShownLines(), 0, 0, True
    while True:
        try:
            if reads:
                async for part in client.log(job, worker["worker"], follow):
                    for line in shown.take(part):
                        failures = misses = 0
                        echo(line)
            reads = False
            meant = await _next_shown(client, job, worker["worker"], moves) if follow else None
        except (BrokeOff, NoController, PeerError, StoreError) as error:
            failures, misses = failures + 1, misses + (not isinstance(error, StoreError))
            if not follow or misses >= MOST_MISSES:
                raise
            if failures == 1:
                echo(f"{error}; trying again", err=True)
            await asyncio.sleep(POLL_SECONDS)
            shown.begin_again()
            continue
        except NotFound:  # its pod is gone, and its log with it
            if not (moves and reads and failures):
                raise
            reads = False
            continue
        if meant is None or meant["worker"] != worker["worker"]:
            for line in shown.take_rest():
                echo(line)
            shown = ShownLines()
        if meant is None:
            return
        worker, reads = meant, True
        shown.begin_again()


async def _next_shown(client: Client, job: str, worker: str, moves: bool) -> Json | None:
    """Return the worker to read from after this one's log has ended or broken off, once there is one; None: the job has
    no further log.
    """
    import asyncio

    from shoal_protos.rest import OVER

    while (await client.job(job))["phase"] not in OVER:
        await asyncio.sleep(LOOK_SECONDS)
        living = [one for one in await client.workers(job) if one["state"] not in ("lost", "left") and _has_log(one)]
        for one in living:
            if one["worker"] == worker or (moves and one["rank"] == 0):
                return one
        if not moves:
            break
    return None


def tail_here(worker: Json) -> Tail | None:
    """Return the worker's log; None: it is no file of this machine."""
    from pathlib import Path

    from shoal_controller.cli.printed import Tail

    return Tail(Path(worker["log"])) if worker["log"] and Path(worker["log"]).exists() else None


def _has_log(worker: Json) -> bool:
    return bool(worker["log"] or worker["pod"])


def logged_worker(workers: Sequence[Json], worker: str | None, job: str) -> Json:
    """Return the worker that is meant. Raises `NotFound` where there is none with a log."""
    logged = [one for one in workers if _has_log(one)]
    if worker is not None:
        logged = [one for one in logged if one["worker"] == worker]
    if not logged:
        names = ", ".join(one["worker"] for one in workers if _has_log(one)) or "none"
        who = f"worker {shown_name(worker)} of job {job}" if worker is not None else f"no worker of job {job}"
        has = "has no log that this controller knows" if worker is not None else "has a log that this controller knows"
        raise NotFound(f"{who} {has}; those with one: {names}. Only launched workers write one")
    return next((one for one in logged if one["rank"] == 0), logged[-1])
