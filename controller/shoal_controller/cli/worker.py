"""`shoal worker`: become a worker of a job. The environment is set, then the command takes this process over."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer
from shoal_protos.channel import FORK_SAFE
from shoal_protos.errors import UserError


def worker(
    controller: Annotated[
        str,
        typer.Option(
            "--controller", envvar="SHOAL_CONTROLLER", metavar="HOST:PORT", help="The controller's gRPC address."
        ),
    ],
    job: Annotated[str, typer.Option("--job", envvar="SHOAL_JOB", metavar="NAME", help="The job to join.")],
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND…", help="What to run, after `--`.", show_default=False)
    ],
) -> None:
    """Run a command as a worker of a job."""
    host, _, port = controller.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--controller is {controller!r}; expected HOST:PORT, such as 10.0.0.7:7071")
    program = shutil.which(command[0])
    if program is None:
        raise UserError(f"there is no program {command[0]!r} to run as a worker; expected a command after `--`")
    os.execve(program, command, FORK_SAFE | os.environ | {"SHOAL_CONTROLLER": controller, "SHOAL_JOB": job})
