"""Staying with a job of this machine to its end: show it, end it on Ctrl-C, report it.

Whoever asks for its end gets it: where the store does not take it, the workers are killed, and none is left to train
without a controller.

With `--attach` a job goes to the controller of a living run, and is shown to its end. A run that was killed leaves an
unfinished job, which trains on beside the next run of its folder: `shoal run` names it when it begins. It ends with the
command, saved where it can be, for no controller would be left.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal_protos.errors import Conflict, ShoalError, UserError
from shoal_protos.living_runs import living_runs
from shoal_protos.rest import OVER, Json
from shoal_protos.text import at_step, number

from shoal_controller.cli.client import Client, IsOver, NotTraining, local_folder
from shoal_controller.cli.display import POLL_SECONDS, Display, display, watch
from shoal_controller.cli.endings import DONE, FAILED, INTERRUPTED, Interrupted
from shoal_controller.cli.output import echo
from shoal_controller.cli.printed import Printed
from shoal_controller.cli.runs import of_run
from shoal_controller.cli.serve import Here, Interrupts, interrupts
from shoal_controller.cli.tables import resizes_table, show
from shoal_controller.core.machine.event_kind import EventKind

MADE_BESIDE = re.compile(r"-[0-9]+$")
"""End of a job name that was derived because another run had a job of the script's name."""
KILLED_SECONDS = 5.0
"""How long a job may take to learn that its workers were killed, and to be over."""

SAVE_SECONDS = 60.0
"""How long the checkpoint of an interrupted job may take; it ends without it then."""

BACK_SECONDS = 10.0
"""How long workers of an earlier run may take to find this controller, where the command ends before they have."""


async def attend(
    here: Here, job: str, revision: int, signals: Interrupts, report_file: Path | None, printed: Printed | None
) -> int:
    """Until the job is over, or was killed by a second Ctrl-C. The exit status of `run`.

    What happened up to `revision` is not shown; `printed`: the lines that are.
    """
    client = here.client
    with display() as shown:
        watching = asyncio.create_task(watch(client, job, shown, revision, printed), name=f"watch {job}")
        try:
            if await interrupted_before(watching, signals.first):
                shown.tell("interrupted: the job is being ended; a second Ctrl-C kills its workers")
                await leave(here, job, watching, signals, shown)
            else:
                await watching
        finally:
            await end_watching(watching)
    ended = await client.job(job)
    status = await report_end(client, ended, report_file)
    if signals.first.is_set():
        echo(how_to_go_on(ended))
        return INTERRUPTED
    return status


async def report_end(client: Client, ended: Json, report_file: Path | None) -> int:
    """Print the summary of a job that is over, and write its report; return the exit status of `run`."""
    report = await client.report(ended["job"])
    summarize(ended, report)
    if report_file is not None:
        write(report_file, report)
    return DONE if ended["phase"] == "succeeded" else FAILED


async def leave(here: Here, job: str, watching: asyncio.Task[Any], signals: Interrupts, shown: Display) -> None:
    """End the job. Raises `Interrupted` where that cannot be stored: its workers are killed all the same."""
    try:
        await _end_job(here, job, watching, signals, shown)
    except ShoalError as error:
        await here.give_up(job)
        raise Interrupted(
            f"the workers of job {job} were killed, because its end could not be stored; once it can be, the same "
            f"command continues the job from its last checkpoint, or from step 0: {error}"
        ) from error


async def _end_job(here: Here, job: str, watching: asyncio.Task[Any], signals: Interrupts, shown: Display) -> None:
    """Save where there is somewhere to, then end the job; at the second signal kill its workers."""
    saving = asyncio.create_task(saved(here.client, job), name=f"save {job}")
    try:
        killed = await interrupted_before(saving, signals.second)
    finally:
        saving.cancel()
        await asyncio.wait({saving})
    if not saving.cancelled():
        shown.tell(saving.result())
    with suppress(IsOver):
        await here.client.stop(job)
    if killed or await interrupted_before(watching, signals.second):
        await here.kill_workers(job)
        await asyncio.wait({watching}, timeout=KILLED_SECONDS)
    else:
        await watching


async def end_watching(watching: asyncio.Task[Any]) -> None:
    """Whoever waited for it has what it raised."""
    watching.cancel()
    await asyncio.wait({watching})
    if not watching.cancelled():
        watching.exception()


async def saved(client: Client, job: str, patience_seconds: float = 0.0) -> str:
    """Ask for a checkpoint and wait for it. What came of it. `patience_seconds`: within which its workers may come."""
    revision = max((event["revision"] for event in await client.events(job)), default=0)
    try:
        asked = await _asked(client, job, time.monotonic() + patience_seconds)
    except Conflict as error:
        return f"nothing is saved now: {error}"
    deadline = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < deadline:
        view = await client.job(job)
        if view["last_checkpoint_step"] is not None and view["last_checkpoint_step"] >= asked["step"]:
            return f"saved at step {view['last_checkpoint_step']}"
        for event in await client.events(job, after=revision):
            if event["kind"] == EventKind.CHECKPOINT_FAILED and event["data"]["step"] >= asked["step"]:
                return str(event["message"])
        if view["phase"] in OVER:
            return f"not saved: the job is {view['phase']}"
        await asyncio.sleep(POLL_SECONDS)
    return f"not saved within {SAVE_SECONDS:g} s"


async def _asked(client: Client, job: str, until: float) -> Json:
    """Raises `Conflict` where nothing can be saved, also not until then."""
    while True:
        try:
            return await client.save_checkpoint(job)
        except NotTraining:
            if time.monotonic() >= until or (await client.job(job))["phase"] in OVER:
                raise
            await asyncio.sleep(POLL_SECONDS)


async def interrupted_before(watching: asyncio.Future[Any], signalled: asyncio.Event) -> bool:
    """Whether the signal came before the work, as a rule the watch of a job, was over."""
    waiting = asyncio.create_task(signalled.wait(), name="wait for a signal")
    await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    return not watching.done()


def how_to_go_on(ended: Json) -> str:
    """What the same command would do now."""
    first, *others = sys.argv[1:]
    is_named = any(one.startswith("--job") for one in others) or not MADE_BESIDE.search(ended["job"])
    command = shlex.join(["shoal", first, *([] if is_named else ["--job", ended["job"]]), *others])
    if ended["last_checkpoint_step"] is None:
        return f"nothing was saved; to start again from step 0: {command}"
    return f"saved at step {ended['last_checkpoint_step']}; to continue from there: {command}"


def write(file: Path, report: Json) -> None:
    """The whole report or none. Raises `UserError`."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        draft.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise UserError(f"the run report cannot be written to {file}: {error.strerror}") from error


def summarize(ended: Json, report: Json) -> None:
    """How it went, on standard output."""
    show(resizes_table(report["generations"]))
    echo(f"{ended['job']} {ended['phase']} {at_step(ended['step'])}, loss {number(ended['loss'])}: {ended['reason']}")
    if report["fingerprint"]:
        echo(f"fingerprint {report['fingerprint']}")


# ---- other runs and jobs


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


async def leave_others(here: Here, own: str, signals: Interrupts) -> Sequence[str]:
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
