"""The systems that goodput.py compares, each with all that a run of it needs: machines that come and go are processes.

    with Shoal(job, folder) as system:
        system.come(0)
        system.go(0)

A machine that goes is killed with all that runs on it. What coordinates the machines (a controller, a store, a
lighthouse) runs beside them and lives, as on a machine that is not for hire.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import httpx
import psutil
import restart
from goodput_account import Logged

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv" / "peers"
"""Where `make goodput` puts what Shoal does not need itself."""
LIGHTHOUSE = """
import threading
from torchft._torchft import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1500, quorum_tick_ms=20, heartbeat_timeout_ms=1000
)
print(server.address(), flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class Work:
    """What all systems train."""

    machines: int = 4
    lanes: int = 12
    size: str = "1M"
    seconds: float = 0.1
    """That a micro-batch sleeps."""
    mirrors: int = 2


class System:
    """One run. Leaving the `with` ends every process and removes the folder."""

    name: ClassVar[str]
    save_every: ClassVar[int] = 20

    def __init__(self, work: Work) -> None:
        self.work = work
        self.folder = Path(tempfile.mkdtemp(prefix="goodput-"))
        self._log = self.folder / "log.jsonl"
        self._log.touch()
        self._machines: dict[int, subprocess.Popen[bytes]] = {}
        self._beside: list[subprocess.Popen[bytes]] = []
        self._started = 0

    @classmethod
    def missing(cls) -> str:
        """Why this system cannot run here; empty: it can."""
        return ""

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._machines.values(), *self._beside]:
            _kill(process)
        shutil.rmtree(self.folder)

    def come(self, machine: int) -> None:
        """A machine is there: its process starts, as the machine's image would start it."""
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "GLOO_SOCKET_IFNAME": "lo",
            "GOODPUT_LOG": str(self._log), "GOODPUT_MACHINE": str(machine), **self._environment(machine),
        }  # fmt: skip
        with self._place(f"{self._started}.log").open("wb") as log:
            self._machines[machine] = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._started += 1

    def notice(self, machine: int) -> None:
        """It will be taken away: what a cloud says some time before."""
        self._machines[machine].send_signal(signal.SIGTERM)

    def freeze(self, machine: int) -> None:
        """It stands still, and its connections stay open."""
        for process in _family(self._machines[machine]):
            process.suspend()

    def go(self, machine: int) -> None:
        """All its processes are killed."""
        _kill(self._machines.pop(machine))

    def ended(self) -> list[int]:
        """The machines whose process ended by itself."""
        return [machine for machine, process in self._machines.items() if process.poll() is not None]

    def logged(self) -> list[Logged]:
        """All lines of all processes so far."""
        return [Logged(**json.loads(line)) for line in self._log.read_text().splitlines() if line.endswith("}")]

    def last_words(self) -> str:
        """The ends of the processes' logs, for a run that could not go on."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"---- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _place(self, name: str) -> Path:
        return self.folder / name

    def _beside_it(self, command: list[str], name: str, **environment: str) -> str:
        """Start what coordinates; returns the first line that it prints."""
        with self._place(f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **environment}, start_new_session=True
            )
        self._beside.append(process)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip()

    def _script(self) -> list[str]:
        work = self.work
        given = {
            "size": work.size, "lanes": work.lanes, "work": work.seconds, "machines": work.machines,
            "mirrors": work.mirrors, "save-every": self.save_every, "folder": self._place("saved"),
        }  # fmt: skip
        options = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        return [str(HERE / "goodput_worker.py"), self.name, *options]

    def _begin(self) -> None:
        self._place("saved").mkdir()

    def _command(self) -> list[str]:
        return [sys.executable, *self._script()]

    def _environment(self, machine: int) -> dict[str, str]:
        return {}


class Shoal(System):
    """A controller with launcher `none`; a machine's worker has an identity of its own each time it comes."""

    name = "shoal"

    def _begin(self) -> None:
        super()._begin()
        store = self._place("store")
        command = [str(Path(sys.executable).parent / "shoal"), "controller", "--http", "127.0.0.1:0"]
        command += ["--grpc", "127.0.0.1:0", "--store", f"embedded:{store}", "--data", str(store)]
        addresses = dict(part.split("=") for part in self._beside_it(command, "controller").split())
        self._grpc, self._rest = addresses["grpc"], f"http://{addresses['http']}/v1/jobs"
        job = {"job": "goodput", "workers": {"wanted": self.work.machines, "min": 1}, "launcher": "none"}
        httpx.post(self._rest, json=job, trust_env=False).raise_for_status()

    def _environment(self, machine: int) -> dict[str, str]:
        return {
            "SHOAL_CONTROLLER": self._grpc, "SHOAL_JOB": "goodput", "SHOAL_WORKER_ID": f"w{self._started}",
            "SHOAL_HOST": "127.0.0.1", "SHOAL_FAILURE_DOMAIN": f"machine{machine}",
        }  # fmt: skip


class Torchrun(System):
    """An agent for each machine; the rendezvous is in a store of its own, as in restart.py."""

    name = "torchrun"
    save_every = 5
    """By Young's interval: a save takes about a tenth of a step, and a machine goes every few dozen steps."""

    def _begin(self) -> None:
        super()._begin()
        self._port = int(self._beside_it([sys.executable, "-c", restart.STORE], "store"))

    def _command(self) -> list[str]:
        nodes = f"1:{self.work.machines}"
        return restart.agent_command(nodes, self._port, self._place("agents"), self._script(), last_call=1)

    def _environment(self, machine: int) -> dict[str, str]:
        return restart.AGENT_ENVIRONMENT


class Torchft(System):
    """A replica group for each machine, under one lighthouse."""

    name = "torchft"

    @classmethod
    def missing(cls) -> str:
        # looked for where its processes look, and not imported here: it brings another protobuf
        there = importlib.util.find_spec("torchft") or (PEERS / "torchft").exists()
        return "" if there else f"torchft is not installed; `make goodput` installs it into {PEERS.name}"

    def _begin(self) -> None:
        super()._begin()
        self._lighthouse = self._beside_it([sys.executable, "-c", LIGHTHOUSE], "lighthouse", PYTHONPATH=str(PEERS))

    def _environment(self, machine: int) -> dict[str, str]:
        return {"GOODPUT_LIGHTHOUSE": self._lighthouse, "PYTHONPATH": str(PEERS)}


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Shoal, Torchrun, Torchft)}


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        head = psutil.Process(process.pid)
        return [*head.children(recursive=True), head]
    return []


def _kill(process: subprocess.Popen[bytes]) -> None:
    for one in _family(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
