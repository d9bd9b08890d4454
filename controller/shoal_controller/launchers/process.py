"""A process of this machine that is watched by a pidfd, and a warm one from which others are forked.

The pidfd and the start time tell the process from a later one with the same pid. `local.py` starts, watches and ends
processes; after a restart it finds them by their records (`process_records.py`). Linux only. `Process` knows nothing of
workers and jobs.

What imports torch can be forked from a process that has imported it (`WarmProcess`); it is then as one that was
started: a child of this process, which alone waits for it. What that means inside it is `shoal.process.warm`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import structlog

from shoal_controller.process.private_files import for_this_user

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


log = structlog.get_logger("shoal.launcher")


def start_time(pid: int) -> float | None:
    """Seconds from boot to the start of whoever has this pid now; None where nobody has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19]) / _TICKS_PER_SECOND


class Process:
    """One process, leader of its own session and group. `descriptor` becomes readable when it has ended."""

    def __init__(self, pid: int, started_at: float, descriptor: int) -> None:
        self.pid = pid
        self.started_at = started_at
        self.descriptor = descriptor

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """A new one, with a session of its own; both outputs are added to the log. Raises `OSError`."""
        with open(log, "ab", opener=for_this_user) as output:
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        child.returncode = 0  # it outlives this object, and is waited for by its pidfd
        return cls.of_child(child.pid)

    @classmethod
    def of_child(cls, pid: int) -> Process:
        """A child of this process that leads a session and has not been waited for. Raises `OSError`."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        started_at = start_time(pid)
        assert started_at is not None, "a child that nobody has waited for keeps its pid"
        return cls(pid, started_at, descriptor)

    @classmethod
    def find(cls, pid: int, started_at: float) -> Process | None:
        """The very process with this pid and start time, None where it has ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if start_time(pid) != started_at or _has_ended(descriptor):
            os.close(descriptor)
            return None
        return cls(pid, started_at, descriptor)

    @classmethod
    def writing_to(cls, log: Path) -> Process | None:
        """The leader of a session whose output goes to this log, None where there is none."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and _writes_to(folder, log):
                pid = int(folder.name)
                started_at = start_time(pid)
                if started_at is not None:
                    return cls.find(pid, started_at)
        return None

    def variable(self, name: str) -> str:
        """This variable of the environment that it was started with; empty where it has none, or that is not known."""
        try:
            variables = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return ""
        before = f"{name}=".encode()
        found = next((one for one in variables if one.startswith(before)), before)
        return os.fsdecode(found.removeprefix(before))

    def output(self) -> Path:
        """Where it writes to; the name of no file where that was deleted, is none, or is not known."""
        try:
            return Path(f"/proc/{self.pid}/fd/1").readlink()
        except OSError:
            return Path(f"unknown:[{self.pid}]")

    def kill(self) -> None:
        """SIGKILL to it and to all that it started and left in its group."""
        if start_time(self.pid) == self.started_at:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Clean up after it has ended: end what it left in its group, gives its status (negative: the signal).

        None where the status is not known, because an earlier controller was its parent.
        """
        self.kill()
        try:
            found = os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED)
        except ChildProcessError:
            return None
        finally:
            self.release()
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def release(self) -> None:
        """Watch it no longer."""
        os.close(self.descriptor)


WARM = "SHOAL_WARM"
WARM_CODE = (
    "import ctypes,sys;ctypes.CDLL(None).prctl(1,9);"  # killed as its parent ends, also while it imports
    "sys.path[:not sys.flags.safe_path]=[];from shoal.process.warm import main;main()#"
)
ROOM_BYTES = 4096
"""By so much a worker's environment may be longer than the one with which its warm process was started."""
FORK_SECONDS = 5.0
"""How long a fork may take: longer, and the warm process is ended."""
PR_SET_CHILD_SUBREAPER = 36
"""From Linux's prctl.h."""

_taking_in = threading.Lock()
"""Held while this process takes in orphans."""


class WarmProcess:
    """A process that has imported torch and Shoal, from which workers of one command are forked in the place of being
    started. It has no state: it is killed where it is not wanted any more, and ends with this process.
    """

    def __init__(self, command: Sequence[str], constant: Mapping[str, str], own: Mapping[str, str]) -> None:
        """Start it. `constant`: the environment of all workers; `own`: what each has of its own. Raises `OSError`."""
        self.command, self.constant = tuple(command), dict(constant)
        shown = len("\0".join(command).encode(errors="surrogateescape"))  # in its place by a fork
        code = f"exec(__import__('os').environ['{WARM}'])".ljust(shown - len(command[0]) - len("\0-c\0"), "#")
        environment = {**constant, **own, WARM: WARM_CODE.ljust(ROOM_BYTES, "-")}
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        output = os.memfd_create("warm")
        try:
            with theirs:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    [command[0], "-c", code], env=environment, stdin=theirs.fileno(), stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(output)
        self._is_ready = False
        self.refuses = False
        """It has said that what would be forked from it is another process than that which would be started."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def look(self) -> bool:
        """Return whether it has imported what it is to import. It stays so when it ends."""
        with contextlib.suppress(OSError):
            self._is_ready = self._is_ready or bool(self._socket.recv(1 << 6))
        return self._is_ready

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, own: Mapping[str, str], log: Path) -> Process:
        """A new process, as `Process.start` has it. Raises `OSError` where there is none; then this one has ended."""
        mine, theirs = socket.socketpair()
        try:
            with mine, theirs, open(log, "ab", opener=for_this_user) as output, mine.makefile("rb") as words:
                mine.settimeout(FORK_SECONDS)
                with _takes_in_orphans():
                    socket.send_fds(self._socket, [b"?"], [output.fileno(), theirs.fileno()])
                    theirs.close()
                    process = Process.of_child(_answered(words)["pid"])
                try:
                    wanted = {"command": self.command, "environment": {**self.constant, **own}}
                    mine.sendall(json.dumps(wanted).encode() + b"\n")
                    _answered(words)
                except OSError:
                    process.kill()
                    process.end()
                    raise
        except OSError as error:
            self.refuses = isinstance(error, _Unfit)
            self.end()
            raise
        return process

    def end(self) -> None:
        """Kill it; what was forked from it goes on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class WarmProcesses:
    """A launcher's, one for a job."""

    def __init__(self) -> None:
        self.of: dict[str, WarmProcess] = {}

    @property
    def pids(self) -> set[int]:
        return {one.pid for one in self.of.values()}

    def keep(self, job: str, command: Sequence[str], constant: Mapping[str, str], own: Mapping[str, str]) -> None:
        """Start the job's, where it has none, or another command's. It is not made anew where it has ended before it
        was ready (this Python cannot import Shoal, say), or refuses.
        """
        if found := self.of.get(job):
            is_fit = (found.command, found.constant) == (tuple(command), constant)
            if is_fit and (found.refuses or not (found.has_ended and found.look())):
                return
            self.end(job)
        try:
            self.of[job] = WarmProcess(command, constant, own)
        except (OSError, ValueError) as error:
            log.warning("no warm process could be started", job=job, error=str(error))
            return
        log.info("a warm process is started", job=job, pid=self.of[job].pid)

    def fork(self, job: str, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Process | None:
        """A process from the job's; None: there is none that is ready and fit."""
        warm = self.of.get(job)
        if warm is None or warm.refuses or warm.command != tuple(command) or not warm.look():
            return None
        own = {name: value for name, value in environment.items() if name not in warm.constant}
        if {**warm.constant, **own} != environment:
            return None
        try:
            process = warm.fork(own, output)
        except OSError as error:
            log.warning("a worker is started, not forked", job=job, why=str(error))
            return None
        log.info("a worker is forked", job=job, pid=process.pid, warm=warm.pid)
        return process

    def end(self, *jobs: str) -> None:
        """End those of these jobs."""
        for job in jobs:
            if (found := self.of.pop(job, None)) is not None:
                found.end()


class _Unfit(OSError):
    """A warm process, or its fork, says why it is not as one that is started."""


def _answered(words: IO[bytes]) -> dict[str, Any]:
    """What a warm process, or its fork, says next. Raises `OSError` where it refuses, or has ended."""
    line = words.readline()
    if not line:
        raise ConnectionResetError("the warm process has ended")
    answer: dict[str, Any] = json.loads(line)
    if why := answer.get("unfit"):
        raise _Unfit(why)
    return answer


@contextlib.contextmanager
def _takes_in_orphans() -> Iterator[None]:
    """A context in which processes whose parent ends become this one's children, as a fork's fork does."""
    prctl = ctypes.CDLL(None).prctl
    with _taking_in:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def can_be_warm(command: Sequence[str]) -> bool:
    """Whether it runs a Python script or module without options of Python's own."""
    of_python = len(command) > 1 and Path(command[0]).name.startswith("python")
    return of_python and (command[1].endswith(".py") or (command[1] == "-m" and len(command) > 2))


def reap_orphans(own: Collection[int]) -> None:
    """Wait for children that have ended and are not `own`: what a killed worker had started, such as its data loaders,
    falls to process 1 of a container, and to this one while it takes in orphans, and stays a zombie until that waits.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end meanwhile, and a kernel lack this file
            for pid in map(int, (task / "children").read_text().split()):
                if pid not in own and (os.getpid() == 1 or os.getsid(pid) not in (pid, os.getsid(0))):
                    os.waitpid(pid, os.WNOHANG)


def _writes_to(folder: Path, log: Path) -> bool:
    """Of a process that may be gone before it is looked at, or be another user's."""
    try:
        leads = os.getsid(int(folder.name)) == int(folder.name)
        return leads and (folder / "fd" / "1").readlink() == log
    except OSError:
        return False


def _has_ended(descriptor: int) -> bool:
    """Whether a process has ended, also where nobody has waited for it: an orphan in a container may stay a zombie for
    ever.
    """
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(0))
