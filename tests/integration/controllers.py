"""Several controllers that share one etcd, and one job with its workers: `Cluster` with more than one to ask.

with etcd_cluster(folder, 3) as etcd, Controllers(etcd, workers=3) as cluster:
    cluster.kill_leader()
    cluster.wait_undisturbed()
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from etcd_cluster import Cluster as Etcd
from integration.cluster import PATIENCE_SECONDS, Cluster, Json, ended, until
from integration.cluster import send_signal as send
from ports import free_port

LEADS = "shoal_leader 1.0"

ALL_OUTAGES = bool(os.environ.get("SHOAL_OUTAGES"))
"""Whether all tests of what becomes of controllers and their store are run, or one of each kind."""


def outages(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test of `make outages` alone."""
    return test if ALL_OUTAGES else None


@dataclass(slots=True)
class Controller:
    """One of them. Its ports stay when it is started again."""

    name: str
    http: int
    grpc: int
    host: str = "127.0.0.1"
    pid: int = 0
    lives: int = 0

    @property
    def runs(self) -> bool:
        return self.pid != 0 and self.pid not in ended()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.http}"

    def ask(self, path: str, **given: Any) -> httpx.Response:
        """What it answers itself, or hands on. Raises `httpx.TransportError`."""
        given = {"timeout": 60, **given}
        return httpx.request(given.pop("method", "GET"), f"{self.url}{path}", trust_env=False, verify=False, **given)

    def leads(self) -> bool:
        try:
            return self.runs and LEADS in self.ask("/metrics", timeout=5).text
        except httpx.TransportError:
            return False


class Controllers(Cluster):
    """`Cluster` whose questions are answered by whichever controller can."""

    def __init__(self, etcd: Etcd, controllers: int = 2, **given: Any) -> None:
        self.etcd = etcd
        self.routes: dict[str, Sequence[int]] = {}
        """By controller: other ports at which it finds the servers of etcd."""
        self.all = [Controller("abcdefgh"[number], free_port(), free_port()) for number in range(controllers)]
        super().__init__(**given)

    # ---- processes

    def start_one(self, one: Controller) -> None:
        """Start it again, and wait until it serves."""
        self._start_one(one, "shoal", "integration.scripts:controller")
        until("it to serve", lambda: self._serves(one))

    def kill_one(self, one: Controller) -> None:
        """SIGKILL; returns when it is gone."""
        send(one.pid, signal.SIGKILL)
        until("the controller to be gone", lambda: not one.runs)

    def start_controller(self, store: str = "shoal", program: str = "integration.scripts:controller") -> None:
        """Start all that do not run, and wait until each serves and one leads."""
        for one in self.all:
            if not one.runs:
                self._start_one(one, store, program)
        until("every controller to serve", lambda: all(self._serves(one) for one in self.all))
        self.wait_leader()

    def _start_one(self, one: Controller, store: str, program: str) -> None:
        one.lives += 1
        addresses = {"http": f"{one.host}:{one.http}", "grpc": f"{one.host}:{one.grpc}"}
        ports = self.routes.get(one.name)
        servers = [f"127.0.0.1:{port}" for port in ports] if ports else self.etcd.addresses
        url = f"etcd://{','.join(servers)}/{store}"
        log = self.folder / f"controller-{one.name}-{one.lives}.log"
        arguments = {**addresses, "store": url, "data": str(self.folder / "data")}
        one.pid = self.fork(one.name, program, arguments, {}, log)

    def _serves(self, one: Controller) -> bool:
        assert one.runs, f"controller {one.name} ended at its start"
        try:
            return one.ask("/readyz", timeout=5).is_success and one.ask("/v1/jobs", timeout=5).is_success
        except httpx.TransportError:
            return False

    def controller_pids(self) -> set[int]:
        return {one.pid for one in self.all if one.pid}

    def controllers_of(self, worker: str) -> str:
        return ",".join(f"{one.host}:{one.grpc}" for one in self.all)

    def leader(self) -> Controller:
        """The one that leads now."""
        return next(one for one in self.all if one.leads())

    def others(self) -> list[Controller]:
        """Those that run and do not lead."""
        return [one for one in self.all if one.runs and not one.leads()]

    def wait_leader(self, but: Controller | None = None) -> Controller:
        """Until one leads that is not `but`."""
        found = until("a leader", lambda: next((one for one in self.all if one is not but and one.leads()), None))
        assert isinstance(found, Controller)
        return found

    def kill_leader(self) -> Controller:
        """SIGKILL; returns which one it was, when it is gone."""
        leader = self.leader()
        self.kill_one(leader)
        return leader

    # ---- answers

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Json:
        """Of any controller: while the leadership changes, of the first that can."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
        why = "no controller runs"
        while time.monotonic() < deadline:
            for one in filter(lambda one: one.runs, self.all):
                try:
                    answer = one.ask(f"/v1{path}", method=method, json=body, timeout=5)
                except httpx.TransportError as error:
                    why = f"{one.name}: {error}"
                    continue
                if answer.is_success:
                    return dict(answer.json())
                why = f"{one.name}: {answer.status_code} {answer.text}"
                assert answer.status_code in (502, 503), f"{method} {path}: {why}"
            pause.wait(0.05)
        raise AssertionError(f"{method} {path}: {why}")
