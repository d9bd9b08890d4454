"""Nodes of the tests in a cluster that is another process (`make cluster NODES=fake`): what `kubelet.py` asks of the
one in this process goes as requests to its API server, as those of a scheduler and of kubelets.

A pod is bound, its status is patched, its object is removed. What was asked is seen at once, as if the server had taken
it, until it has answered. Nodes have a label of the tests, and are deleted with them; pods name a scheduler that there
is not, so no other one places them.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any

from api_server import NODES, PODS, SECRETS
from cluster_choice import NAMESPACE, REAL
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ObjectWatch
from shoal_controller.launchers.kubernetes.pod_launcher import connected
from shoal_controller.launchers.kubernetes.section import ClusterOptions

Json = dict[str, Any]
LABEL = "shoal.dev/test-node"
SYNCED_SECONDS = 100
AT_ONCE: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}


class FarCluster:
    """What `Kubelets` and the tests ask of a cluster."""

    def __init__(self, api: ClusterApi, shown: Mapping[str, dict[str, Json]]) -> None:
        """`shown`: what is watched already, by path."""
        self._api = api
        self.changed: Callable[[str, str, Json], None] = lambda path, kind, item: None
        selectors = {PODS: "", SECRETS: "", NODES: f"{LABEL}=yes"}
        self.watches = {
            path: ObjectWatch(api, path, selector, partial(self._on_change, path))
            for path, selector in selectors.items()
        }
        self._ahead: dict[str, Json] = {}
        """Pods as they were asked to be, by name, until the server has answered."""
        self._removed: set[str] = set()
        """Uids of pods that were asked to go."""
        self._asks: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._shown = shown

    # ---- what there is

    @property
    def objects(self) -> Mapping[str, Mapping[str, Json]]:
        secrets, nodes = (self.watches[path].items for path in (SECRETS, NODES))
        ready = {name: {"spec": {}, **node} for name, node in nodes.items() if node.get("status", {}).get("conditions")}
        return ChainMap({PODS: self.pods(), SECRETS: secrets, NODES: ready}, dict(self._shown))

    def pods(self) -> dict[str, Json]:
        known = {name: self._ahead.get(name, item) for name, item in self.watches[PODS].items.items()}
        return {
            name: {"status": {"phase": "Pending"}, **item}
            for name, item in known.items()
            if item["metadata"]["uid"] not in self._removed
        }

    def _on_change(self, path: str, name: str, item: Json | None) -> None:
        self.changed(path, "DELETED" if item is None else "MODIFIED", item or {"metadata": {"name": name}})

    # ---- what is asked

    def update(self, path: str, name: str, change: Callable[[Json], object]) -> None:
        """Of a pod: the node that it is bound to, or its status."""
        before = self.pods()[name]
        after = deepcopy(before)
        change(after)
        self._ahead[name] = after
        self._asks.put_nowait(partial(self._write, path, before, after))

    async def _write(self, path: str, before: Json, after: Json) -> None:
        name = after["metadata"]["name"]
        try:
            if (node := after["spec"].get("nodeName")) != before["spec"].get("nodeName"):
                target = {"apiVersion": "v1", "kind": "Node", "name": node}
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
                await self._api.create(f"{path}/{name}/binding", binding)
                self.watches[path].learn(await self._api.get(f"{path}/{name}"))
            else:
                written = {"metadata": {"uid": after["metadata"]["uid"]}, "status": after["status"]}
                self.watches[path].learn(await self._api.patch(f"{path}/{name}/status", written))
        finally:
            if self._ahead.get(name) is after:
                del self._ahead[name]

    def remove(self, path: str, name: str) -> None:
        if path == PODS:
            self._removed.add(self.pods()[name]["metadata"]["uid"])
        self._asks.put_nowait(lambda: self._api.delete(f"{path}/{name}", AT_ONCE))

    def node(self, name: str, *taints: str, ready: str = "True", **spec: Any) -> None:
        keys = [{"key": key, "effect": "NoSchedule"} for key in taints]
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        self._asks.put_nowait(partial(self._put_node, name, {**spec, "taints": keys}, status))

    async def _put_node(self, name: str, spec: Json, status: Json) -> None:
        """● An API server gives a new node the taint of one that is not ready. It has room once it has a status."""
        made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {LABEL: "yes"}}}
        with suppress(ClusterRefusal):  # it is there
            await self._api.create(NODES, made)
        await self._api.patch(f"{NODES}/{name}", {"spec": spec})
        await self._api.patch(f"{NODES}/{name}/status", {"status": status})

    async def ask(self) -> None:
        """One request after the other, until it is cancelled."""
        while True:
            request = await self._asks.get()
            with suppress(ClusterRefusal):  # another one was quicker: the watch tells how it is
                await request()

    async def end(self) -> None:
        for name in list(self.watches[NODES].items):
            with suppress(ClusterRefusal):
                await self._api.delete(f"{NODES}/{name}", AT_ONCE)


@asynccontextmanager
async def far_cluster(shown: Mapping[str, dict[str, Json]], kubeconfig: str = REAL) -> AsyncIterator[FarCluster]:
    """In the cluster that a kubeconfig names."""
    async with connected(ClusterOptions(kubeconfig, NAMESPACE)) as api:
        cluster = FarCluster(api, shown)
        tasks = [asyncio.create_task(one.run()) for one in cluster.watches.values()]
        tasks.append(asyncio.create_task(cluster.ask()))
        try:
            async with asyncio.timeout(SYNCED_SECONDS):
                await asyncio.gather(*(one.synced.wait() for one in cluster.watches.values()))
            yield cluster
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await cluster.end()
