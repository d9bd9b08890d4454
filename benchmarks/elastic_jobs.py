"""What ElasticJobs cost a controller: `python benchmarks/elastic_jobs.py`. The API server is that of the tests, in this
process; the controller is a process of its own, whose CPU seconds, memory and requests count. TMPDIR=/dev/shm keeps the
speed of a disk out of it.

Each resource is a job with one pod, which nobody runs: so the jobs wait, and what is measured is watching, looking and
telling. The row without resources has as many jobs of REST, with their pods: the difference is the resources' part.
Then the controller is killed and another one adopts the pods, and in the end all resources are deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from controller_process import Controller, controller
from tables import show, verdict

from api_faults import served  # isort: skip (the tests')
from api_server import PODS, RESOURCES, FakeCluster, kubeconfig  # isort: skip
from ports import free_port  # isort: skip

SETTLE_SECONDS = 20.0
PATIENCE_SECONDS = 300.0
SPEC = {"command": ["python", "train.py"], "kubernetes": {"image": "train:1"}, "workers": {"min": 1, "max": 8}}
COLUMNS = (
    "resources", "jobs", "made, s", "CPU s", "requests", "at rest, cores", "requests a minute", "of them PATCH", "MB",
    "held, CPU ms", "adopted, s", "CPU s", "ended, s", "CPU s", "requests",
)  # fmt: skip
ADOPTED = 'shoal_launcher_calls_total{call="adopt",launcher="kubernetes",outcome="done"}'
TARGETS = {"made": 60.0, "adopted": 10.0, "ended": 60.0}
"""Seconds, of a thousand."""


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[FakeCluster, str]]:
    """In a thread of its own; a kubeconfig lies in the folder."""
    cluster, ready, end = FakeCluster(), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    url = f"http://127.0.0.1:{(port := free_port())}"

    async def live() -> None:
        loops.append(asyncio.get_running_loop())
        async with served(cluster, port):
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="API server")
    thread.start()
    ready.wait(10)
    (folder / "kubeconfig").write_text(kubeconfig(url))
    try:
        yield cluster, url
    finally:
        loops[0].call_soon_threadsafe(end.set)
        thread.join(10)


def until(done: Callable[[], bool], goal: str, look_seconds: float = 0.1) -> float:
    """How long it took."""
    began, pause = time.monotonic(), threading.Event()
    while not done():
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise RuntimeError(f"{goal}: not after {PATIENCE_SECONDS:g} s")
        pause.wait(look_seconds)
    return time.monotonic() - began


def make(url: str, there: Controller, jobs: int, resources: bool) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        for number in range(jobs):
            name = f"job-{number}"
            if resources:
                item = {"apiVersion": "shoal.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}}
                client.post(f"{url}{RESOURCES}", json={**item, "spec": SPEC}).raise_for_status()
            else:
                body = {**SPEC, "job": name, "launcher": "kubernetes", "workers": {"wanted": 1}}
                client.post(f"http://{there.http}/v1/jobs", json=body).raise_for_status()


@dataclass(frozen=True)
class Phase:
    """What one phase took."""

    seconds: float
    cpu: float
    requests: int

    @property
    def cells(self) -> list[str]:
        return [f"{self.seconds:.1f}", f"{self.cpu:.1f}"]


def row(jobs: int, resources: bool, seconds: float) -> tuple[list[str], dict[str, float]]:
    """Made, at rest, adopted, ended; and the seconds of each."""
    with tempfile.TemporaryDirectory() as name, api_server(Path(name)) as (cluster, url):
        env = {"SHOAL_LAUNCHERS": "kubernetes,none", "KUBECONFIG": f"{name}/kubeconfig", "SHOAL_LOG_LEVEL": "warning"}
        with controller("embedded", env) as there:
            made = _make(url, there, cluster, jobs, resources)
            threading.Event().wait(SETTLE_SECONDS)
            there.held()
            before, counted = there.cpu_seconds(), len(cluster.requests)
            threading.Event().wait(seconds)
            share, new = (there.cpu_seconds() - before) / seconds, cluster.requests[counted:]
            verbs, held, memory = Counter(verb for verb, _ in new), there.held(), there.memory_mb()
            adopted = _adopt(there, cluster, jobs)
            ended = _end(url, there, cluster) if resources else None
            cells = [
                str(jobs if resources else 0), str(jobs), *made.cells, str(made.requests), f"{share:.3f}",
                f"{60 * len(new) / seconds:.0f}", f"{60 * verbs['PATCH'] / seconds:.0f}", f"{memory:.0f}", held,
                *adopted.cells, *([*ended.cells, str(ended.requests)] if ended is not None else 3 * ["–"]),
            ]  # fmt: skip
            took = {"made": made.seconds, "adopted": adopted.seconds}
            return cells, took if ended is None else {**took, "ended": ended.seconds}


def _make(url: str, there: Controller, cluster: FakeCluster, jobs: int, resources: bool) -> Phase:
    before, began = there.cpu_seconds(), time.monotonic()
    make(url, there, jobs, resources)
    pods, items = cluster.objects[PODS], cluster.objects[RESOURCES]
    until(lambda: len(pods) == jobs, "all pods")
    until(lambda: not resources or all(one.get("status") for one in list(items.values())), "all statuses")
    return Phase(time.monotonic() - began, there.cpu_seconds() - before, len(cluster.requests))


def _adopt(there: Controller, cluster: FakeCluster, jobs: int) -> Phase:
    """From the death of the controller until another one has found all pods."""
    began, counted = time.monotonic(), len(cluster.requests)
    there.kill()
    there.start()

    def adopted() -> bool:
        lines = asyncio.run(there.metrics()).splitlines()
        return any(line.startswith(ADOPTED) and float(line.rpartition(" ")[2]) >= jobs for line in lines)

    until(adopted, "all pods to be adopted", 1.0)  # metrics of a thousand jobs are long
    return Phase(time.monotonic() - began, there.cpu_seconds(), len(cluster.requests) - counted)


def _end(url: str, there: Controller, cluster: FakeCluster) -> Phase:
    before, began, counted = there.cpu_seconds(), time.monotonic(), len(cluster.requests)
    with httpx.Client(trust_env=False, timeout=60) as client:
        for name in list(cluster.objects[RESOURCES]):
            client.request("DELETE", f"{url}{RESOURCES}/{name}", json={}).raise_for_status()
    until(lambda: not cluster.objects[RESOURCES], "all resources to be gone")
    return Phase(time.monotonic() - began, there.cpu_seconds() - before, len(cluster.requests) - counted)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--jobs", type=int, default=1000)
    arguments.add_argument("--seconds", type=float, default=60.0, help="how long is measured at rest")
    arguments.add_argument("--only-resources", action="store_true", help="leave out the row of jobs over REST")
    given = arguments.parse_args()
    kinds = [True] if given.only_resources else [True, False]
    rows, took = zip(*(row(given.jobs, kind, given.seconds) for kind in kinds), strict=True)
    show("ElasticJobs and their controller", COLUMNS, rows)
    compared = [[phase, f"{seconds:.1f}", verdict(seconds, TARGETS[phase])] for phase, seconds in took[0].items()]
    show(f"Pods of {given.jobs} ElasticJobs", ("all of them", "s", "target for 1,000"), compared)


if __name__ == "__main__":
    main()
