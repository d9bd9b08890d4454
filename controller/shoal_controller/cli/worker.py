"""`shoal worker`: become a worker of a job. The environment is set, then the command takes this process over."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Annotated

import typer
from shoal_protos.addresses import split_address
from shoal_protos.channel import GRPC_VARIABLES
from shoal_protos.errors import UserError
from shoal_protos.path_part import NAME, NAME_EXPECTED
from shoal_protos.quoting import shown

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def worker(
    controller: Annotated[
        str,
        typer.Option(
            "--controller", envvar="SHOAL_CONTROLLER", metavar="HOST:PORT", help="gRPC address of the controller."
        ),
    ],
    job: Annotated[str, typer.Option("--job", envvar="SHOAL_JOB", metavar="NAME", help="Name of the job to join.")],
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Command to run, after `--`.", show_default=False)
    ],
) -> int:
    """Run a command as a worker of a job."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)
    for address in controller.split(","):
        try:
            split_address(address.strip())
        except ValueError:
            raise UserError(f"--controller is {controller!r}; expected HOST:PORT, such as 10.0.0.7:7071") from None
    if not NAME.fullmatch(job):
        raise UserError(f"--job is {shown(job)}; expected the name of a job: {NAME_EXPECTED}")
    program = shutil.which(command[0])
    if program is None:
        raise UserError(f"there is no program {command[0]!r} to run as a worker; expected a command after `--`")
    environment = GRPC_VARIABLES | os.environ | {"SHOAL_CONTROLLER": controller, "SHOAL_JOB": job}
    if os.getpid() != 1:
        os.execve(program, command, environment)
    return as_first_process(program, command, environment)


def as_first_process(program: str, command: list[str], environment: Mapping[str, str]) -> int:
    """Run the command as a child, hand signals on to it, wait for orphans; returns its exit status as a shell's.

    The kernel spares process 1 of a container the default action of signals: a program that is still importing when its
    pod is deleted would not even notice.
    """
    child = os.posix_spawn(program, command, environment)

    def hand_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
