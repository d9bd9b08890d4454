"""`shoal demo`: run a job through failures and undisturbed, and compare the bits.

The acts are in demo_acts.py; the training script is the worker's
`python -m shoal.demo.byte_gpt`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.errors import JobFailed, NotFound, StoreError
from shoal_protos.text import at_step, number

from shoal_controller.cli.endings import DONE, FAILED
from shoal_controller.cli.options import Data, Grpc, Http, NoPage, OpenPage, Store
from shoal_controller.cli.page import check_flags, show_page

if TYPE_CHECKING:
    from rich.table import Table
    from shoal_protos.rest import Json

    from shoal_controller.cli.client import Client
    from shoal_controller.cli.serve import Here, Interrupts

DISTURBED, UNDISTURBED = "disturbed", "undisturbed"
STEPS = 120
"""Enough for two workers to start one after the other while a fast machine trains, 90 s at most on a slow one."""

Text = typer.Option(
    "--text", metavar="FILE", exists=True, dir_okay=False, show_default=False,
    help="Text to train on. Default: the sources of Python's standard library.",
)  # fmt: skip
Steps = typer.Option("--steps", metavar="N", min=1, help="Number of steps.")


async def demo(
    text: Annotated[Path | None, Text] = None,
    steps: Annotated[int, Steps] = STEPS,
    http: Http = None,
    grpc: Grpc = None,
    store: Store = None,
    data: Data = None,
    no_page: NoPage = False,
    open_page: OpenPage = False,
) -> int:
    """Run a job through failures and verify that the result is bit-identical.

    Three workers train a small language model. One is killed in the middle of a step, the job is scaled to four
    workers, one worker is drained, and the job is scaled back to three. Then the same job runs undisturbed on one
    worker, and both fingerprints are compared.
    """
    import tempfile

    from shoal_controller.cli.run import check_machine
    from shoal_controller.cli.serve import Places, interrupts, serving

    check_machine()
    check_flags(no_page, open_page)
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        store, data = store or f"embedded:{folder}", data or Path(folder)
        places = Places(http or "127.0.0.1:0", grpc or "127.0.0.1:0", store, data, no_page=no_page)
        with interrupts() as signals:
            async with serving(places, own=True, signals=signals) as here:
                show_page(here.server, data, open_page)
                reports = await until_interrupted(here, script(text, steps), signals)
    return conclude(*reports)


def script(text: Path | None, steps: int) -> list[str]:
    """The command that every worker runs."""
    own = [] if text is None else ["--text", str(text.resolve())]
    return [sys.executable, "-m", "shoal.demo.byte_gpt", "--steps", str(steps), *own]


async def until_interrupted(here: Here, command: list[str], signals: Interrupts) -> tuple[Json, Json]:
    """The reports of both jobs; Ctrl-C and any failure end what still runs."""
    import asyncio

    from shoal_controller.cli.attend import interrupted_before

    jobs = asyncio.create_task(both(here.client, command), name="demo")
    try:
        if await interrupted_before(jobs, signals.first):
            raise KeyboardInterrupt
        return await jobs
    finally:
        jobs.cancel()
        await asyncio.wait({jobs})
        for job in (DISTURBED, UNDISTURBED):
            await end(here, job)


async def end(here: Here, job: str) -> None:
    """End a job and its processes at once, where it is not over, whether that can be stored or not; those of one that
    is over end by themselves.
    """
    from shoal_controller.cli.client import IsOver

    with suppress(NotFound, IsOver):
        try:
            await here.client.stop(job)
        except StoreError:
            await here.give_up(job)
            raise
        await here.kill_workers(job)


async def both(client: Client, command: list[str]) -> tuple[Json, Json]:
    """The job that is acted upon, then the same one left alone in a world of one."""
    import asyncio

    from shoal_controller.cli.demo_acts import DisturbedJob, play
    from shoal_controller.cli.display import display, watch

    with display() as shown:
        await client.create(spec(DISTURBED, 3, command))
        watching = asyncio.create_task(watch(client, DISTURBED, shown), name="watch")
        try:
            await play(DisturbedJob(client, DISTURBED, shown.tell))
            succeeded(await watching)
        finally:
            watching.cancel()
        shown.tell("▶ run the same job undisturbed on one worker")
        await client.create(spec(UNDISTURBED, 1, command))
        succeeded(await watch(client, UNDISTURBED, shown))
    return await client.report(DISTURBED), await client.report(UNDISTURBED)


def spec(job: str, workers: int, command: list[str]) -> dict[str, Any]:
    return {"job": job, "workers": {"wanted": workers}, "launcher": "local", "command": command}


def succeeded(job: Json) -> None:
    if job["phase"] != "succeeded":
        raise JobFailed(f"job {job['job']} {job['phase']} {at_step(job['step'])}: {job['reason']}")


def conclude(disturbed: Json, undisturbed: Json) -> int:
    """Print the table and the verdict; the exit status of the demo."""
    from shoal_controller.cli.tables import resizes_table, show

    equal = bool(disturbed["fingerprint"]) and disturbed["fingerprint"] == undisturbed["fingerprint"]
    show("", "[bold]World changes[/]", resizes_table(disturbed["generations"]), "", runs(disturbed, undisturbed), "")
    if equal:
        show("[bold green]The same bits:[/] both runs ended with equal weights and optimizer state.")
        return DONE
    show("[bold red]Different bits:[/] the two runs did not end with equal weights and optimizer state.")
    return FAILED


def runs(disturbed: Json, undisturbed: Json) -> Table:
    """Both runs, a line each; the fingerprints below each other."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name, report in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        ended = f"step {report['steps']}, loss {number(report['final_loss'], 8)}"
        table.add_row(name, f"{ended}\n{report['fingerprint'] or 'no fingerprint'}")
    return table
