"""What Shoal counts on in a cluster: the same tests against the API server in this process and, by `make cluster`,
against the one that `KUBECONFIG` names, in a namespace that is made for them and deleted.

No image is needed: the pods ask for a node that there is not, and so wait. Resources under a server that fails on
purpose are in tests/unit/test_elastic_jobs.py and test_resource_storms.py, for both, too; nodes that run pods, are
tainted or lost in test_pod_launcher.py and its neighbours, against the server in this process alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asynchronous import asynchronous
from charts.desk import ClusterDesk, cluster_desk
from charts.rendering import CHART, Json
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.core.machine.events import Exited, Waiting
from shoal_controller.core.machine.pending import PendingReason
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.pod_launcher import KubernetesLauncher, connected, kubernetes_launcher
from shoal_controller.launchers.kubernetes.resource_kind import FINALIZER
from shoal_controller.launchers.kubernetes.section import PodOptions
from shoal_protos.plan import Member, Plan, Reason

SECTION: Json = {"image": "train:1", "nodeSelector": {"shoal.dev/nowhere": "yes"}, "graceSeconds": 10}
ITEM: Json = {
    "apiVersion": "shoal.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "demo"},
    "spec": {"command": ["python"], "lanes": 8, "workers": {"min": 2, "max": 8}, "kubernetes": SECTION},
}  # fmt: skip
JOB = JobSpec("demo", 1, launcher="kubernetes", command=("python",), run="a1b2", kubernetes=json.dumps(SECTION))
POD: Json = {
    "apiVersion": "v1", "kind": "Pod",
    "spec": {"nodeSelector": SECTION["nodeSelector"], "containers": [{"name": "a", "image": "train:1"}]},
}  # fmt: skip
QUOTA: Json = {
    "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}},
}  # fmt: skip
DEFINITION = CHART / "crd" / "elasticjobs.yaml"
TOLD_SECONDS = 100


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
async def test_server_side_apply_leaves_others_fields_drops_its_own_and_prunes_no_key_of_a_job(tmp_path: Path) -> None:
    apply = "apply --server-side --field-manager git --filename -"
    async with defined(tmp_path) as one:
        first = {**ITEM, "spec": {**ITEM["spec"], "maxRestarts": 7, "stallSeconds": 60}}
        await one.kubectl(apply, json.dumps(first))
        await one.kubectl("scale ej/demo --replicas 8")
        await one.kubectl(apply, json.dumps({**ITEM, "spec": {**ITEM["spec"], "maxRestarts": 9}}))
        spec = (await one.shows("ej/demo"))["spec"]
        assert (spec["workers"]["wanted"], spec["maxRestarts"]) == (8, 9) and "stallSeconds" not in spec
        assert spec["kubernetes"] == SECTION, "nothing of a section is pruned"
        sized = {**ITEM, "spec": {**ITEM["spec"], "workers": {"wanted": 4, "min": 2, "max": 8}}}
        assert ".spec.workers.wanted" in await one.refused(apply, json.dumps(sized)), "the size is of who scaled last"
        await one.kubectl(f"{apply} --force-conflicts", json.dumps(sized))
        assert (await one.shows("ej/demo"))["spec"]["workers"]["wanted"] == 4
        for spelling, right in (("max_restarts", "maxRestarts"), ("stall_seconds", "stallSeconds")):
            old = {**ITEM, "spec": {**ITEM["spec"], spelling: 5}}
            assert f"spec.{spelling}: write {right}" in await one.refused(f"{apply} --validate=false", json.dumps(old))
        unknown = {**ITEM, "spec": {**ITEM["spec"], "lane": 8}}
        await one.kubectl(f"{apply} --validate=false --force-conflicts", json.dumps(unknown))
        assert "lane" not in (await one.shows("ej/demo"))["spec"], "what the definition has not an API server drops"
        await one.kubectl("delete ej/demo")


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


@pytest.mark.timeout(300)
@asynchronous
async def test_a_pods_name_that_another_has_a_quota_and_an_earlier_run_are_waited_for_and_worlds_are_told(
    tmp_path: Path,
) -> None:
    stranger = {**POD, "metadata": {"name": "demo-w0"}}
    async with cluster_desk(tmp_path) as one, launcher(one) as (pods, news):
        await one.kubectl("apply --filename -", json.dumps(stranger))
        await pods.spawn("w0", JOB)
        assert "is not one of job demo" in (await until(news, Waiting)).why
        await one.kubectl("delete pod/demo-w0 --grace-period 0 --force")
        await one.sees("pod/demo-w0", lambda item: run_of(item) == "a1b2", "the worker's pod")

        pods.world_began(world("w0"), JOB)
        mark = {"shoal.dev/generation": "1", "shoal.dev/rank": "0"}
        await one.sees("pod/demo-w0", lambda item: item["metadata"].get("annotations", {}) | mark
                       == item["metadata"].get("annotations"), "its place in the world")  # fmt: skip

        await pods.spawn("w0", replace(JOB, run="c3d4"))
        await one.sees("pod/demo-w0", lambda item: run_of(item) == "c3d4", "the pod of the next run")

        await one.kubectl("apply --filename -", json.dumps(QUOTA))
        await one.sees("resourcequota/none", lambda item: item["status"].get("hard"), "the quota to count")
        await pods.spawn("w1", JOB)
        while (wait := await until(news, Waiting)).worker != "w1":
            pass
        assert wait.reason is PendingReason.QUOTA and not wait.hopeless, wait.why
        await one.kubectl("delete resourcequota/none")
        await one.sees("pod/demo-w1", run_of, "the pod that waited for the quota")


@pytest.mark.timeout(300)
@asynchronous
async def test_what_a_job_cannot_follow_is_a_condition_and_a_resource_that_goes_while_nobody_leads_is_noticed(
    tmp_path: Path,
) -> None:
    async with defined(tmp_path) as one:
        await one.shell.create(JobSpec("taken", 1))
        async with one.controller():
            await one.kubectl("apply --filename -", json.dumps({**ITEM, "metadata": {"name": "taken"}}))
            await one.sees("ej/taken", lambda item: accepted(item) == "NameTaken", "the name")
            await one.kubectl("apply --filename -", json.dumps(ITEM))
            await one.sees("ej/demo", lambda item: accepted(item) == "Accepted", "the job")
            await one.kubectl('patch ej/demo --type merge --patch \'{"spec":{"env":{"A":"2"}}}\'')
            await one.sees("ej/demo", lambda item: accepted(item) == "Immutable", "the refusal")
            await one.kubectl('patch ej/demo --type merge --patch \'{"spec":{"env":null,"workers":{"min":3}}}\'')
            await one.sees("ej/demo", lambda item: item["status"]["workers"]["min"] == 3, "the new minimum")
        await one.kubectl("delete ej/demo --wait=false")
        assert (await one.shows("ej/demo"))["metadata"]["deletionTimestamp"], "its finalizer keeps it"
        async with one.controller():
            await one.kubectl("wait ej/demo --for delete --timeout 60s")
            assert [view.job for view in one.shell.jobs()] == ["taken"]
            await one.shell.delete("taken")
            await one.sees("ej/taken", lambda item: accepted(item) == "Accepted", "the name that is free now")
            await one.kubectl("delete ej/taken --timeout 60s")


def run_of(pod: Json) -> str:
    return str(pod.get("metadata", {}).get("labels", {}).get("shoal.dev/run", ""))


def accepted(item: Json) -> str:
    """The reason of the condition."""
    conditions = item.get("status", {}).get("conditions", ())
    return next((str(one["reason"]) for one in conditions if one["type"] == "Accepted"), "")


def world(worker: str) -> Plan:
    members = (Member(worker, "an incarnation", "10.0.0.1:1"),)
    return Plan(1, 0, Reason.START, 8, 8, members, (), (), 1, 0, True)


@asynccontextmanager
async def launcher(one: ClusterDesk) -> AsyncIterator[tuple[KubernetesLauncher, asyncio.Queue[Any]]]:
    """And what the job is told."""
    news: asyncio.Queue[Any] = asyncio.Queue()

    async def submit(job: str, run: str, event: Any) -> None:
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
