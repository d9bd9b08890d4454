"""The `shoal` command: the list of its commands.

A command is a function; small ones share a file by their noun (jobs, checkpoints). It returns its exit status (None: 0)
or raises a `ShoalError` whose sentence is all that the user reads (endings.py). What is heavy (rich, httpx, FastAPI,
gRPC) is imported inside the functions, so that `shoal --help` answers at once.
"""

from __future__ import annotations

import codecs
import errno
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from shoal_controller.cli import options
from shoal_controller.cli.backups import backup, restore
from shoal_controller.cli.checkpoints import checkpoint, checkpoints, export, import_, reshape, verify
from shoal_controller.cli.completion import job_names, worker_names
from shoal_controller.cli.controller import controller
from shoal_controller.cli.demo import demo
from shoal_controller.cli.doctor import doctor
from shoal_controller.cli.endings import FAILED, WRONG_USE, Command, ending, say
from shoal_controller.cli.estimate import estimate
from shoal_controller.cli.faulty_flags import AllFaults
from shoal_controller.cli.jobs import cancel, describe, drain, events, jobs, logs, lost, pause, resume, workers
from shoal_controller.cli.output import echo
from shoal_controller.cli.plot import plot
from shoal_controller.cli.run import run
from shoal_controller.cli.scale import scale
from shoal_controller.cli.submit import submit
from shoal_controller.cli.token import JobOrCommand, create, job_, list_, revoke, rotate
from shoal_controller.cli.top import top
from shoal_controller.cli.what_if import what_if
from shoal_controller.cli.worker import worker

COMMANDS: tuple[Command, ...] = (
    demo, run, controller, worker, submit, jobs, describe, scale, drain, lost, pause, resume, cancel, checkpoint,
    checkpoints, events, logs, plot, workers, top, verify, export, import_, reshape, estimate, backup, restore,
    doctor, what_if,
)  # fmt: skip

TOKEN_COMMANDS: tuple[Command, ...] = (job_, create, list_, rotate, revoke)
"""Commands of `shoal token`; what names none of them is the name of a job."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why the file that standard output goes to takes no more."""

HANDS_ON = (run, worker)
"""Commands that hand everything after their first argument to another program, flags included."""


def _ended(command: Command) -> Callable[..., None]:
    """The command as typer calls it."""

    @functools.wraps(command)
    def ended(**flags: Any) -> None:
        raise typer.Exit(ending(command, flags))

    return ended


app = typer.Typer(
    help="Elastic training for PyTorch: workers come and go, the result stays the same.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from shoal_protos.release import RELEASE

        echo(f"shoal {RELEASE}")
        raise typer.Exit


Version = typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")


@app.callback()
def shoal(version: Annotated[bool, Version] = False) -> None:
    """Elastic training for PyTorch: workers come and go, the result stays the same."""


options.JOB.autocompletion, options.WORKER.autocompletion = job_names, worker_names

for _command in COMMANDS:
    _settings = {"allow_interspersed_args": False} if _command in HANDS_ON else {}
    app.command(_command.__name__.rstrip("_").replace("_", "-"), cls=AllFaults, context_settings=_settings)(
        _ended(_command)
    )

tokens = typer.Typer(
    cls=JobOrCommand, no_args_is_help=True, help="Tokens. `shoal token JOB` prints that of a job's workers."
)
for _command in TOKEN_COMMANDS:
    tokens.command(_command.__name__.rstrip("_"), cls=AllFaults)(_ended(_command))
app.add_typer(tokens, name="token")


def main() -> None:
    """All that the console script does."""
    if sys.platform == "win32":
        raise SystemExit(say("Shoal runs on Linux, and on macOS without a controller, but not on Windows.", WRONG_USE))
    if sys.stdout is None:  # it was closed
        sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8")
    _print_all_characters()
    try:
        app()
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what Python writes as it ends
        raise SystemExit(say(f"the output cannot be written: {error.strerror}", FAILED)) from None


def _print_all_characters() -> None:
    """Tables have characters that a locale's encoding may lack: those become `?`. ASCII, which says no more than that
    no locale is set, is taken for UTF-8, as typer does for what it prints itself.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_ascii = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if is_ascii else None, errors="replace")
