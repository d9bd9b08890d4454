"""What ElasticJobs cost a controller: `python benchmarks/elastic_jobs.py`. The API server is that of the tests, in this
process; the controller is a process of its own, whose CPU seconds, memory and requests count.

Each resource is a job with one pod, which nobody runs: so the jobs wait, and what is measured is watching, looking and
telling. The row without resources has as many jobs of REST, with their pods: the difference is the resources' part.
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
from pathlib import Path

import httpx
from controller_process import Controller, controller
from tables import show

from api_server import PODS, RESOURCES, FakeCluster, kubeconfig, served  # isort: skip (the tests')
from ports import free_port  # isort: skip

SETTLE_SECONDS = 20.0
PATIENCE_SECONDS = 300.0
SPEC = {"command": ["python", "train.py"], "kubernetes": {"image": "train:1"}, "workers": {"min": 1, "max": 8}}
COLUMNS = (
    "resources", "jobs", "made, s", "CPU s", "requests", "at rest, cores", "requests a minute", "of them PATCH", "MB",
    "held, CPU ms", "ended, s", "CPU s",
)  # fmt: skip


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


def until(done: Callable[[], bool], goal: str) -> float:
    """How long it took."""
    began, pause = time.monotonic(), threading.Event()
    while not done():
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise RuntimeError(f"{goal}: not after {PATIENCE_SECONDS:g} s")
        pause.wait(0.1)
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


def row(jobs: int, resources: bool, seconds: float) -> list[str]:
    """Made, at rest, ended."""
    with tempfile.TemporaryDirectory() as name, api_server(Path(name)) as (cluster, url):
        env = {"SHOAL_LAUNCHERS": "kubernetes,none", "KUBECONFIG": f"{name}/kubeconfig", "SHOAL_LOG_LEVEL": "warning"}
        with controller("embedded", env) as there:
            before = there.cpu_seconds()
            began = time.monotonic()
            make(url, there, jobs, resources)
            pods, items = cluster.objects[PODS], cluster.objects[RESOURCES]
            until(lambda: len(pods) == jobs, "all pods")
            until(lambda: not resources or all(one.get("status") for one in list(items.values())), "all statuses")
            made, made_cpu, asked = time.monotonic() - began, there.cpu_seconds() - before, len(cluster.requests)
            threading.Event().wait(SETTLE_SECONDS)
            there.held()
            before, counted = there.cpu_seconds(), len(cluster.requests)
            threading.Event().wait(seconds)
            share, new = (there.cpu_seconds() - before) / seconds, cluster.requests[counted:]
            verbs, held, memory = Counter(verb for verb, _ in new), there.held(), there.memory_mb()
            ended, ended_cpu = _end(url, there, cluster) if resources else ("–", "–")
            return [
                str(jobs if resources else 0), str(jobs), f"{made:.0f}", f"{made_cpu:.1f}", str(asked), f"{share:.3f}",
                f"{60 * len(new) / seconds:.0f}", f"{60 * verbs['PATCH'] / seconds:.0f}", f"{memory:.0f}", held,
                ended, ended_cpu,
            ]  # fmt: skip


def _end(url: str, there: Controller, cluster: FakeCluster) -> tuple[str, str]:
    before, began = there.cpu_seconds(), time.monotonic()
    with httpx.Client(trust_env=False, timeout=60) as client:
        for name in list(cluster.objects[RESOURCES]):
            client.request("DELETE", f"{url}{RESOURCES}/{name}", json={}).raise_for_status()
    until(lambda: not cluster.objects[RESOURCES], "all resources to be gone")
    return f"{time.monotonic() - began:.0f}", f"{there.cpu_seconds() - before:.1f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--jobs", type=int, default=1000)
    arguments.add_argument("--seconds", type=float, default=60.0, help="how long is measured at rest")
    arguments.add_argument("--only-resources", action="store_true", help="leave out the row of jobs over REST")
    given = arguments.parse_args()
    kinds = [True] if given.only_resources else [True, False]
    show("ElasticJobs and their controller", COLUMNS, [row(given.jobs, kind, given.seconds) for kind in kinds])


if __name__ == "__main__":
    main()
