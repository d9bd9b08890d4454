"""Where kubectl and helm are typed: against an API server in this process, or against the cluster of the kubeconfig
that `SHOAL_CLUSTER` names (`make cluster`); beside it the part of a controller that makes jobs from resources.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from api_faults import served
from api_server import RESOURCES, kubeconfig
from charts.rendering import HELMS, PROGRAMS, ROOT, Json, with_images
from cluster_choice import NAMESPACE
from kubelet import Kubelets
from ports import free_port
from shoal_controller.elastic_jobs.reconciler import reconciling
from shoal_controller.launchers.kubernetes.pod_launcher import connected
from shoal_controller.launchers.kubernetes.section import ClusterOptions
from small_machine import SmallMachine, running
from whole_api import WholeCluster

COMMAND_SECONDS = 100
LOOKS = 100
REAL = os.environ.get("SHOAL_CLUSTER", "")


def page_manifest() -> str:
    """The resource that the page of ElasticJobs shows."""
    page = (ROOT / "docs" / "elastic_jobs.md").read_text()
    found = re.findall(r"```yaml\n(apiVersion: \S+\nkind: ElasticJob.*?)```", page, re.S)
    return str(found[0])


class Desk:
    """A cluster, and who types."""

    def __init__(self, cluster: WholeCluster, folder: Path, helm: str) -> None:
        self.cluster, self._folder, self._helm = cluster, folder, helm
        self.options = ClusterOptions(str(folder / "kubeconfig"))
        self.shell: Any = None

    async def types(self, command: str, given: str = "") -> str:
        """What it prints. The words `kubectl` and `helm` are the tests' own programs."""
        code, printed = await self.tries(command, given)
        assert code == 0, f"{command}: {printed}"
        return printed

    async def tries(self, command: str, given: str = "") -> tuple[int, str]:
        word, *arguments = shlex.split(command)
        programs = {"kubectl": PROGRAMS / "helm4" / "kubectl", "helm": HELMS[self._helm]}
        home = {"HOME": str(self._folder), "KUBECONFIG": self.options.kubeconfig, "PATH": os.environ["PATH"]}
        if word == "helm":
            arguments = [*map(str, with_images(arguments))]
        process = await asyncio.create_subprocess_exec(
            programs[word], *arguments, cwd=ROOT, env=home, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(COMMAND_SECONDS):
            printed, _ = await process.communicate(given.encode())
        return process.returncode or 0, printed.decode()

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[None]:
        async with connected(self.options) as api, reconciling(api, self.shell):
            yield

    def item(self, name: str = "demo") -> Json:
        return self.cluster.objects[RESOURCES].get(name, {})

    async def until(self, done: Callable[[], object], goal: str) -> None:
        for _ in range(5000):
            if done():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{goal}: {self.cluster.objects[RESOURCES]}")


@asynccontextmanager
async def desk(folder: Path, helm: str = "helm4") -> AsyncIterator[Desk]:
    cluster = WholeCluster()
    async with served(cluster, free_port()) as url, running(folder / "store", SmallMachine()) as world:
        (folder / "kubeconfig").write_text(kubeconfig(url))
        found = Desk(cluster, folder, helm)
        found.shell = world.shell
        yield found


class ClusterDesk(Desk):
    """One that asks the API server alone, whichever it is, in a namespace that is the test's."""

    async def kubectl(self, command: str, given: str = "") -> str:
        return await self.types(f"kubectl --namespace {self.options.namespace} {command}", given)

    async def refused(self, command: str, given: str = "") -> str:
        code, printed = await self.tries(f"kubectl --namespace {self.options.namespace} {command}", given)
        assert code, f"{command}: {printed}"
        return printed

    async def shows(self, named: str) -> Json:
        """An object, or a list; empty where there is none."""
        found = await self.kubectl(f"get {named} --ignore-not-found --output json")
        return dict(json.loads(found or "{}"))

    async def sees(self, named: str, done: Callable[[Json], object], goal: str) -> Json:
        for _ in range(LOOKS):
            if done(found := await self.shows(named)):
                return found
            await asyncio.sleep(0.2)
        raise AssertionError(f"{goal}: {found}")


@asynccontextmanager
async def cluster_desk(folder: Path) -> AsyncIterator[ClusterDesk]:
    """In the cluster that is named, else in the process."""
    cluster = WholeCluster()
    kubelets = asyncio.create_task(Kubelets(cluster).run())
    async with served(cluster, free_port()) as url, running(folder / "store", SmallMachine()) as world:
        (folder / "kubeconfig").write_text(kubeconfig(url))
        found = ClusterDesk(cluster, folder, "helm4")
        found.shell, namespace = world.shell, NAMESPACE
        if REAL:
            namespace = f"shoal-test-{secrets.token_hex(4)}"
            found.options = ClusterOptions(REAL, namespace)
            await found.types(f"kubectl create namespace {namespace}")
        else:
            found.options = ClusterOptions(str(folder / "kubeconfig"), namespace)
        try:
            yield found
        finally:
            if REAL:
                await found.types(f"kubectl delete namespace {namespace} --wait=false")
            kubelets.cancel()
            await asyncio.wait([kubelets])
