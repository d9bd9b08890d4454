"""`shoal logs`: what a worker has printed. Logs are files on the machine where a launcher has started the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from shoal_protos.errors import NotFound
from shoal_protos.text import shown_name

from shoal_controller.cli.completion import worker_names
from shoal_controller.cli.options import DEFAULT_URL, Job, Url
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal_protos.rest import Json

    from shoal_controller.cli.printed import Tail

LOOK_SECONDS = 0.25

Worker = typer.Argument(
    metavar="WORKER",
    help="Id of the worker. Default: rank 0 or the last.",
    show_default=False,
    autocompletion=worker_names,
)


async def logs(
    job: Job,
    worker: Annotated[str | None, Worker] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new output.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Print a worker's log."""
    import asyncio

    from shoal_protos.rest import OVER

    from shoal_controller.cli.runs import client_of

    async with client_of(url, job) as client:
        tail = log_of(choose(await client.workers(job), worker, job))
        while True:
            over = not follow or (await client.job(job))["phase"] in OVER
            for line in tail.take_lines():
                echo(line)
            if over:
                break
            await asyncio.sleep(LOOK_SECONDS)
        for line in tail.take_rest():
            echo(line)


def log_of(worker: Json) -> Tail:
    """Raises `NotFound` where it is not on this machine."""
    from pathlib import Path

    from shoal_controller.cli.printed import Tail

    path = Path(worker["log"])
    if not path.exists():
        raise NotFound(f"the log of {worker['worker']} is {path} on {worker['host'] or 'its host'}, not here")
    return Tail(path)


def choose(workers: Sequence[Json], worker: str | None, job: str) -> Json:
    """The worker that is meant; raises `NotFound` where there is none with a log."""
    logged = [one for one in workers if one["log"]]
    if worker is not None:
        logged = [one for one in logged if one["worker"] == worker]
    if not logged:
        names = ", ".join(one["worker"] for one in workers if one["log"]) or "none"
        who = f"worker {shown_name(worker)} of job {job}" if worker is not None else f"no worker of job {job}"
        has = "has no log that this controller knows" if worker is not None else "has a log that this controller knows"
        raise NotFound(f"{who} {has}; those with one: {names}. Only launched workers write one")
    return next((one for one in logged if one["rank"] == 0), logged[-1])
