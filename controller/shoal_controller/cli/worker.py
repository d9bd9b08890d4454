"""`shoal worker`: run a command as a worker of a job, or as several, and start it again when it is told to begin anew.

This process is the command's parent: it hands signals on, and ends with the command's status. Where another one starts
it again (a launcher), or nobody is to (`--restarts 0`), a single command takes this process over. Several processes
(`--processes`) each see one of the host's devices, and one that ends ends alone.
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
from shoal_protos.shape import MOST_PROCESSES
from shoal_protos.text import plural, shown

from shoal_controller.cli.endings import say
from shoal_controller.process.devices import VISIBLE_DEVICES, cuda_devices

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""By these a worker is told to end: it is not started again after one."""
HANDED_ON = (*ENDS, signal.SIGUSR1, signal.SIGUSR2)
OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""A terminal sends these to the command by itself."""
SI_KERNEL = 0x80
"""Where a signal comes from, as Linux says: a terminal's comes from the kernel, any other from a process."""
PR_SET_PDEATHSIG = 1
OF_EACH = ("SHOAL_WORKER_ID", "SHOAL_COORDINATE")
"""Variables in which a launcher of several processes gives a value for each, separated by commas."""


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
    processes: Annotated[
        str,
        typer.Option(
            "--processes",
            metavar="N",
            help="How many processes to run: each is a worker, and sees one of this machine's devices.",
        ),
    ] = "1",
) -> int:
    """Run a command as a worker of a job, or as several.

    With --processes the exit status is that of the first process that failed, once all have ended.
    """
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
    if not (processes.isascii() and processes.isdecimal() and 1 <= int(processes[:5]) <= MOST_PROCESSES):
        raise UserError(f"--processes is {shown(processes)}; expected a whole number from 1 to {MOST_PROCESSES}")
    program = shutil.which(command[0])
    if program is None:
        raise UserError(f"there is no program {command[0]!r} to run as a worker; expected a command after `--`")
    environment = GRPC_VARIABLES | os.environ | {"SHOAL_CONTROLLER": controller, "SHOAL_JOB": job}
    most = 0 if os.environ.get("SHOAL_LAUNCHER") else int(restarts)
    environments = _environments(environment, int(processes)) if int(processes) > 1 else [environment]
    try:
        if os.getpid() != 1 and not most and len(environments) == 1:
            os.execve(program, command, environment)
        return Parent(program, command, environments).run(most)
    except OSError as error:
        why = f"{error.strerror}; expected a program, or a script whose first line names one, such as #!/bin/sh"
        raise UserError(f"{program} cannot be run as a worker: {why}") from None


def _environments(common: Mapping[str, str], processes: int) -> Sequence[Mapping[str, str]]:
    """Of each process: its device where there are some, and its own of what a launcher says of each. Raises
    `UserError`.
    """
    devices = cuda_devices(common.get(VISIBLE_DEVICES))
    given = {name: common[name].split(",") for name in OF_EACH if common.get(name)}
    for name, values in given.items():
        if len(values) != processes:
            raise UserError(
                f"{name} is {shown(common[name])}; expected {processes} values, separated by commas, for --processes "
                f"{processes}, or leave it out"
            )
    found = []
    for place in range(processes):
        device = {VISIBLE_DEVICES: devices[place % len(devices)]} if devices else {}
        found.append({**common, **device, **{name: values[place] for name, values in given.items()}})
    return found


class Parent:
    """Of the command's processes: a program, its arguments and an environment each, the same each time that one is
    started.

    The kernel spares process 1 of a container the default action of signals: a program that is still importing when its
    pod is deleted would not even notice. So there a child is needed that is not process 1.
    """

    def __init__(self, program: str, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._program, self._command, self._environments = program, command, environments
        self._handed_on = {number for number in HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        """The signals that were blocked before, and are for the command."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Those that have not ended, by their place among the processes."""
        self._told_to_end = False

    def run(self, restarts: int) -> int:
        """Run the processes; returns the exit status, as a shell's, once all have ended and none is to be started
        again.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {*self._handed_on, signal.SIGCHLD})
        several, restarted = len(self._environments) > 1, [0] * len(self._environments)
        for place in range(len(restarted)):
            self._start(place)
        statuses: list[int] = []
        while self._children:
            for place, status in self._wait():
                whose = f" of process {place + 1}" if several else ""
                ends = status != START_AGAIN or self._told_to_end or bool(signal.sigpending() & set(ENDS))
                if not ends and restarted[place] < restarts:
                    restarted[place] += 1
                    count = f"({restarted[place]} of --restarts {restarts})"
                    say(f"the job begins anew: the command{whose} is started again {count}", 0)
                    self._start(place)
                    continue
                statuses.append(status)
                if not ends:
                    more = f" again, after {plural(restarts, 'restart')} (--restarts)" if restarts else " anew"
                    say(f"the command{whose} is to begin{more}: start it again by hand", START_AGAIN)
                elif several and self._children:
                    left = f"{len(self._children)} of {len(restarted)} go on"
                    say(f"process {place + 1} has ended with status {status}; {left}", 0)
        return _worst(statuses)

    def _start(self, place: int) -> None:
        self._children[place] = subprocess.Popen(
            self._command, executable=self._program, env=self._environments[place], close_fds=False,
            preexec_fn=partial(self._in_the_child, os.getpid()),
        )  # fmt: skip

    def _wait(self) -> list[tuple[int, int]]:
        """Hand signals on until processes end: their places and exit statuses. Orphans are waited for too."""
        while True:
            came = signal.sigwaitinfo({*self._handed_on, signal.SIGCHLD})
            if came.si_signo != signal.SIGCHLD:
                self._told_to_end |= came.si_signo in ENDS
                if came.si_signo not in OF_A_TERMINAL or came.si_code != SI_KERNEL:
                    for child in self._children.values():
                        os.kill(child.pid, came.si_signo)
                continue
            ended, found = dict(_ended()), []
            for place, child in list(self._children.items()):
                if child.pid in ended:
                    del self._children[place]
                    child.returncode = os.waitstatus_to_exitcode(ended[child.pid])
                    found.append((place, child.returncode if child.returncode >= 0 else 128 - child.returncode))
            if found:
                return found

    def _in_the_child(self, parent: int) -> None:
        """Before the command has this process: the kernel ends it when its parent is killed, and signals reach it."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)  # it was killed before
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _worst(statuses: Sequence[int]) -> int:
    """That of the first process that failed; else the one by which a launcher starts it again; else 0."""
    failed = (status for status in statuses if status not in (0, START_AGAIN))
    return next(failed, START_AGAIN if START_AGAIN in statuses else 0)


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
