"""Runs and jobs beside the one that `shoal run` begins.

With `--attach` a job goes to the controller of a living run, and is shown to its end. A run that was killed leaves an
unfinished job, which trains on beside the next run of its folder: `shoal run` names it when it begins. It ends with the
command, saved where it can be, for no controller would be left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal_protos.errors import ShoalError, UserError
from shoal_protos.living_runs import living_runs
from shoal_protos.rest import OVER, Json
from shoal_protos.text import at_step

from shoal_controller.cli.attend import end_watching, interrupted_before, report_end, saved
from shoal_controller.cli.client import local_folder
from shoal_controller.cli.display import display, watch
from shoal_controller.cli.endings import INTERRUPTED
from shoal_controller.cli.output import echo
from shoal_controller.cli.printed import Printed
from shoal_controller.cli.runs import of_run
from shoal_controller.cli.serve import Here, Interrupts, interrupts

BACK_SECONDS = 10.0
"""How long workers of an earlier run may take to find this controller, where the command ends before they have."""


async def other_jobs(here: Here, own: str) -> list[Json]:
    """Return the unfinished jobs besides the command's own whose workers this controller starts."""
    unfinished = [job for job in await here.client.jobs() if job["phase"] not in OVER and job["job"] != own]
    return [job for job in unfinished if here.server.shell.spec(job["job"]).launcher == "local"]


def trains_beside(job: Json) -> str:
    """Return the sentence with which the command begins."""
    return (
        f"job {job['job']} of an earlier run is unfinished {at_step(job['step'])} and goes on beside this one until "
        f"this command ends; to end it now: shoal cancel {job['job']}"
    )


async def leave(here: Here, own: str, signals: Interrupts) -> Sequence[str]:
    """Save the other jobs, up to a second Ctrl-C; return a sentence for each. `serving` ends their workers."""
    names = sorted(here.server.launcher.jobs - {own})
    saving = asyncio.gather(*(_left(here, name) for name in names))
    if names and await interrupted_before(saving, signals.second):
        saving.cancel()
        await asyncio.wait([saving])
        return [_ends(name, "not saved") for name in names]
    return await saving


async def _left(here: Here, name: str) -> str:
    """Save one; the sentence is empty where it is over by itself."""
    try:
        if (await here.client.job(name))["phase"] in OVER:
            return ""
        return _ends(name, await saved(here.client, name, BACK_SECONDS))
    except ShoalError as error:
        return _ends(name, f"not saved: {error}")


def _ends(name: str, outcome: str) -> str:
    todo = f"`shoal run --job {name} …` continues it"
    return f"job {name} of an earlier run ends unfinished with this command ({outcome.removesuffix('.')}); {todo}"


async def attached(spec: dict[str, Any], report_file: Path | None, quiet: bool) -> int:
    """Return the exit status of `run`. Ctrl-C does not end the job. Raises `UserError` if no run lives here."""
    runs = living_runs(local_folder())
    if not runs:
        raise UserError(f"no shoal run lives in {local_folder()} to attach to; leave --attach out to begin one")
    job = spec["job"]
    with interrupts() as signals:
        async with of_run(runs[0]) as client:
            await client.create(spec)
            with display() as shown:
                watching = asyncio.create_task(
                    watch(client, job, shown, printed=None if quiet else Printed({})), name=f"watch {job}"
                )
                try:
                    if await interrupted_before(watching, signals.first):
                        echo(f"job {job} goes on with the controller of {runs[0]}; to end it: shoal cancel {job}")
                        return INTERRUPTED
                finally:
                    await end_watching(watching)
            return await report_end(client, watching.result(), report_file)
