"""A cluster with ElasticJobs, a shell with a small machine, and who stands between them: for tests of resources.

The cluster is the one in this process, or the one that `make cluster` names. What a test does to it goes by requests as
anybody's, and what goes wrong by `api_faults.py`, so that the tests are the same for both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_faults import served
from api_server import EVENTS, PODS, RESOURCES, FakeCluster, kubeconfig
from cluster_choice import REAL
from cluster_proxy import ClusterProxy, before_the_cluster
from pod_team import hurry
from ports import free_port
from shoal_controller.elastic_jobs import owned_job, reconciler
from shoal_controller.elastic_jobs.reconciler import reconciling
from shoal_controller.launchers.kubernetes.pod_launcher import connected
from shoal_controller.launchers.kubernetes.section import ClusterOptions
from small_machine import running

SPEC = {"command": ["python", "train.py"], "kubernetes": {"image": "train:1"}, "workers": {"min": 2, "max": 8}}


def hurry_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test waits hundredths of a second for what takes seconds in earnest."""
    hurry(monkeypatch)
    monkeypatch.setattr(reconciler, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(reconciler, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(owned_job, "SOON_SECONDS", 0.02)
    monkeypatch.setattr(owned_job, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(owned_job, "FIRST_PAUSE_SECONDS", 0.02)


class Place:
    """A cluster, a shell, and who stands between them."""

    def __init__(self, cluster: FakeCluster | ClusterProxy, world: Any, url: str, options: ClusterOptions) -> None:
        self.cluster, self.world, self.shell, self._options = cluster, world, world.shell, options
        self.kubectl = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=60)

    @asynccontextmanager
    async def term(self) -> AsyncIterator[reconciler.Reconciler]:
        """A leader's."""
        async with connected(self._options) as api, reconciling(api, self.shell) as found:
            yield found

    async def apply(self, name: str = "train", **changed: Any) -> httpx.Response:
        item = {"apiVersion": "shoal.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}}
        return await self.kubectl.post(RESOURCES, json={**item, "spec": {**SPEC, **changed}})

    async def scale(self, replicas: int, name: str = "train") -> httpx.Response:
        return await self._patch(f"{RESOURCES}/{name}/scale", {"spec": {"replicas": replicas}})

    async def edit(self, spec: dict[str, Any], name: str = "train") -> httpx.Response:
        return await self._patch(f"{RESOURCES}/{name}", {"spec": spec})

    async def _patch(self, path: str, patch: dict[str, Any]) -> httpx.Response:
        kind = {"Content-Type": "application/merge-patch+json"}
        return await self.kubectl.patch(path, content=json.dumps(patch), headers=kind)

    async def delete(self, name: str = "train") -> None:
        await self.kubectl.request("DELETE", f"{RESOURCES}/{name}", json={})

    async def keep(self, finalizer: str, name: str = "train") -> None:
        """By somebody who takes all other finalizers away."""
        await self._patch(f"{RESOURCES}/{name}", {"metadata": {"finalizers": [finalizer]}})

    async def give_up(self, name: str = "train") -> None:
        """By somebody who does not wait for finalizers."""
        if self.item(name).get("metadata", {}).get("finalizers"):
            await self._patch(f"{RESOURCES}/{name}", {"metadata": {"finalizers": None}})
        await self.delete(name)

    async def put_pod(self, name: str, labels: dict[str, str]) -> None:
        """One that has no node and gets none."""
        nowhere = {"shoal.dev/nowhere": "yes"}
        spec = {"nodeSelector": nowhere, "containers": [{"name": "a", "image": "train:1"}]}
        made = await self.kubectl.post(PODS, json={"metadata": {"name": name, "labels": labels}, "spec": spec})
        assert made.status_code == 201, made.text

    async def remove_pod(self, name: str) -> None:
        await self.kubectl.request("DELETE", f"{PODS}/{name}", json={"gracePeriodSeconds": 0})

    def item(self, name: str = "train") -> dict[str, Any]:
        return self.cluster.objects[RESOURCES].get(name, {})

    def status(self, name: str = "train") -> dict[str, Any]:
        return dict(self.item(name).get("status") or {})

    def condition(self, kind: str, name: str = "train") -> dict[str, Any]:
        return next((one for one in self.status(name).get("conditions", ()) if one["type"] == kind), {})

    def notes(self, reason: str) -> list[str]:
        return [one["note"] for one in self.cluster.objects[EVENTS].values() if one["reason"] == reason]

    def has_job(self, name: str = "train") -> bool:
        return name in [view.job for view in self.shell.jobs()]

    def wanted(self) -> int:
        return int(self.shell.view("train").wanted) if self.has_job() else 0

    async def until(self, done: Callable[[], object], goal: str) -> None:
        for _ in range(5000):
            if done():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{goal}: {self.cluster.objects[RESOURCES]}")


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as ends:
        cluster = await ends.enter_async_context(before_the_cluster()) if REAL else FakeCluster()
        url = await ends.enter_async_context(served(cluster, free_port()))
        world = await ends.enter_async_context(running(folder / "store"))
        (folder / "kubeconfig").write_text(kubeconfig(url))
        found = Place(cluster, world, url, ClusterOptions(str(folder / "kubeconfig")))
        async with found.kubectl:
            yield found
