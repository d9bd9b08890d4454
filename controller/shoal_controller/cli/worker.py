"""`shoal worker`: run a command as a worker of a job, and start it again when it is told to begin anew.

This process is the command's parent: it hands signals on, and ends with the command's status. Where another one starts
it again (a launcher), or nobody is to (`--restarts 0`), the command takes this process over.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Annotated

import typer
from shoal_protos.addresses import split_address
from shoal_protos.channel import GRPC_VARIABLES
from shoal_protos.errors import UserError
from shoal_protos.messages import START_AGAIN
from shoal_protos.path_part import NAME, NAME_EXPECTED
from shoal_protos.text import plural, shown

from shoal_controller.cli.endings import say

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""By these a worker is told to end: it is not started again after one."""
HANDED_ON = (*ENDS, signal.SIGUSR1, signal.SIGUSR2)
OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""A terminal sends these to the command by itself."""
SI_KERNEL = 0x80
"""Where a signal comes from, as Linux says: a terminal's comes from the kernel, any other from a process."""
PR_SET_PDEATHSIG = 1


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
    restarts: Annotated[
        str,
        typer.Option(
            "--restarts",
            metavar="N",
            help="How often the command is started again when its job begins anew (exit status 75).",
        ),
    ] = "3",
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
    if not (restarts.isascii() and restarts.isdecimal()):
        raise UserError(f"--restarts is {shown(restarts)}; expected a whole number from 0 on")
    program = shutil.which(command[0])
    if program is None:
        raise UserError(f"there is no program {command[0]!r} to run as a worker; expected a command after `--`")
    environment = GRPC_VARIABLES | os.environ | {"SHOAL_CONTROLLER": controller, "SHOAL_JOB": job}
    most = 0 if os.environ.get("SHOAL_LAUNCHER") else int(restarts)
    try:
        if os.getpid() != 1 and not most:
            os.execve(program, command, environment)
        return Parent(program, command, environment).run(most)
    except OSError as error:
        why = f"{error.strerror}; expected a program, or a script whose first line names one, such as #!/bin/sh"
        raise UserError(f"{program} cannot be run as a worker: {why}") from None


class Parent:
    """Of the command: a program, its arguments and its environment, the same each time that it is started.

    The kernel spares process 1 of a container the default action of signals: a program that is still importing when its
    pod is deleted would not even notice. So there a child is needed that is not process 1.
    """

    def __init__(self, program: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._program, self._command, self._environment = program, command, environment
        self._handed_on = {number for number in HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        """The signals that were blocked before, and are for the command."""
        self._told_to_end = False

    def run(self, restarts: int) -> int:
        """Run the command; returns its exit status, as a shell's, once it has ended and is not to be started again."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {*self._handed_on, signal.SIGCHLD})
        for restart in range(restarts + 1):
            status = self._run_once()
            if status != START_AGAIN or self._told_to_end or signal.sigpending() & set(ENDS):
                return status
            if restart < restarts:
                say(f"the job begins anew: the command is started again ({restart + 1} of --restarts {restarts})", 0)
        more = f" again, after {plural(restarts, 'restart')} (--restarts)" if restarts else " anew"
        return say(f"the command is to begin{more}: start it again by hand", START_AGAIN)

    def _run_once(self) -> int:
        """Hand signals on to the command until it ends; returns its exit status. Orphans are waited for too."""
        child = subprocess.Popen(
            self._command, executable=self._program, env=self._environment, close_fds=False,
            preexec_fn=partial(self._in_the_child, os.getpid()),
        )  # fmt: skip
        while True:
            came = signal.sigwaitinfo({*self._handed_on, signal.SIGCHLD})
            if came.si_signo != signal.SIGCHLD:
                self._told_to_end |= came.si_signo in ENDS
                if came.si_signo not in OF_A_TERMINAL or came.si_code != SI_KERNEL:
                    os.kill(child.pid, came.si_signo)
                continue
            ended = dict(_ended())
            if child.pid in ended:
                child.returncode = os.waitstatus_to_exitcode(ended[child.pid])
                return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _in_the_child(self, parent: int) -> None:
        """Before the command has this process: the kernel ends it when its parent is killed, and signals reach it."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)  # it was killed before
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _ended() -> Iterator[tuple[int, int]]:
    """The children that have ended and how, as `waitpid` tells."""
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        yield child, status


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
