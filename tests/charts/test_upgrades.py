"""What an upgrade keeps, honours and refuses, by helm and by whatever applies manifests that were rendered without a
cluster, as Argo CD does; against an API server in this process.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from api_server import SECRETS
from asynchronous import asynchronous
from charts.desk import Desk, desk
from charts.rendering import NEWEST, Json, helm_without_cluster
from cluster_choice import NAMESPACE
from whole_api import DEPLOYMENTS

CHART = f"shoal ./helm/shoal --namespace {NAMESPACE}"
REFUSED = {
    "etcd.replicas=5": "the etcd of this release has 3 members, and an upgrade does not make them 5",
    "etcd.volume.size=16Gi": "the volumes of the members were made with 8589934592 bytes, and an upgrade does not make "
    "them 17179869184",
    "etcd.volume.storageClass=fast": "the volumes of the members were made with the storage class of the cluster, and "
    "an upgrade does not move them to fast",
    "tls.source=generated": "the members of etcd know each other by addresses without TLS",
    "store=embedded,controller.replicas=1": "the jobs of this release are in the chart's etcd under /shoal, and an "
    "upgrade does not move them to an embedded store",
    "etcd.external.prefix=/other": "and an upgrade does not move them to the chart's etcd under /other",
    "etcd.external.endpoints={10.0.0.1:2379}": "does not move them to an etcd of your own under /shoal",
}
"""By what is changed: what is said of it."""


def rendered(values: str) -> str:
    """The chart with these values, as without a cluster."""
    done = helm_without_cluster(NEWEST, *shlex.split(f"template {CHART} {values}"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def standing(one: Desk) -> dict[str, Json]:
    """The controllers and etcd."""
    kinds = (DEPLOYMENTS, DEPLOYMENTS.replace("deployments", "statefulsets"))
    return {name: item["spec"] for kind in kinds for name, item in one.cluster.objects[kind].items()}


def made(one: Desk) -> dict[str, Json]:
    """The secrets of the release with what is in them."""
    items = one.cluster.objects[SECRETS].values()
    return {item["metadata"]["name"]: item["data"] for item in items if item["type"] != "helm.sh/release.v1"}


def annotations(one: Desk) -> Json:
    """Of the controllers' pods."""
    (deployment,) = one.cluster.objects[DEPLOYMENTS].values()
    return dict(deployment["spec"]["template"]["metadata"].get("annotations") or {})


@pytest.mark.timeout(180)
@asynchronous
async def test_secrets_that_are_made_once_are_kept_and_nothing_is_replaced_for_nothing(tmp_path: Path) -> None:
    values = "--set tls.source=generated --set tls.workers=true"
    async with desk(tmp_path) as one:
        await one.types(f"helm install {CHART} {values}")
        first = made(one)
        assert set(first) >= {"shoal-token", "shoal-ca", "shoal-tls", "shoal-etcd-tls", "shoal-worker-tls"}
        (before,) = (item["spec"]["template"] for item in one.cluster.objects[DEPLOYMENTS].values())
        await one.types(f"helm upgrade {CHART} {values} --set controller.replicas=3 --set etcd.volume.size=8192Mi")
        assert made(one) == first
        (after,) = (item["spec"] for item in one.cluster.objects[DEPLOYMENTS].values())
        assert after["replicas"] == 3 and after["template"] == before


@pytest.mark.timeout(180)
@asynchronous
async def test_what_an_upgrade_cannot_do_to_a_store_is_refused_in_one_sentence_before_its_controllers_and_etcd_change(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as one:
        await one.types(f"helm install {CHART}")
        before = standing(one)
        for given, sentence in REFUSED.items():
            code, printed = await one.tries(f"helm upgrade {CHART} --set '{given}'")
            assert code and sentence in printed, printed
            assert "; leave " in printed, "what to do"
            assert standing(one) == before, given
        await one.types(f"helm upgrade {CHART} --set controller.replicas=3")
        assert standing(one) != before, "a release whose upgrade was refused can be upgraded"


@pytest.mark.timeout(180)
@asynchronous
async def test_the_same_is_refused_of_manifests_that_were_rendered_without_a_cluster(tmp_path: Path) -> None:
    apply = f"kubectl --namespace {NAMESPACE} apply --filename -"
    given = "--set token.existingSecret=own"
    async with desk(tmp_path) as one:
        await one.types(apply, rendered(given))
        await one.types(apply, rendered(f"{given} --set controller.replicas=3"))
        before = standing(one)
        for changed, sentence in REFUSED.items():
            if changed != "tls.source=generated":  # nothing is rendered then
                code, printed = await one.tries(apply, rendered(f"{given} --set '{changed}'"))
                assert code and sentence in printed and standing(one) == before, printed


@pytest.mark.timeout(180)
@asynchronous
async def test_without_objects_of_the_whole_cluster_helm_and_an_object_that_cannot_be_changed_refuse_it(
    tmp_path: Path,
) -> None:
    values = "--set upgradePolicy=false --set crd.install=false --set crd.uninstallWarning=false --set rbac.nodes=false"
    async with desk(tmp_path) as one:
        await one.types(f"helm install {CHART} {values}")
        before = standing(one)
        code, printed = await one.tries(f"helm upgrade {CHART} {values} --set etcd.replicas=5")
        assert code and "members of this release is 3, and an upgrade does not make it 5; leave" in printed, printed
        found = rendered(f"{values} --set token.existingSecret=own --set etcd.replicas=5")
        first = next(part for part in found.split("\n---") if "kind: ConfigMap" in part and 'sync-wave: "-1"' in part)
        code, printed = await one.tries(f"kubectl --namespace {NAMESPACE} apply --filename -", first)
        assert code and "field is immutable" in printed and standing(one) == before
        await one.types(f"helm upgrade {CHART} {values} --set controller.replicas=3")


@pytest.mark.timeout(180)
@asynchronous
async def test_a_given_secret_that_has_changed_replaces_the_controllers_at_the_next_upgrade(tmp_path: Path) -> None:
    values = (
        "--set token.existingSecret=own --set etcd.external.endpoints={10.0.0.1:2379} "
        "--set etcd.external.user=root --set etcd.external.passwordSecret=pass"
    )
    async with desk(tmp_path) as one:
        for name in ("own", "pass"):
            one.cluster.put(SECRETS, {"metadata": {"name": name}, "type": "Opaque", "data": {"token": "YQ=="}})
        await one.types(f"helm install {CHART} {values}")
        first = annotations(one)
        assert set(first) == {"shoal.dev/version-of-token", "shoal.dev/version-of-etcd-password"}
        await one.types(f"helm upgrade {CHART} {values} --set etcd.external.endpoints={{10.0.0.2:2379}}")
        assert annotations(one) == first, "an etcd of one's own may have other members"
        one.cluster.update(SECRETS, "own", lambda item: item["data"].update(token="Yg=="))
        await one.types(f"helm upgrade {CHART} {values}")
        second = annotations(one)
        assert second["shoal.dev/version-of-token"] != first["shoal.dev/version-of-token"]
        assert second["shoal.dev/version-of-etcd-password"] == first["shoal.dev/version-of-etcd-password"]
