"""Unfinished jobs of earlier runs: a run that was killed leaves one, which trains on beside the next run of its folder.

`shoal run` names them when it begins. They end with it, saved where they can be, for no controller would be left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal_protos.errors import ShoalError
from shoal_protos.rest import OVER, Json
from shoal_protos.text import at_step

from shoal_controller.cli.attend import interrupted_before, saved
from shoal_controller.cli.serve import Here, Interrupts

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
