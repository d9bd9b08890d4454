"""A job whose workers are pods of a test's cluster, each of them a real process; on hosts of their own where asked.

    with launched(3, 3, folder) as (job, pods):
        pods.node("n0", "karpenter.sh/disrupted")
        job.wait_undisturbed()

Node `n0` is host 1, and so on; the controller and the API server are on host 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from api_server import RESOURCES
from cluster_choice import FAKE_NODES
from faults.hosts import Hosts, Loopback
from integration.cluster import TRAIN, Cluster, ended, fork, until
from pod_cluster import PodCluster, pod_cluster
from pydantic.alias_generators import to_camel

OPTIONS: dict[str, Any] = {"max_steps": 30}
LOOPBACK = Loopback()


class JobOfPods(Cluster):
    """A controller with launcher kubernetes; its job trains until the file `go` is there."""

    token = "sesame"

    def __init__(self, hosts: Hosts | Loopback, pods: PodCluster, **given: Any) -> None:
        self.hosts, self.kubeconfig, self.api = hosts, pods.kubeconfig, pods.url
        self.host = hosts.address(0)
        super().__init__(**given)

    @property
    def _secrets(self) -> dict[str, str]:
        own = {"SHOAL_LAUNCHERS": "kubernetes,none", "KUBECONFIG": str(self.kubeconfig)}
        return {**super()._secrets, **own}

    def fork(self, who: str, call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> int:
        return fork_on(self.hosts, 0, call, arguments, env, log)

    def node_of(self, worker: str) -> str:
        return str(self.workers()[worker]["node"])


class JobOfResource(JobOfPods):
    """A job that is made from an ElasticJob, which `kubectl` is told of."""

    def _submit(self) -> None:
        spec = {to_camel(key): value for key, value in self.spec.items() if key not in ("job", "launcher")}
        item = {"apiVersion": "shoal.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": self.job_name}}
        self.kubectl("POST", "", {**item, "spec": spec})
        until("the resource to be a job", lambda: self._rest.get(f"/jobs/{self.job_name}").is_success)

    def kubectl(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = httpx.request(
            method, f"{self.api}{RESOURCES}{path}", json=body, trust_env=False, verify=False, timeout=100
        )
        assert answer.is_success, answer.text
        return dict(answer.json())

    def kubectl_scale(self, replicas: int) -> None:
        self.kubectl("PATCH", f"/{self.job_name}/scale", {"spec": {"replicas": replicas}})

    def resource(self) -> dict[str, Any]:
        return self.kubectl("GET", f"/{self.job_name}")

    def condition(self, kind: str) -> str:
        found = [one for one in self.resource()["status"]["conditions"] if one["type"] == kind]
        return str(found[0]["status"]) if found else ""

    def delete(self, pods: PodCluster) -> None:
        """And wait until nothing is left of it."""
        self.kubectl("DELETE", f"/{self.job_name}", {})
        until("the resource to go", lambda: not pods.do(lambda: pods.cluster.objects[RESOURCES]))
        until("its pods to go", lambda: not pods.do(pods.cluster.pods))
        assert self._rest.get(f"/jobs/{self.job_name}").status_code == 404


class ForkedPod:
    """A pod's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return ended().get(self.pid)


def fork_on(
    hosts: Hosts | Loopback, host: int, call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path
) -> int:
    """A fork of the warm process, on that host."""
    if isinstance(hosts, Loopback):
        return fork(call, arguments, env, log)
    given = {"space": hosts.space(host), "call": call, "arguments": dict(arguments)}
    return fork("integration.far_controllers:on_host", given, env, log)


def host_of(node: str) -> int:
    return 1 + int(node.removeprefix("n"))


Job = TypeVar("Job", bound=JobOfPods)


@contextmanager
def launched(
    workers: int,
    nodes: int,
    folder: Path,
    kind: type[Job] = JobOfPods,  # type: ignore[assignment]
    hosts: Hosts | Loopback = LOOPBACK,
    **more: Any,
) -> Iterator[tuple[Job, PodCluster]]:
    """A job of so many pods, in a cluster with so many nodes; forks of a warm process take the place of the image.

    `more`: options of the script.
    """

    def start(command: Sequence[str], env: Mapping[str, str], name: str) -> ForkedPod:
        call, options = command
        given = {**json.loads(options), "result": str(folder / f"{name}.result")}
        host = 0 if isinstance(hosts, Loopback) else host_of(env["SHOAL_FAILURE_DOMAIN"])
        return ForkedPod(fork_on(hosts, host, call, given, env, folder / f"{name}.log"))

    options = {**OPTIONS, "pace": 0.02, **more, "until": str(folder / "go")}
    section: dict[str, Any] = {"image": "registry/train:1", "graceSeconds": 30}
    if FAKE_NODES:
        section["scheduler"] = "shoal-tests"
    spec = {"launcher": "kubernetes", "command": [TRAIN, json.dumps(options)], "kubernetes": section}
    names = [f"n{number}" for number in range(nodes)]
    with pod_cluster(folder, start, *names) as pods:
        if not isinstance(hosts, Loopback):
            pods.kubelets.addresses |= {name: hosts.address(host_of(name)) for name in names}
        with kind(hosts, pods, workers=workers, options={**OPTIONS, **more}, spec=spec) as job:
            yield job, pods
