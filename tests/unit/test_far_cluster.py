"""Nodes that the tests bring to a cluster by requests alone, as `make cluster NODES=fake` does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from api_faults import served
from api_server import NODES, PODS, SECRETS, FakeCluster, Json, kubeconfig
from asynchronous import asynchronous
from far_cluster import FarCluster, far_cluster
from kubelet import Kubelets
from ports import free_port
from tiers import check

pytestmark = check("serves the API of a cluster")
SECRET: Json = {"metadata": {"name": "key"}, "data": {"a": "c2VzYW1l"}}
KEY: Json = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "a"}}}


class Process:
    """What a pod runs: nothing."""

    pid = 0

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status


class Place:
    """A server, and nodes that know it by requests."""

    def __init__(self, server: FakeCluster, far: FarCluster) -> None:
        self.server, self.far = server, far
        self.started: dict[str, tuple[dict[str, str], Process]] = {}
        """By pod: its environment and its process."""

    def start(self, _: Sequence[str], env: Mapping[str, str], name: str) -> Process:
        self.started[name] = dict(env), Process()
        return self.started[name][1]

    async def pod(self, name: str) -> None:
        container = {"name": "worker", "image": "i", "command": ["x"], "env": [KEY]}
        manifest = {"metadata": {"name": name}, "spec": {"containers": [container]}}
        await self.far._api.create(PODS, {"apiVersion": "v1", "kind": "Pod", **manifest})

    async def until(self, name: str, phase: str, reason: str = "") -> Json:
        """The pod, once the server has it so."""
        async with asyncio.timeout(100):
            while True:
                pod = self.server.pods().get(name, {"status": {"phase": "gone"}})
                why = [one.get("message", "") for one in pod["status"].get("conditions", ())]
                if pod["status"]["phase"] == phase and (not reason or any(reason in one for one in why)):
                    return pod
                await asyncio.sleep(0.02)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    server = FakeCluster()
    server.put(SECRETS, SECRET)
    async with served(server, free_port()) as url:
        (folder / "kubeconfig").write_text(kubeconfig(url))
        async with far_cluster({}, str(folder / "kubeconfig")) as far:
            found = Place(server, far)
            running = asyncio.create_task(Kubelets(far, start=found.start).run())  # type: ignore[arg-type]
            try:
                yield found
            finally:
                running.cancel()
                await asyncio.wait([running])
    assert not server.objects[NODES], "its nodes go with it"


@asynchronous
async def test_a_pod_is_bound_started_with_its_secrets_and_told_of_by_requests(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        one.far.node("a")
        await one.pod("w0")
        pod = await one.until("w0", "Running")
        assert (pod["spec"]["nodeName"], pod["status"]["podIP"]) == ("a", "127.0.0.1")
        env, process = one.started["w0"]
        assert env == {"KEY": "sesame"} and len(one.started) == 1
        process.status = 3
        ended = await one.until("w0", "Failed")
        assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


@asynchronous
async def test_a_pod_waits_for_a_node_that_is_not_tainted_and_goes_when_it_is_deleted(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        one.far.node("a", "karpenter.sh/disrupted")
        await one.pod("w0")
        await one.until("w0", "Pending", "Insufficient pods")
        one.far.node("a")
        await one.until("w0", "Running")
        one.started["w0"][1].status = 0
        await one.far._api.delete(f"{PODS}/w0", {"gracePeriodSeconds": 30})
        await one.until("w0", "gone")
