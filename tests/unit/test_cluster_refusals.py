"""What a cluster refuses, from its API server to the job's reason: one sentence that names the thing and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from api_server import PODS
from asynchronous import asynchronous
from cluster_choice import NAMESPACE
from machine_driver import Driver
from pod_team import SPEC, Team, hurry, team
from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.effects import Spawn
from shoal_controller.core.machine.events import Exited, Spawned, Waiting
from shoal_controller.core.machine.spec import Phase

IN_VAIN = "no worker could be started in 3 attempts; worker w2: "
RBAC = (
    f'pods is forbidden: User "system:serviceaccount:{NAMESPACE}:shoal" cannot create resource "pods" in API group "" '
    f'in the namespace "{NAMESPACE}"'
)
POLICY = 'pods "demo-w0" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities'


def without_rights(one: Team) -> None:
    one.cluster.fail("POST", PODS, 403, times=100, message=RBAC)


def without_image(one: Team) -> None:
    one.kubelets.lost_images.add("registry/train:1")


def against_a_policy(one: Team) -> None:
    one.cluster.fail("POST", PODS, 403, times=100, message=POLICY)


def without_namespace(one: Team) -> None:
    one.cluster.fail("POST", PODS, 404, times=100, message=f'namespaces "{NAMESPACE}" not found')


async def wait_of(folder: Path, refuse: Callable[[Team], None], *, hopeless: bool) -> Waiting:
    """What the launcher tells of a worker in such a cluster."""
    async with team(folder, "a") as one:
        refuse(one)
        await one.launcher.spawn("w0", SPEC)

        def found() -> Waiting | None:
            waits = [news for news in one.reports if isinstance(news, Waiting)]
            return next((wait for wait in waits if wait.hopeless == hopeless and "scheduler" not in wait.why), None)

        await one.until(found, "nothing was told")
        await one.launcher.kill("w0", SPEC)
        await one.hears(Exited)
        wait = found()
        assert wait is not None
        return wait


def failed_by(wait: Waiting) -> Driver:
    """A job of which every worker meets that."""
    job = Driver(wanted=1, launcher="kubernetes", max_restarts=0)
    for attempt in range(3):
        worker = f"w{attempt}"
        if attempt:
            while Spawn(worker) not in job.wait(1):
                assert job.now < 100, "it is not tried again"
        job.feed(Spawned(worker, Place.of_pod(f"demo-{worker}", f"uid-{worker}")))
        job.feed(Waiting(worker, wait.reason, wait.why, wait.hopeless))
    return job


@pytest.mark.parametrize(
    ("refuse", "sentence"),
    [
        (
            without_rights,
            f"the controller may not do this in namespace {NAMESPACE}: {RBAC}. Give its service account the rights",
        ),
        (
            without_image,
            'ImagePullBackOff: Back-off pulling image "registry/train:1"; '
            "check `kubernetes.image` and `kubernetes.imagePullSecrets`",
        ),
        (against_a_policy, f"the cluster refuses the pod of job demo: {POLICY}"),
        (without_namespace, f'namespace {NAMESPACE} cannot be used: namespaces "{NAMESPACE}" not found'),
    ],
    ids=["rights", "image", "policy", "namespace"],
)
@asynchronous
async def test_what_no_waiting_mends_fails_the_job_with_the_clusters_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[Team], None], sentence: str
) -> None:
    hurry(monkeypatch)
    job = failed_by(await wait_of(tmp_path, refuse, hopeless=True))
    assert (job.view.phase, job.view.reason) == (Phase.FAILED, IN_VAIN + sentence)


@asynchronous
async def test_a_quota_of_0_is_waited_for_and_named_in_the_jobs_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    wait = await wait_of(tmp_path, lambda one: setattr(one.cluster, "quota", 0), hopeless=False)
    job = Driver(wanted=1, launcher="kubernetes", stall_seconds=20.0, max_restarts=0)
    job.feed(Spawned("w0", Place.of_pod("demo-w0", "uid-w0")))
    job.feed(wait)
    job.wait(60)
    assert job.view.phase is not Phase.FAILED
    assert job.view.reason.endswith(
        '1 worker waits to start for 60 s: pods "demo-w0" is forbidden: exceeded quota: team, used: pods=0, limited: 0'
        "; have the quota raised, or ask for fewer workers"
    )


@asynchronous
async def test_a_resource_that_no_node_has_is_waited_for_and_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    async with team(tmp_path) as one:
        await one.launcher.spawn("w0", SPEC)
        await one.until(lambda: one.reports and "nodes are available" in one.reports[-1].why, "the scheduler's words")
        wait = one.reports[-1]
    job = Driver(wanted=1, launcher="kubernetes", stall_seconds=20.0, max_restarts=0)
    job.feed(Spawned("w0", Place.of_pod("demo-w0", "uid-w0")))
    job.feed(wait)
    job.wait(60)
    assert job.view.phase is not Phase.FAILED
    assert job.view.reason.endswith(
        "Insufficient pods; add nodes that have room, or ask for less in `kubernetes.resources`"
    )
