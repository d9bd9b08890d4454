"""Gangs: what Kueue and Volcano are told, and what is said where they are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_server import POD_GROUPS, PODS
from asynchronous import asynchronous
from cluster_choice import NAMESPACE
from pod_team import SECTION, SPEC, Team, hurry, team
from shoal_controller.core.machine.events import Exited, Spawned, Waiting
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.job_defaults import section_of
from shoal_controller.launchers.kubernetes.pod_manifest import PodTerms, pod

NO_VOLCANO = (
    "`kubernetes.gang` of job demo is volcano, but the cluster has no podgroups.scheduling.volcano.sh; install Volcano "
    "in it, or leave `gang` out"
)


def spec_of(gang: str, **section: Any) -> JobSpec:
    return replace(SPEC, min_workers=2, kubernetes=json.dumps({**SECTION, "gang": gang, **section}))


def made(worker: str, gang: str, **section: Any) -> dict[str, Any]:
    spec = spec_of(gang, **section)
    return pod(worker, PodTerms(spec, section_of(spec), ("c:7071",), False))


def group(one: Team) -> dict[str, Any]:
    return one.cluster.objects[POD_GROUPS].get("demo-shoal", {})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_the_first_pods_are_one_group_of_kueue_and_every_further_one_is_alone() -> None:
    first, second, third = (made(f"w{n}", "kueue", queue="team-a")["metadata"] for n in range(3))
    for metadata in (first, second):
        assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "demo-a1b2c3d4"
        assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    assert third["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io/pod-group-name" not in third["labels"] and "annotations" not in third


def test_kueue_waits_for_nobody_in_the_place_of_a_member_that_has_ended() -> None:
    annotations = made("w0", "kueue", queue="team-a")["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/retriable-in-group"] == "false"


def test_all_pods_of_a_job_are_in_its_pod_group_and_are_placed_by_volcano() -> None:
    for worker in ("w0", "w7"):
        found = made(worker, "volcano")
        assert found["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": "demo-shoal"}
        assert found["spec"]["schedulerName"] == "volcano"
    assert made("w0", "volcano", scheduler="volcano-of-team-a")["spec"]["schedulerName"] == "volcano-of-team-a"


@asynchronous
async def test_a_pod_group_is_there_before_the_first_pod_and_goes_with_its_job(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        one.cluster.missing.clear()
        spec = spec_of("volcano", queue="team-a", priorityClass="low")
        for worker in ("w0", "w1"):
            await one.launcher.spawn(worker, spec)
        await one.until(lambda: one.count(Spawned) == 2, "both run")
        posts = [path for method, path in one.cluster.requests if method == "POST"]
        assert posts.count(POD_GROUPS) == 1 and posts.index(POD_GROUPS) < posts.index(PODS)
        assert group(one)["spec"] == {"minMember": 2, "queue": "team-a", "priorityClassName": "low"}
        assert group(one)["metadata"]["labels"]["shoal.dev/job"] == "demo"
        await one.launcher.forget("demo")
        assert group(one) == {} and one.cluster.pods() == {}


@asynchronous
async def test_the_pod_group_of_an_earlier_run_becomes_that_of_the_next(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        one.cluster.missing.clear()
        await one.launcher.spawn("w0", spec_of("volcano"))
        await one.hears(Spawned)
        await one.launcher.release()
        again = replace(spec_of("volcano"), run="e5f6", min_workers=1)
        await one.launcher.adopt([], again)
        await one.launcher.spawn("w0", again)
        await one.until(lambda: one.run_of("demo-w0") == "e5f6", "a pod of the new run")
        assert group(one)["spec"]["minMember"] == 1 and group(one)["metadata"]["labels"]["shoal.dev/run"] == "e5f6"


@asynchronous
async def test_a_cluster_without_volcano_is_one_sentence_and_no_pod(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", spec_of("volcano"))
        wait, *_ = await one.hears(Waiting)
        assert (wait.why, wait.hopeless) == (NO_VOLCANO, True) and one.cluster.pods() == {}
        await one.launcher.kill("w0", SPEC)
        await one.hears(Exited)
        await one.launcher.forget("demo")


@asynchronous
async def test_a_controller_that_may_make_no_pod_groups_names_the_value_of_the_chart(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        one.cluster.missing.clear()
        one.cluster.forbidden.add(POD_GROUPS)
        await one.launcher.spawn("w0", spec_of("volcano"))
        wait, *_ = await one.hears(Waiting)
        refusal = 'podgroups is forbidden: User "shoal" cannot use resource "podgroups"'
        assert wait.hopeless and wait.why.endswith(f"{refusal}. Set `rbac.volcano` of the chart to true")
        await one.launcher.kill("w0", SPEC)
        await one.launcher.forget("demo")


@asynchronous
async def test_a_group_that_volcano_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        one.cluster.missing.clear()
        words = 'admission webhook "validatepodgroup.volcano.sh" denied the request: queue team-b not found'
        one.cluster.fail("POST", POD_GROUPS, 403, message=words)
        await one.launcher.spawn("w0", spec_of("volcano", queue="team-b"))
        wait, *_ = await one.hears(Waiting)
        assert wait.why.endswith(f"the cluster refuses its PodGroup in namespace {NAMESPACE}: {words}")
        await one.hears(Spawned)


@asynchronous
async def test_a_pod_that_only_the_finalizer_of_kueue_keeps_has_ended(tmp_path: Path) -> None:
    """Kueue keeps the members of a group until the group is done; on a lost node nobody says that they have ended."""
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        one.kubelets.silent.add("a")
        one.cluster.update(PODS, "demo-w0", lambda pod: pod["metadata"].update(finalizers=["kueue.x-k8s.io/managed"]))
        one.cluster.node("a")
        one.cluster.update("/api/v1/nodes", "a", lambda node: node["status"].update(
            conditions=[{"type": "Ready", "status": "Unknown"}]))  # fmt: skip
        await one.settle()
        await one.launcher.kill("w0", SPEC)
        assert (await one.hears(Exited))[0].why == (
            "its pod demo-w0 was deleted, and only its finalizers keep it (kueue.x-k8s.io/managed)"
        )
