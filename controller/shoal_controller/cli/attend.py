"""Staying with a job of this machine to its end: show it, end it on Ctrl-C, report it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from shoal_controller.cli.client import Json
from shoal_controller.cli.display import display, watch
from shoal_controller.cli.endings import DONE, FAILED, INTERRUPTED
from shoal_controller.cli.serve import Here, Interrupts
from shoal_controller.cli.tables import number, resizes_table, show


async def attend(here: Here, job: str, revision: int, heard: Interrupts, report_file: Path | None) -> int:
    """Until the job is over, or was killed by a second Ctrl-C. The exit status of `run`.

    What happened up to `revision` is not shown.
    """
    client = here.client
    with display() as shown:
        watching = asyncio.create_task(watch(client, job, shown, revision), name=f"watch {job}")
        try:
            if await interrupted_before(watching, heard.first):
                shown.tell("interrupted: the job is being ended; a second Ctrl-C kills its workers")
                await client.stop(job)
                if await interrupted_before(watching, heard.second):
                    await here.kill_workers(job)
            else:
                await watching
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    ended, report = await client.job(job), await client.report(job)
    if report_file is not None:
        write(report_file, report)
    summarize(ended, report)
    if heard.first.is_set():
        return INTERRUPTED
    return DONE if ended["phase"] == "succeeded" else FAILED


async def interrupted_before(watching: asyncio.Task[Any], signalled: asyncio.Event) -> bool:
    """Whether the signal came before the job was over."""
    waiting = asyncio.create_task(signalled.wait(), name="wait for a signal")
    await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    return not watching.done()


def write(file: Path, report: Json) -> None:
    """The whole report or none."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as new:
        json.dump(report, new, indent=2)
        new.write("\n")
    Path(new.name).replace(file)


def summarize(ended: Json, report: Json) -> None:
    """How it went, on standard output."""
    show(resizes_table(report["generations"]))
    typer.echo(
        f"{ended['job']} {ended['phase']} at step {ended['step']}, loss {number(ended['loss'])}: {ended['reason']}"
    )
    if report["fingerprint"]:
        typer.echo(f"fingerprint {report['fingerprint']}")
