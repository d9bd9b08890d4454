"""A `shoal controller` in a process of its own, for control_plane.py and elastic_jobs.py: what it costs, from outside.

Its store is embedded, or a real etcd of three servers, whose own CPU is not the controller's.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

MB = 1_000_000
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))

from etcd_cluster import etcd_cluster  # noqa: E402

STORES = ("embedded", "etcd")
TRANSACTIONS = re.compile(r'^shoal_store_request_duration_seconds_count\{request="transact"\} (\S+)$', re.MULTILINE)


@dataclass
class Controller:
    """A controller: its process, its addresses, its folder."""

    folder: Path
    command: Sequence[str]
    env: Mapping[str, str]
    http: str = ""
    grpc: str = ""
    read: int = 0
    """How much was read of what `held_loop.py` writes."""
    process: psutil.Process = field(init=False)
    _started: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start it, or start it again with the same store, at new addresses."""
        with (self.folder / "log").open("ab") as log:
            self._started = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log, env=self.env)
        self.process = psutil.Process(self._started.pid)
        assert self._started.stdout is not None
        if not (ready := self._started.stdout.readline().decode()):
            raise RuntimeError(f"the controller did not start: {(self.folder / 'log').read_text()}")
        addresses = dict(part.split("=") for part in ready.split())
        self.http, self.grpc = addresses["http"], addresses["grpc"]

    def kill(self) -> None:
        """By SIGKILL."""
        self._started.kill()
        self._started.wait()
        if self._started.stdout is not None:
            self._started.stdout.close()

    def cpu_seconds(self) -> float:
        """Of the process and its living children: the planner is one."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_mb(self) -> float:
        return sum(one.memory_info().rss for one in (self.process, *self.process.children(recursive=True))) / MB

    def held(self) -> str:
        """The longest that one callback has held the event loop since this was asked last: CPU ms, and whose it was."""
        lines = (self.folder / "held").read_text().splitlines()
        new, self.read = lines[self.read :], len(lines)
        if not new:
            return "< 5"
        seconds, _, whose = max(new, key=lambda line: float(line.partition(" ")[0])).partition(" ")
        return f"{1000 * float(seconds):.0f} ({whose})"

    async def submit(self, name: str, workers: int, **more: object) -> None:
        """`more`: what differs from the defaults of a job's spec."""
        spec = {"job": name, "workers": {"wanted": workers}, "launcher": "none", **more}
        async with self._client() as client:
            (await client.post("/v1/jobs", json=spec)).raise_for_status()

    async def metrics(self) -> str:
        async with self._client() as client:
            answer = await client.get("/metrics")
            return answer.raise_for_status().text

    async def writes(self) -> float:
        """Transactions of the store so far."""
        found = TRANSACTIONS.search(await self.metrics())
        assert found is not None
        return float(found[1])

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.http}", trust_env=False, timeout=60)


@contextlib.contextmanager
def controller(store: str, env: Mapping[str, str] | None = None) -> Iterator[Controller]:
    """One that listens on loopback, with a store of that kind, until the context ends. `env`: further variables."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        url = f"embedded:{name}/store"
        if store == "etcd":
            url = f"etcd://{','.join(ends.enter_context(etcd_cluster(folder / 'etcd', 3)).addresses)}/shoal"
        command = [sys.executable, str(HERE / "held_loop.py"), str(folder / "held"), "controller"]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--store", url, "--data", name]
        there = Controller(folder, command, {**os.environ, **(env or {})})
        try:
            there.start()
            yield there
        finally:
            there.kill()
