"""What `helm upgrade` keeps, honours and refuses, against an API server in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_server import SECRETS
from asynchronous import asynchronous
from charts.desk import Desk, desk
from charts.rendering import Json
from cluster_choice import NAMESPACE
from whole_api import DEPLOYMENTS

CHART = f"shoal ./helm/shoal --namespace {NAMESPACE}"
REFUSED = {
    "etcd.replicas=5": "etcd.replicas is 5, but the etcd of this release has 3 members",
    "etcd.volume.size=16Gi": "etcd.volume.size is 16Gi, but the members' volumes were made with 8Gi",
    "etcd.volume.storageClass=fast": 'etcd.volume.storageClass is "fast", but the members\' volumes were made with ""',
    "tls.source=generated": "tls.source is generated, but the members of this release's etcd know each other by "
    "addresses without TLS",
    "store=embedded,controller.replicas=1": "the jobs of this release are in the chart's etcd under /shoal, and an "
    "upgrade does not move them to an embedded store",
    "etcd.external.prefix=/other": "and an upgrade does not move them to the chart's etcd under /other",
    "etcd.external.endpoints={10.0.0.1:2379}": "does not move them to an etcd of your own under /shoal",
}
"""By what is changed: what is said of it."""


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
async def test_what_an_upgrade_cannot_do_to_a_store_is_refused_in_one_sentence_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as one:
        await one.types(f"helm install {CHART}")
        version = one.cluster.version
        for given, sentence in REFUSED.items():
            code, printed = await one.tries(f"helm upgrade {CHART} --set '{given}'")
            assert code and sentence in printed, printed
            assert "leave " in printed, "what to do"
        assert one.cluster.version == version


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
