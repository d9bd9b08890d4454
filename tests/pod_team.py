"""A cluster, its Kubernetes launcher, and what the jobs were told: for tests of the launcher's control loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from api_faults import served
from api_server import FakeCluster, kubeconfig
from kubelet import Kubelets
from ports import free_port
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.core.machine.events import Spawned
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes import cluster_api, pod_launcher, pod_writer, world_annotations
from shoal_controller.launchers.kubernetes.pod_launcher import KubernetesLauncher, connected, kubernetes_launcher
from shoal_controller.launchers.kubernetes.section import ClusterOptions, PodOptions

TOKENS = WorkerTokens("sesame")
SECTION = {"image": "registry/train:1", "graceSeconds": 60}
SPEC = JobSpec(
    "demo", wanted=2, launcher="kubernetes", command=("python", "train.py"), env={"A": "1"}, run="a1b2c3d4",
    kubernetes=json.dumps(SECTION),
)  # fmt: skip


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test waits tenths of a second for what takes seconds in earnest."""
    monkeypatch.setattr(cluster_api, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(cluster_api, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(cluster_api, "FORBIDDEN_SECONDS", 0.05)
    monkeypatch.setattr(pod_writer, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(pod_writer, "NAME_FREE_SECONDS", 0.05)
    monkeypatch.setattr(pod_launcher, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(pod_launcher, "ADOPT_SECONDS", 0.5)
    monkeypatch.setattr(world_annotations, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(world_annotations, "FIRST_PAUSE_SECONDS", 0.05)


class Team:
    """A cluster, its launcher, and what the jobs were told."""

    def __init__(self, cluster: FakeCluster, options: ClusterOptions) -> None:
        self.cluster, self.options = cluster, options
        self.kubelets = Kubelets(cluster)
        self.reports: list[Any] = []
        self.runs: set[str] = set()
        """Of whose workers was reported."""
        self.deaf: list[Exception] = []
        """What the next reports meet instead of a job."""
        self.on_report: Callable[[Any], None] = lambda news: None
        self.launcher: KubernetesLauncher = None  # type: ignore[assignment]

    async def submit(self, job: str, run: str, news: Any) -> None:
        if self.deaf:
            raise self.deaf.pop(0)
        self.reports.append(news)
        self.runs.add(run)
        self.on_report(news)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[KubernetesLauncher]:
        """A controller's term."""
        pods = PodOptions(lambda: ("shoal-workers:7071",), TOKENS)
        async with (
            connected(self.options) as api,
            kubernetes_launcher(api, pods, self.options, self.submit) as self.launcher,
        ):
            yield self.launcher

    def started(self) -> int:
        """How many workers are known to run."""
        return len({news.worker for news in self.reports if isinstance(news, Spawned)})

    async def until(self, done: Callable[[], object], purpose: str, seconds: float = 100.0) -> None:
        for _ in range(round(seconds / 0.02)):
            if done():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{purpose}: {self.reports}")

    async def hears(self, *kinds: type, of: str = "") -> list[Any]:
        """What was told of these kinds, once there is something."""

        def found() -> list[Any]:
            return [one for one in self.reports if isinstance(one, kinds) and one.worker in (of or one.worker)]

        await self.until(found, f"nothing was told of {kinds} {of}")
        return found()

    def pod_uid(self, name: str) -> str:
        return str(self.cluster.pods()[name]["metadata"]["uid"])

    def run_of(self, name: str) -> str:
        """The run that a pod is of; empty where there is no such pod."""
        return str(self.cluster.pods().get(name, {}).get("metadata", {}).get("labels", {}).get("shoal.dev/run", ""))

    def count(self, kind: type) -> int:
        return sum(isinstance(news, kind) for news in self.reports)

    async def breathe(self, seconds: float) -> None:
        """Let others have their turn."""
        await asyncio.sleep(seconds)

    async def settle(self) -> None:
        """Enough time for what should not happen."""
        await asyncio.sleep(0.3)


@asynccontextmanager
async def team(folder: Path, *nodes: str, **options: Any) -> AsyncIterator[Team]:
    """A cluster with these nodes, whose kubelets run, and a launcher."""
    cluster = FakeCluster()
    for node in nodes:
        cluster.node(node)
    async with served(cluster, free_port()) as url:
        (folder / "kubeconfig").write_text(kubeconfig(url))
        found = Team(cluster, ClusterOptions(str(folder / "kubeconfig"), **options))
        running = asyncio.create_task(found.kubelets.run())
        try:
            async with found.leading():
                yield found
        finally:
            running.cancel()
            await asyncio.wait([running])
