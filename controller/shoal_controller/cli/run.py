"""`shoal run`: a controller and the workers of one script, on this machine, until the job is over.

Run again in the same place it continues an unfinished job of that name and replaces a finished one. Beside a living run
it has its own state and ports (runs.py), or is submitted to the controller of that run (attend.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.all_at_once import Refusals
from shoal_protos.errors import NotFound, UserError
from shoal_protos.log_stream import LogStream
from shoal_protos.text import plural, printable

from shoal_controller.cli.faulty_flags import THE_COMMAND
from shoal_controller.cli.options import Adopt, Data, Grpc, Http, NoPage, OpenPage, ReportFile, Store
from shoal_controller.cli.page import check_flags, show_page

if TYPE_CHECKING:
    from shoal_controller.cli.client import Client
    from shoal_controller.cli.printed import Printed
    from shoal_controller.cli.serve import Here, Places

MODULE = "module"
"""Parameter of the flag `-m`."""


def checked(context: typer.Context, program: Path) -> Path:
    """Return the program unchanged. Raises `typer.BadParameter` if no worker can run it."""
    if context.params.get(MODULE):
        return program
    if program.suffix == ".ipynb":
        raise typer.BadParameter(
            f"{program} is a notebook, and workers run scripts; make one of it with `jupyter nbconvert --to script "
            f"{program}`, and run that"
        )
    if program.is_dir():
        raise typer.BadParameter(f"{program} is a folder; expected a script, or a module by -m")
    if not program.exists() and shutil.which(program) is None:
        raise typer.BadParameter(
            f"{program} is neither a file nor a program on the PATH; expected a Python script, a module by -m, or a "
            "command"
        )
    return program


def command_of(program: Path, is_module: bool, arguments: Sequence[str]) -> list[str]:
    """Return the whole command of a worker."""
    if is_module:
        return [sys.executable, "-m", str(program), *arguments]
    if not program.exists():
        return [shutil.which(program) or str(program), *arguments]
    path = str(program.resolve())
    is_python = program.suffix == ".py" or not os.access(program, os.X_OK)
    return [sys.executable, path, *arguments] if is_python else [path, *arguments]


def job_of(program: Path, is_module: bool, arguments: Sequence[str]) -> str:
    """Return the job's name: the module, or the stem of the command's first file, with allowed characters only."""
    files = (one for one in (program, *map(Path, arguments)) if one.is_file())
    name = str(program) if is_module else next(files, program).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:63] or "job"


Workers = typer.Option(
    "--workers", metavar="N", min=1, help="Number of workers. Default: CUDA devices, else 2.", show_default=False
)
MinWorkers = typer.Option(
    "--min-workers",
    metavar="N",
    min=1,
    help="Fewest workers to train with. Default: elasticity.min_gpus of the config, else 1.",
    show_default=False,
)
MaxWorkers = typer.Option(
    "--max-workers",
    metavar="N",
    min=1,
    help="Most workers to scale to. Default: elasticity.max_gpus of the config, else number of lanes.",
    show_default=False,
)
Spares = typer.Option(
    "--spares",
    metavar="N",
    min=0,
    help="Number of spares beyond the workers: they mirror state, and train as soon as a worker is lost. Default: 0.",
    show_default=False,
)
Name = typer.Option("--job", metavar="NAME", help="Name of the job. Default: name of the script.", show_default=False)
Attach = typer.Option(
    "--attach", help="Give the job to the controller of the run that lives in this folder, and show it here."
)
Quiet = typer.Option("--quiet", help="Do not show the output of rank 0; `shoal logs` has it.")
LogDir = typer.Option(
    "--log-dir",
    metavar="DIR",
    file_okay=False,
    help="Folder for the workers' logs. Default: DATA/jobs/JOB.",
    show_default=False,
)
Module = typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for `python -m`.")
Script = typer.Argument(
    metavar="SCRIPT", callback=checked, help="Python script, or any command: a program and its arguments.",
    show_default=False,
)  # fmt: skip
Arguments = typer.Argument(metavar="ARGS", help="Arguments of the script; they may follow `--`.", show_default=False)


async def run(
    script: Annotated[Path, Script],
    arguments: Annotated[list[str] | None, Arguments] = None,
    module: Annotated[bool, Module] = False,
    workers: Annotated[int | None, Workers] = None,
    min_workers: Annotated[int | None, MinWorkers] = None,
    max_workers: Annotated[int | None, MaxWorkers] = None,
    spares: Annotated[int | None, Spares] = None,
    job: Annotated[str | None, Name] = None,
    report: ReportFile = None,
    quiet: Annotated[bool, Quiet] = False,
    log_dir: Annotated[Path | None, LogDir] = None,
    http: Http = None,
    grpc: Grpc = None,
    store: Store = None,
    data: Data = None,
    no_page: NoPage = False,
    open_page: OpenPage = False,
    adopt: Adopt = False,
    attach: Annotated[bool, Attach] = False,
) -> int:
    """Train a script on this machine.

    SCRIPT is a Python script, with -m a module, or any other program: `shoal run -- bash train.sh`. Run it again in the
    same folder to continue an unfinished job of that name, or to replace a finished one. The first Ctrl-C saves a
    checkpoint if checkpoint.path is set, ends the job and reports; the second kills its workers.
    """
    check_machine()
    own_arguments = own(arguments or [])
    wanted = {"wanted": workers, "min": min_workers, "max": max_workers, "spares": spares}
    spec = {
        "job": job or job_of(script, module, own_arguments),
        "workers": {key: value for key, value in wanted.items() if value is not None},
        "launcher": "local",
        "command": command_of(script, module, own_arguments),
    }
    from shoal_controller.cli.attend import attached
    from shoal_controller.cli.printed import Printed, lengths
    from shoal_controller.cli.runs import beside
    from shoal_controller.cli.serve import Places
    from shoal_controller.process.descriptors import check_writable
    from shoal_controller.settings import data_folder

    places = Places(http, grpc, store, data, no_page=no_page, logs=log_dir, adopt=adopt)
    refusals = Refusals(THE_COMMAND)
    refusals.of(check_spec, spec)
    refusals.of(check_flags, no_page, open_page)
    refusals.of(places.check)
    refusals.raise_all()
    if report is not None:
        check_writable(report.parent, "the run report", "--json", is_private=False)
    if attach:
        return await attached(spec, report, quiet)
    places, name = beside(places, str(spec["job"]), job is not None)
    records = data_folder(places.data) / "jobs" / name
    logs = log_dir.resolve() / name if log_dir is not None else records
    check_writable(records, "what is known of the workers", "--data")
    check_writable(logs, "the workers' logs", "--log-dir")
    printed = None if quiet else Printed(lengths(logs))
    stray = goes_to_the_script(arguments or [])
    return await _trained(places, {**spec, "job": name}, stray, report, printed, open_page)


async def _trained(
    places: Places, spec: dict[str, Any], stray: str, report: Path | None, printed: Printed | None, open_page: bool
) -> int:
    """Train the job with a controller of its own; return the exit status. `stray`: a warning about misplaced flags."""
    import asyncio

    from shoal_controller.cli.attend import attend, leave_others, other_jobs, trains_beside
    from shoal_controller.cli.runs import announced, end_where_another_saves
    from shoal_controller.cli.serve import interrupts, serving
    from shoal_controller.settings import data_folder

    name = spec["job"]
    with interrupts() as signals:
        async with serving(places, own=True, signals=signals) as here:
            taken = ""  # of what it is refused it says how it ends, as of the other jobs
            try:
                show_page(here.server, places.data, open_page)
                with announced(data_folder(places.data), name, here.server.url) as run:
                    revision = await take_up(here, spec)
                    taken = name
                    kept = keeps_another(name, here.server.shell.spec(name).command, spec["command"])
                    tell(stray, kept, *map(trains_beside, await other_jobs(here, name)))
                    shared = asyncio.create_task(end_where_another_saves(here, run), name="where it saves")
                    try:
                        status = await attend(here, name, revision, signals, report, printed)
                    finally:
                        shared.cancel()
                        await asyncio.wait({shared})
                if not shared.cancelled() and (sentence := shared.result()):
                    raise UserError(sentence)
                return status
            finally:
                tell(*await leave_others(here, taken, signals))


def tell(*sentences: str) -> None:
    """Write what is not empty to standard error, a line each."""
    for sentence in filter(None, sentences):
        LogStream().write(printable(f"{sentence}\n"))


def check_machine() -> None:
    """Local workers need Linux and what a training process imports."""
    if sys.platform != "linux":
        raise UserError(f"workers run on Linux only, and this is {sys.platform}; run the script by itself instead")
    if importlib.util.find_spec("torch") is None:
        raise UserError("workers need torch, which is not installed: install shoal[worker]")


COPIED_SECONDS = 60.0
"""How long a job may take to end that was copied with its folder, and has no workers here."""

LOOK_SECONDS = 0.1
"""How often it is looked whether it has."""

FLAGS = {
    "job": "--job", "workers.wanted": "--workers", "workers.min": "--min-workers", "workers.max": "--max-workers",
    "workers.spares": "--spares",
}  # fmt: skip
"""What gives the keys of the job's specification."""


def check_spec(spec: Mapping[str, Any]) -> None:
    """Raises `UserError`, before a controller is started for it, that names all that is wrong by its flags."""
    from pydantic import ValidationError
    from shoal_protos.validation import every_sentence

    from shoal_controller.api.models import JobBody

    try:
        JobBody.model_validate(spec)
    except ValidationError as error:
        sentence = every_sentence(error.errors(), "the command", JobBody, spec)
        for key, flag in FLAGS.items():
            sentence = sentence.replace(f"`{key}`", flag)
        raise UserError(sentence) from None


def own(arguments: list[str]) -> list[str]:
    """The script's arguments without the `--` that may stand before them."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def goes_to_the_script(arguments: Sequence[str]) -> str:
    """That a flag of this command stands behind the script, one sentence; empty where none does, or `--` says so."""
    flags = [flag for flag in (argument.partition("=")[0] for argument in arguments) if flag in FLAGS.values()]
    if not flags or "--" in arguments:
        return ""
    return (
        f"{flags[0]} stands behind the script and is given to it; to give it to shoal run, put it before the script, "
        "and to say that it is the script's, put -- before it"
    )


def keeps_another(job: str, kept: Sequence[str], given: Sequence[str]) -> str:
    """That an unfinished job goes on with what it was created with, one sentence; empty where that was given."""
    if list(kept) == list(given):
        return ""
    return (
        f"job {job} keeps the command that it was created with, `{shlex.join(kept)}`, not `{shlex.join(given)}`. To "
        "run this one, end that job first (Ctrl-C), or name another with --job"
    )


async def end_copied(client: Client, job: str) -> None:
    """End a job whose workers are another controller's, in this store alone. Raises `UserError` where it has no end."""
    import asyncio

    from shoal_protos.rest import OVER

    from shoal_controller.cli.client import IsOver

    with suppress(IsOver):
        await client.stop(job)
    deadline = time.monotonic() + COPIED_SECONDS
    while time.monotonic() < deadline:
        if (await client.job(job))["phase"] in OVER:
            return
        await asyncio.sleep(LOOK_SECONDS)
    raise UserError(
        f"job {job}, which was copied with this folder, has not ended within {COPIED_SECONDS:g} s; start again, or "
        "name another job with --job"
    )


async def take_up(here: Here, spec: dict[str, Any]) -> int:
    """Create the job, replace a finished one of its name, or one whose workers another controller has, or go on with an
    unfinished one. Returns the revision of the last event of what was there before.
    """
    from shoal_protos.rest import OVER

    client = here.client
    try:
        known = await client.job(spec["job"])
    except NotFound:
        await client.create(spec)
        return 0
    kept = here.server.shell.spec(spec["job"])
    is_anothers = (kept.job, kept.run) in here.server.launcher.claim.others
    if is_anothers and known["phase"] not in OVER:
        tell(f"job {spec['job']} is begun anew: the one that is unfinished here was copied with the folder")
        await end_copied(client, spec["job"])
    revision = max((event["revision"] for event in await client.events(spec["job"])), default=0)
    if is_anothers or known["phase"] in OVER:
        await client.create(spec)
        return revision
    say = LogStream()  # training begins after this
    say.write(f"job {spec['job']} continues at step {known['step']}\n")
    before = known["workers"]
    new = {key: number for key, number in spec["workers"].items() if number != before[key]}
    if new:
        size = {"workers" if key == "wanted" else key: number for key, number in new.items()}
        await client.scale_job(spec["job"], **size)
    if "wanted" in new:
        say.write(f"job {spec['job']} is scaled from {before['wanted']} to {new['wanted']} workers\n")
    if {"min", "max"} & new.keys():
        least, most = (new.get(key, before[key]) for key in ("min", "max"))
        say.write(f"job {spec['job']} may have from {least} to {most or 'as many as its lanes'} workers\n")
    if "spares" in new:
        say.write(f"job {spec['job']} is to have {plural(new['spares'], 'spare')}, in place of {before['spares']}\n")
    return revision
