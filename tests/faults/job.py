"""A real job on hosts of its own, for faults: the controller, a worker on each host, and what can be done to them.

Nothing here decides when a fault strikes; `run.py` does. A worker that has ended is started again on its host, as a
cluster would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
from faults.hosts import Hosts, Loopback

SCRIPT = Path(__file__).with_name("train.py")
STRANGER = Path(__file__).with_name("stranger.py")
LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
SHOAL = str(Path(sys.executable).with_name("shoal"))
TOKEN = "faults"
HTTP, GRPC = 7070, 7071
DISK_BYTES = 6 << 20
NAME = "job"
PAUSE = threading.Event()
"""Never set: what other processes do can only be looked at again."""


class Job:
    """`steps` of training on `workers` hosts, at `pace` seconds a micro-batch, in a stage of ZeRO. `spec`: more of the
    job's.
    """

    def __init__(
        self, hosts: Hosts | Loopback, workers: int, steps: int, pace: float, stage: int = 0, **spec: float
    ) -> None:
        self.hosts, self.workers, self.steps, self._spec = hosts, workers, steps, spec
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.disk = self.folder / "disk"
        self._env = {
            **os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps), "PACE": str(pace), "STAGE": str(stage),
            "SHOAL_TOKEN": TOKEN, "CHECKPOINTS": str(self.disk / "checkpoints"), "SHOAL_LOG_LEVEL": "info",
        }  # fmt: skip
        self._controller: subprocess.Popen[bytes] | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """By host."""
        self._strangers: list[subprocess.Popen[bytes]] = []
        self._log = (self.folder / "log").open("ab")

    def __enter__(self) -> Self:
        self.disk.mkdir()
        if self.hosts.has_links:  # then it is root
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk)]
            subprocess.run(mount, check=True)
        self.start_controller()
        self.rest("POST", "/jobs", {
            "job": NAME, "workers": {"wanted": self.workers, "min": 1}, "launcher": "none",
            "heartbeat_seconds": 0.5, "reconnect_seconds": 3.0, "stall_seconds": 60.0, **self._spec,
        })  # fmt: skip
        for host in range(1, self.workers + 1):
            self.start_worker(host)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            if kind is not None:
                print(self.story())
        finally:  # also where a second Ctrl-C ends the story
            self._end()

    def _end(self) -> None:
        for process in (*self._processes.values(), *self._strangers, self._controller):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()
        if self.hosts.has_links:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- processes

    def start_controller(self) -> None:
        http, grpc = (f"{self.hosts.address(0)}:{port}" for port in (HTTP, GRPC))
        store = f"embedded:{self.folder / 'store'}"
        places = ["--store", store, "--data", str(self.folder / "store")]
        self._controller = self._start(0, [SHOAL, "controller", "--http", http, "--grpc", grpc, *places])
        wait("the controller to answer", lambda: self.rest("GET", "/jobs"))

    def kill_controller(self) -> None:
        assert self._controller is not None
        self._controller.kill()
        self._controller.wait()

    def freeze_controller(self, frozen: bool) -> None:
        assert self._controller is not None
        self._controller.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def start_worker(self, host: int) -> None:
        grpc = f"{self.hosts.address(0)}:{GRPC}"
        command = [
            SHOAL,
            "worker",
            "--controller",
            grpc,
            "--job",
            NAME,
            "--restarts",
            "0",
            "--",
            sys.executable,
            str(SCRIPT),
        ]
        domain = {"SHOAL_FAILURE_DOMAIN": f"host{host}"}
        self._processes[host] = self._start(host, command, domain)

    def signal_worker(self, host: int, number: int) -> None:
        """To whatever runs on that host, which may have ended."""
        process = self._processes.get(host)
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def take_port(self, host: int, manner: str) -> subprocess.Popen[bytes] | None:
        """Kill the worker of a host, and let a stranger listen where it did. None: it was dead already."""
        process = self._processes[host]
        ports = _listening(process.pid)
        self.signal_worker(host, signal.SIGKILL)
        process.wait()
        if not ports:
            return None
        command = [sys.executable, str(STRANGER), self.hosts.address(host), str(ports[0]), manner]
        stranger = self._start(host, command)
        self._strangers.append(stranger)
        return stranger

    def replace_ended(self) -> list[int]:
        """Start a worker on each host whose own has ended; which hosts."""
        ended = [host for host, process in self._processes.items() if process.poll() is not None]
        for host in ended:
            self.start_worker(host)
        return ended

    def _start(self, host: int, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*(self.hosts.command(host) if host else ()), *command], env={**self._env, **(env or {})}, stdout=self._log,
            stderr=self._log, start_new_session=True,
        )  # fmt: skip

    # ---- the disk of checkpoints

    def fill_disk(self) -> None:
        """Until nothing more fits."""
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb") as filler:
            filler.write(bytes(DISK_BYTES))

    def free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    # ---- the controller's answers

    def rest(self, method: str, path: str, body: Any = None) -> Any:
        """A JSON answer; None where the controller does not answer."""
        url = f"http://{self.hosts.address(0)}:{HTTP}/v1{path}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            answer = httpx.request(method, url, json=body, headers=headers, timeout=5, trust_env=False, verify=False)
        except httpx.TransportError:
            return None
        return answer.json() if answer.is_success else None

    def look(self) -> dict[str, Any]:
        """The job as REST shows it; empty where the controller does not answer."""
        return self.rest("GET", f"/jobs/{NAME}") or {}

    def report(self) -> dict[str, Any]:
        return dict(self.rest("GET", f"/jobs/{NAME}/report"))

    def messages(self, kind: str) -> list[str]:
        """Of the job's events."""
        events = (self.rest("GET", f"/jobs/{NAME}/events?after=0") or {}).get("events", [])
        return [event["message"] for event in events if event["kind"] == kind]

    def story(self) -> str:
        """What happened, for a round that ends badly."""
        events = (self.rest("GET", f"/jobs/{NAME}/events?after=0") or {}).get("events", [])
        lines = [f"{event['time']:.1f} {event['kind']}: {event['message']}" for event in events[-150:]]
        log = (self.folder / "log").read_text(errors="replace")[-6000:]
        return "\n".join([*lines, str(self.look()), "---- log", log])


def _listening(pid: int) -> list[int]:
    """The ports of a process's host on which somebody listens."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return []
    rows = [line.split() for line in lines]
    return [int(local.rpartition(":")[2], 16) for _, local, _, state, *_ in rows if state == LISTENS]


def wait(goal: str, seen: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value; an AssertionError that says what was waited for when none comes in time."""
    deadline = time.monotonic() + seconds
    while not (value := seen()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {goal}"
        PAUSE.wait(0.05)
    return value
