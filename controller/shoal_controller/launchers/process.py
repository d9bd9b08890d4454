"""A process that is watched by a pidfd, so that a pid that was given to another process never deceives.

`local.py` starts them, watches and ends them; after a restart of the controller it finds them again by pid and start
time. Linux only. Knows nothing of workers and jobs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from shoal_controller.private_files import for_this_user

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


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
        try:
            descriptor = os.pidfd_open(child.pid)
        except OSError:
            os.killpg(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            raise
        started_at = start_time(child.pid)
        assert started_at is not None, "a child that nobody has waited for keeps its pid"
        return cls(child.pid, started_at, descriptor)

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


def reap_orphans(own: Collection[int]) -> None:
    """Wait for children that have ended and are not `own`: what a killed worker had started, such as its data loaders,
    falls to process 1 of a container, and stays a zombie until that does.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end meanwhile, and a kernel lack this file
            for pid in map(int, (task / "children").read_text().split()):
                if pid not in own:
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
