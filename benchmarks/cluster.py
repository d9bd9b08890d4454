"""A real `shoal controller` with one job, as a user would start it, for one benchmark.

    with Cluster(Job(size="10M", workers=4)) as cluster:
        cluster.settle()
        cluster.kill("w1")

Everything is seen from outside: REST, the job's events as they are streamed, and the step log. With launcher `none` the
workers are started here (`add`), so that no replacement starts before it is wanted. Leaving the `with` ends every
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from steps import PATIENCE_SECONDS, POLL_SECONDS, StepLog, until

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))
from faults.hosts import Hosts, Loopback  # noqa: E402 (namespaces are the tests')

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run."""

    size: str = "10M"
    workers: int = 4
    processes: int = 1
    """Of a cell: workers that fill none are spares."""
    lanes: int = 4
    mirrors: int = 1
    workers_per_host: int = 1
    """Where the hosts are network namespaces."""
    launcher: str = "none"
    script: str = "train.py"
    arguments: tuple[str, ...] = ()
    """More than size, lanes and mirrors."""
    spec: Json = field(default_factory=dict)
    """What differs from the defaults in the job's spec."""

    @property
    def command(self) -> list[str]:
        given = ["--size", self.size, "--lanes", str(self.lanes), "--mirrors", str(self.mirrors)]
        return [sys.executable, str(HERE / self.script), *given, *self.arguments]


class Events:
    """The job's history as it is streamed. Whoever waits is content with an event of the past."""

    def __init__(self, url: str) -> None:
        self.all: list[Json] = []
        self._url = url
        self._news = threading.Condition()
        threading.Thread(target=self._follow, name="events", daemon=True).start()

    def _follow(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(timeout=None, trust_env=False) as client,
            client.stream("GET", self._url, headers={"Accept": "text/event-stream"}) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    with self._news:
                        self.all.append(json.loads(line.removeprefix("data:")))
                        self._news.notify_all()

    def until(self, goal: str, seen: Callable[[list[Json]], T], patience: float = PATIENCE_SECONDS) -> T:
        """The first true value of `seen(all events)`."""
        deadline = time.monotonic() + patience
        with self._news:
            while not (value := seen(self.all)):
                if not self._news.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"waited {patience:.0f} s for {goal}")
        return value

    def wait(self, kind: str, since: float = 0.0, **fits: Any) -> Json:
        """The first event of this kind at or after the time `since` whose fields are these."""
        return self.until(
            f"the event {kind} {fits or ''}",
            lambda events: next(
                (e for e in events if e["kind"] == kind and e["time"] >= since and fits.items() <= e.items()), {}
            ),
        )


class Cluster:
    """One controller, one job, its workers."""

    def __init__(self, job: Job, hosts: Hosts | None = None) -> None:
        """`hosts`: a network namespace for each worker; none: all on this machine."""
        self.job, self._hosts = job, hosts or Loopback()
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        self.steps = StepLog(self.folder / "steps.jsonl")
        self.own: dict[str, subprocess.Popen[bytes]] = {}
        self._controller: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(RuntimeError)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._tell()
        with contextlib.suppress(httpx.HTTPError, RuntimeError):  # a controller that is ending refuses to tell
            for worker in self.workers().values():
                if worker["pid"]:
                    _signal(worker["pid"], signal.SIGKILL)
        for process in [*self.own.values(), *([self._controller] if self._controller else [])]:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)

    def _start(self) -> None:
        here = f"{self._hosts.address(0)}:0"
        command = [str(Path(sys.executable).parent / "shoal"), "controller", "--http", here, "--grpc", here]
        command += ["--store", f"embedded:{self.folder / 'store'}", "--data", str(self.folder / "store")]
        command += ["--open"] if self._hosts.has_links else []
        with (self.folder / "controller.log").open("wb") as log:
            self._controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=self._environment())
        assert self._controller.stdout is not None
        addresses = dict(part.split("=") for part in self._controller.stdout.readline().decode().split())
        self._grpc = addresses["grpc"]
        url = f"http://{addresses['http']}/v1"
        self._rest = httpx.Client(base_url=url, timeout=30, trust_env=False)
        spec: Json = {"job": "bench", "workers": {"wanted": self.job.workers}, "launcher": self.job.launcher}
        if self.job.launcher == "local":
            spec["command"] = self.job.command
        self.ask("POST", "", {**spec, **self.job.spec})
        self.events = Events(f"{url}/jobs/bench/events?after=0")
        if self.job.launcher == "none":
            self.add(self.job.workers)

    def _environment(self) -> dict[str, str]:
        links = {"GLOO_SOCKET_IFNAME": "wire"} if self._hosts.has_links else {}  # of DDP's own group
        own = {"BENCH_STEPS": str(self.steps.path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        return {**os.environ, **links, **own}  # a joiner imports what is compiled, as from an installation

    def _tell(self) -> None:
        """What happened, for a benchmark that could not end."""
        for log in [*self.folder.glob("*.log"), *self.folder.glob("store/jobs/*/*.log")]:
            print(f"---- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)

    # ---- REST

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Of `/v1/jobs/bench`; an empty path with POST creates it."""
        answer = self._rest.request(
            method, "/jobs" if method == "POST" and not path else f"/jobs/bench{path}", json=body
        )
        if not answer.is_success:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return dict(answer.json())

    def workers(self) -> dict[str, Json]:
        """By id."""
        return {worker["worker"]: worker for worker in self.ask("GET", "/workers")["workers"]}

    def report(self) -> list[Json]:
        """The generations of the run report."""
        return list(self.ask("GET", "/report")["generations"])

    def scale(self, workers: int) -> None:
        self.ask("POST", "/scale", {"workers": workers})

    def drain(self, worker: str) -> None:
        self.ask("POST", f"/workers/{worker}/drain", {"grace_seconds": 60})

    # ---- processes

    def add(self, count: int = 1) -> None:
        """Start more workers (launcher `none`)."""
        for number in range(len(self.own), len(self.own) + count):
            worker, host = f"w{number}", 1 + number // self.job.workers_per_host
            identity = {"SHOAL_CONTROLLER": self._grpc, "SHOAL_JOB": "bench", "SHOAL_WORKER_ID": worker}
            with (self.folder / f"{worker}.log").open("wb") as log:
                env = {**self._environment(), **identity, "SHOAL_HOST": self._hosts.address(host)}
                if self._hosts.has_links:
                    env["SHOAL_FAILURE_DOMAIN"] = f"host{host}"
                command = [*self._hosts.command(host), *self.job.command]
                self.own[worker] = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def signal(self, worker: str, number: signal.Signals) -> float:
        """Send a signal to a worker's process; returns when."""
        pid = self.own[worker].pid if worker in self.own else self.workers()[worker]["pid"]
        now = time.time()
        _signal(pid, number)
        return now

    # ---- waiting

    def settle(self, members: int | None = None, steps: int = 3) -> list[str]:
        """Until so many train evenly, all copies of all blocks are in place, and some steps are done.

        Returns those that train.
        """
        members = members or self.job.workers
        found = until("a settled world", lambda: self._settled(members), pause=10 * POLL_SECONDS)
        generation = self.ask("GET", "")["generation"]
        for worker in found:
            self.steps.until(
                f"{steps} steps of {worker} in generation {generation}", _steps_of(worker, generation, steps)
            )
        return found

    def results(self, *endings: str, patience: float) -> list[Any]:
        """What the script wrote, as JSON, beside the step log; raises when one of its processes ends before."""
        places = [Path(f"{self.steps.path}{ending}") for ending in endings]

        def there() -> bool:
            ended = [worker for worker, process in self.own.items() if process.poll() is not None]
            if ended:
                raise RuntimeError(f"{', '.join(ended)} ended before there was a result")
            return all(place.exists() for place in places)

        until("a result", there, patience, pause=10 * POLL_SECONDS)
        return [json.loads(place.read_text()) for place in places]

    def _settled(self, members: int) -> list[str]:
        job, workers = self.ask("GET", ""), self.workers()
        active = [w for w in workers.values() if w["state"] == "active"]
        training, lanes = zip(*[(w["worker"], len(w["lanes"])) for w in active if w["lanes"]] or [((), 0)], strict=True)
        everybody = members == len(active) == job["workers"]["active"]
        if job["phase"] != "running" or not everybody or len(training) != members - members % self.job.processes:
            return []
        mates: dict[str, list[Json]] = {}
        for worker in active:
            mates.setdefault(str(worker.get("coordinate")), []).append(worker)
        whole = all(self._have_all_copies(those) for those in mates.values())
        return list(training) if whole and max(lanes) - min(lanes) <= 1 else []

    def _have_all_copies(self, mates: list[Json]) -> bool:
        """Of the blocks that these workers own in equal parts."""
        owned, mirrored = ([worker[kind] for worker in mates] for kind in ("blocks", "mirrored_blocks"))
        copies = min(self.job.mirrors, len(mates) - 1)
        return sum(mirrored) == copies * sum(owned) and max(owned) - min(owned) <= 1


def end_cleanly() -> None:
    """SIGTERM ends a benchmark as Ctrl-C does: with all its processes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _steps_of(worker: str, generation: int, count: int) -> Callable[[list[Any]], bool]:
    return lambda steps: sum(s.worker == worker and s.generation >= generation for s in steps) >= count


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
