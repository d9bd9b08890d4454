"""What Shoal counts on in a cluster: the same tests against the API server in this process and, by `make cluster`,
against the one that `KUBECONFIG` names, in a namespace that is made for them and deleted.

No image is needed: the pods ask for a node that there is not, and so wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asynchronous import asynchronous
from charts.desk import ClusterDesk, cluster_desk
from charts.rendering import CHART, Json
from shoal_controller.core.machine.events import Exited, Waiting
from shoal_controller.core.machine.pending import PendingReason
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.elastic_jobs.resource_kind import FINALIZER
from shoal_controller.launchers.kubernetes.connect import connected, kubernetes_launcher
from shoal_controller.launchers.kubernetes.options import PodOptions
from shoal_controller.launchers.kubernetes.pod_launcher import KubernetesLauncher
from shoal_controller.worker_tokens import WorkerTokens

SECTION: Json = {"image": "train:1", "node_selector": {"shoal.dev/nowhere": "yes"}, "grace_seconds": 10}
ITEM: Json = {
    "apiVersion": "shoal.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "demo"},
    "spec": {"command": ["python"], "lanes": 8, "workers": {"min": 2, "max": 8}, "kubernetes": SECTION},
}  # fmt: skip
JOB = JobSpec("demo", 1, launcher="kubernetes", command=("python",), run="a1b2", kubernetes=json.dumps(SECTION))
DEFINITION = CHART / "crd" / "elasticjobs.yaml"
TOLD_SECONDS = 30


@asynccontextmanager
async def defined(folder: Path) -> AsyncIterator[ClusterDesk]:
    async with cluster_desk(folder) as one:
        await one.kubectl(f"apply --filename {DEFINITION}")
        await one.kubectl(
            "wait customresourcedefinitions/elasticjobs.shoal.dev --for condition=Established --timeout 30s"
        )
        yield one


@pytest.mark.timeout(300)
@asynchronous
async def test_a_cluster_takes_the_definition_and_refuses_what_cannot_be_in_the_rules_words(tmp_path: Path) -> None:
    async with cluster_desk(tmp_path) as one:
        await one.kubectl(f"apply --dry-run=server --filename {DEFINITION}")
    async with defined(tmp_path) as one:
        for key, value, sentence in (
            ("lane", 8, 'unknown field "spec.lane"'),
            ("workers", {"min": 9}, "spec.workers.min must be at most spec.lanes"),
            ("workers", {"min": 3, "wanted": 2}, "spec.workers.wanted must be at least spec.workers.min"),
        ):
            wrong = {**ITEM, "spec": {**ITEM["spec"], key: value}}
            assert sentence in await one.refused("apply --filename -", json.dumps(wrong))
        wrong = {**ITEM, "metadata": {"name": "a" * 53}}
        assert "at most 52 characters" in await one.refused("apply --filename -", json.dumps(wrong))


@pytest.mark.timeout(300)
@asynchronous
async def test_a_resource_is_followed_scaled_told_of_and_goes_with_its_job(tmp_path: Path) -> None:
    async with defined(tmp_path) as one, one.controller():
        await one.kubectl("apply --filename -", json.dumps(ITEM))
        made = await one.sees("ej/demo", lambda item: item.get("status", {}).get("phase"), "a status")
        assert made["metadata"]["finalizers"] == [FINALIZER] and made["spec"]["workers"]["min"] == 2
        await one.kubectl("scale ej/demo --replicas 8")
        await one.sees("ej/demo", lambda item: item["status"]["workers"]["wanted"] == 8, "eight")
        assert "spec.lanes" in await one.refused('patch ej/demo --type merge --patch \'{"spec":{"lanes":4}}\'')
        scaled = await one.shows("ej/demo")
        assert scaled["metadata"]["generation"] == 2 and one.shell.view("demo").wanted == 8
        await one.kubectl("delete ej/demo --timeout 60s")
        assert not await one.shows("ej/demo") and not one.shell.jobs()


@pytest.mark.timeout(300)
@asynchronous
async def test_pods_are_made_adopted_by_uid_and_gone_when_they_are_killed(tmp_path: Path) -> None:
    async with defined(tmp_path) as one:
        async with launcher(one) as (first, _):
            await first.spawn("w0", JOB)
            pod = await one.sees("pod/demo-w0", lambda item: item.get("metadata"), "the pod")
        assert pod["spec"]["restartPolicy"] == "Never" and pod["spec"]["shareProcessNamespace"] is True
        assert pod["metadata"]["labels"]["shoal.dev/worker"] == "w0"
        async with launcher(one) as (second, news):
            places = await second.adopt(["w0", "w1"], JOB)
            assert places["w1"] is None, "it was never made"
            wait = await until(news, Waiting)
            assert wait.reason is PendingReason.UNSCHEDULABLE and not wait.hopeless, wait.why
            await second.kill("w0", JOB)
            assert (await until(news, Exited)).worker == "w0"
            assert not await one.shows("pod/demo-w0")
            await second.spawn("w1", JOB)
            await one.sees("pod/demo-w1", lambda item: item.get("metadata"), "the other pod")
            await one.kubectl("delete pod/demo-w1 --grace-period 0 --force")
            assert "was deleted" in (await until(news, Exited)).why
            await second.forget("demo")
        assert not (await one.shows("secret/demo-shoal-token"))


@asynccontextmanager
async def launcher(one: ClusterDesk) -> AsyncIterator[tuple[KubernetesLauncher, asyncio.Queue[Any]]]:
    """And what the job is told."""
    news: asyncio.Queue[Any] = asyncio.Queue()

    async def submit(job: str, event: Any) -> None:
        news.put_nowait(event)

    pods = PodOptions(lambda: ("shoal-workers:7071",), WorkerTokens("sesame"))
    async with connected(one.options) as api, kubernetes_launcher(api, pods, one.options, submit) as found:
        yield found, news


async def until(news: asyncio.Queue[Any], kind: type) -> Any:
    """The next that is told of this kind."""
    async with asyncio.timeout(TOLD_SECONDS):
        while not isinstance(found := await news.get(), kind):
            pass
    return found
