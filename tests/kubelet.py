"""Nodes of a test's cluster: they place pods, pull images, run pods, as real processes where asked, and end them."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from api_server import NODES, PODS, SECRETS, FakeCluster

Json = dict[str, Any]
LOOK_SECONDS = 0.02


class PodProcess(Protocol):
    """What a pod runs, leader of a group of its own."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""


Start = Callable[[Sequence[str], Mapping[str, str], str], PodProcess]
"""Starts a pod's command with this environment; the last one is the pod's name."""


class Kubelets:
    """All nodes' kubelets and the scheduler. `run` as a task."""

    def __init__(self, cluster: FakeCluster, per_node: int = 1, start: Start | None = None) -> None:
        self.cluster, self.per_node, self.start = cluster, per_node, start
        """`start`: pods are processes that it starts; None: they only say that they run."""
        self.lost_images: set[str] = set()
        self.silent: set[str] = set()
        """Nodes whose kubelet does nothing any more."""
        self.addresses: dict[str, str] = {}
        """Of nodes that are hosts of their own."""
        self.processes: dict[str, PodProcess] = {}
        """By uid."""
        self._node: dict[str, str] = {}
        """Where each of them runs."""
        self._due: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._dirty: dict[str, None] = {}
        """Pods that have changed; where a node has, or room was made, all of them are."""
        self._used: Counter[str] = Counter()
        cluster.changed = self._note

    def _note(self, path: str, kind: str, item: Json) -> None:
        if path == PODS and kind != "DELETED":
            self._dirty[item["metadata"]["name"]] = None
        if path == NODES or kind == "DELETED" or item.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            self._dirty |= dict.fromkeys(self.cluster.pods())
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            pods = self.cluster.pods()
            live = (pod for pod in pods.values() if pod["status"]["phase"] in ("Pending", "Running"))
            self._used = Counter(pod["spec"].get("nodeName", "") for pod in live)
            names, self._dirty = list(self._dirty if self.start is None else pods), {}
            for name in names:
                if name in pods:
                    self._look(pods[name])
            self._sweep()
            if self.start is None and not self._due:
                await self._changed.wait()
            else:
                await asyncio.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """A kubelet ends what runs on its node and has no object any more."""
        if not self._node:
            return
        known = {pod["metadata"]["uid"] for pod in self.cluster.pods().values()}
        for uid in [uid for uid in self._node if uid not in known and self._node[uid] not in self.silent]:
            del self._node[uid]
            if self.processes[uid].poll() is None:
                os.killpg(self.processes[uid].pid, signal.SIGKILL)

    def _look(self, pod: Json) -> None:
        node, phase = pod["spec"].get("nodeName"), pod["status"]["phase"]
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if node in self.silent or (node and node not in self.cluster.objects[NODES]):
            return None
        if pod["metadata"].get("deletionTimestamp"):
            return self._terminate(pod)
        if phase == "Pending" and not node:
            return self._place(pod)
        if phase == "Pending":
            return self._start(pod)
        process = self.processes.get(uid)
        if phase == "Running" and process is not None and (code := process.poll()) is not None:
            self.end(name, code)
        return None

    # ---- placing and starting

    def _place(self, pod: Json) -> None:
        nodes = self.cluster.objects[NODES].values()
        free = [node["metadata"]["name"] for node in nodes
                if not node["spec"].get("taints") and not node["spec"].get("unschedulable") and _is_ready(node)
                and self._used[node["metadata"]["name"]] < self.per_node]  # fmt: skip
        name = pod["metadata"]["name"]
        if free and not pod["spec"].get("schedulingGates"):
            self._used[free[0]] += 1
            self.cluster.update(PODS, name, lambda one: one["spec"].update(nodeName=free[0]))
        elif not pod["status"].get("conditions"):
            gated = bool(pod["spec"].get("schedulingGates"))
            message = f"0/{len(nodes)} nodes are available: {len(nodes)} Insufficient pods."
            condition = {
                "type": "PodScheduled", "status": "False", "reason": "SchedulingGated" if gated else "Unschedulable",
                "message": "Scheduling is blocked due to non-empty scheduling gates" if gated else message,
            }  # fmt: skip
            self.cluster.update(PODS, name, lambda one: one["status"].update(conditions=[condition]))

    def _start(self, pod: Json) -> None:
        container, name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        if container["image"] in self.lost_images:
            if not pod["status"].get("containerStatuses"):
                waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
                status = [{"name": container["name"], "state": {"waiting": waiting}}]
                self.cluster.update(PODS, name, lambda one: one["status"].update(containerStatuses=status))
            return
        if self.start is not None:
            self.processes[pod["metadata"]["uid"]] = self._process(self.start, pod, container)
            self._node[pod["metadata"]["uid"]] = pod["spec"]["nodeName"]
        running = [{"name": container["name"], "state": {"running": {}}}]
        fields = {"phase": "Running", "podIP": self._address(pod), "containerStatuses": running, "conditions": []}
        self.cluster.update(PODS, name, lambda one: one["status"].update(fields))

    def _address(self, pod: Json) -> str:
        return self.addresses.get(pod["spec"]["nodeName"], "127.0.0.1")

    def _process(self, start: Start, pod: Json, container: Json) -> PodProcess:
        env = {one["name"]: self._value(pod, one) for one in container["env"]}
        return start(container["command"], env, pod["metadata"]["name"])

    def _value(self, pod: Json, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "fieldRef" in source:
            return {"status.podIP": self._address(pod), "spec.nodeName": pod["spec"]["nodeName"]}[
                source["fieldRef"]["fieldPath"]
            ]
        reference = source["secretKeyRef"]
        secret = self.cluster.objects[SECRETS][reference["name"]]
        if reference["key"] in secret.get("stringData", {}):
            return str(secret["stringData"][reference["key"]])
        return base64.b64decode(secret["data"][reference["key"]]).decode()

    # ---- ending

    def end(self, name: str, code: int) -> None:
        """A pod's container has ended with this status; negative: the signal."""
        terminated = {"exitCode": code if code >= 0 else 128 - code, "reason": "Completed" if code == 0 else "Error"}
        fields = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [{"name": "worker", "state": {"terminated": terminated}}],
        }
        self.cluster.update(PODS, name, lambda one: one["status"].update(fields))

    def _terminate(self, pod: Json) -> None:
        """SIGTERM, and SIGKILL when the grace is over; the object goes with the process."""
        uid, loop = pod["metadata"]["uid"], asyncio.get_running_loop()
        process = self.processes.get(uid)
        if process is None or process.poll() is not None:
            self._due.pop(uid, None)
            return self.cluster.remove(PODS, pod["metadata"]["name"])
        due = loop.time() + pod["metadata"]["deletionGracePeriodSeconds"]
        if uid not in self._due:
            os.killpg(process.pid, signal.SIGTERM)
        self._due[uid] = min(due, self._due.get(uid, due))
        if loop.time() >= self._due[uid]:
            os.killpg(process.pid, signal.SIGKILL)
        return None


def _is_ready(node: Json) -> bool:
    return all(one["status"] == "True" for one in node["status"]["conditions"] if one["type"] == "Ready")
