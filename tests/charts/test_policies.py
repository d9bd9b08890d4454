"""What a cluster's policies ask of the chart: nobody is root, everything has limits, rights are named, no secret lies
in the open. Tried with all files of values that `rendering.py` names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from charts.rendering import NAMESPACE, VALUES, Json, containers, of_kind, pods, rendered
from shoal_controller.launchers.kubernetes.pod_manifest import WORKER

SECRET_WORDS = ("TOKEN", "PASSWORD", "SECRET")
NEEDS_THE_API = ("Deployment shoal", "Deployment training", "Job shoal-view-token", "Job training-view-token")
"""Pods that ask the API server; no other pod gets a service account's token."""
READ_ONLY_OF_THE_CLUSTER = {"get", "list", "watch"}


@pytest.fixture(params=VALUES, ids=lambda file: file.stem)
def manifests(request: pytest.FixtureRequest) -> tuple[Json, ...]:
    values: Path = request.param
    return rendered(values)


def test_nobody_is_root(manifests: tuple[Json, ...]) -> None:
    for name, _, spec in pods(manifests):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0 and security["runAsGroup"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert spec["enableServiceLinks"] is False, name
        assert [volume for volume in spec.get("volumes", []) if "hostPath" in volume] == [], name


def test_no_container_can_gain_rights_or_write_to_its_image(manifests: tuple[Json, ...]) -> None:
    for name, container in containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }, name  # fmt: skip


def test_every_container_has_requests_and_limits(manifests: tuple[Json, ...]) -> None:
    for name, container in containers(manifests):
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][kind]), (name, kind)


def test_every_image_has_a_version(manifests: tuple[Json, ...]) -> None:
    for name, container in containers(manifests):
        _, separator, version = container["image"].rpartition("@" if "@" in container["image"] else ":")
        assert separator and version and version != "latest", name


def test_what_runs_for_long_is_probed(manifests: tuple[Json, ...]) -> None:
    for one in of_kind(manifests, "Deployment", "StatefulSet"):
        for container in one["spec"]["template"]["spec"]["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def test_no_right_is_given_with_a_wildcard(manifests: tuple[Json, ...]) -> None:
    for one in of_kind(manifests, "Role", "ClusterRole"):
        for rule in one["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], one["metadata"]["name"]


def test_of_the_cluster_only_nodes_are_read(manifests: tuple[Json, ...]) -> None:
    for one in of_kind(manifests, "ClusterRole"):
        assert [rule["resources"] for rule in one["rules"]] == [["nodes"]]
        assert set(one["rules"][0]["verbs"]) <= READ_ONLY_OF_THE_CLUSTER


def test_the_controllers_may_read_what_pods_print(manifests: tuple[Json, ...]) -> None:
    for one in of_kind(manifests, "Role"):
        if any("pods" in rule["resources"] for rule in one["rules"]):
            assert {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]} in one["rules"]


def test_backups_ask_the_store_as_the_controllers_do(manifests: tuple[Json, ...]) -> None:
    (controller,) = of_kind(manifests, "Deployment")
    known = {one["name"]: one for one in controller["spec"]["template"]["spec"]["containers"][0]["env"]}
    for one in of_kind(manifests, "CronJob"):
        spec = one["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        env = spec["containers"][0]["env"]
        assert env == [known[variable["name"]] for variable in env]
        assert {"SHOAL_STORE", *(name for name in known if name.startswith("SHOAL_ETCD"))} == {
            one["name"] for one in env
        }
        (etcd,) = [one for one in of_kind(manifests, "NetworkPolicy") if one["metadata"]["name"].endswith("-etcd")]
        clients = [peer["podSelector"]["matchLabels"] for peer in etcd["spec"]["ingress"][0]["from"]]
        labels = one["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
        assert any(peer.items() <= labels.items() for peer in clients)


def test_secrets_are_not_read_but_by_their_names(manifests: tuple[Json, ...]) -> None:
    for one in of_kind(manifests, "Role"):
        for rule in one["rules"]:
            if "secrets" in rule["resources"] and not rule.get("resourceNames"):
                assert not {"get", "list", "watch"} & set(rule["verbs"])
            assert "leases" not in rule["resources"], "who leads is decided in the store"


def test_no_secret_is_a_plain_value(manifests: tuple[Json, ...]) -> None:
    for name, container in containers(manifests):
        for variable in container.get("env", []):
            if any(word in variable["name"] for word in SECRET_WORDS) and variable["name"] != "SHOAL_VIEW_TOKEN_SECRET":
                assert set(variable) == {"name", "valueFrom"}, (name, variable["name"])
    values = [value for one in of_kind(manifests, "Secret") for value in one.get("data", {}).values()]
    others = str([one for one in manifests if one["kind"] != "Secret"])
    assert [value for value in values if value in others] == []


def test_a_service_accounts_token_goes_only_where_it_is_used(manifests: tuple[Json, ...]) -> None:
    for name, _, spec in pods(manifests):
        assert (spec.get("automountServiceAccountToken") is not False) == (name in NEEDS_THE_API), name


def test_what_holds_state_is_kept_over_upgrades_and_uninstalls(manifests: tuple[Json, ...]) -> None:
    for one in of_kind(manifests, "Secret", "PersistentVolumeClaim", "CustomResourceDefinition"):
        if not one["metadata"]["name"].endswith("-view-token"):  # made anew by its job
            assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep", one["metadata"]["name"]


def test_everything_is_in_the_releases_namespace(manifests: tuple[Json, ...]) -> None:
    of_all = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    of_all |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert {one["metadata"].get("namespace") for one in manifests if one["kind"] not in of_all} == {NAMESPACE}


def test_workers_reach_their_port_and_each_other_and_nobody_else_reaches_them(manifests: tuple[Json, ...]) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "NetworkPolicy")}
    if not policies:
        return
    name = min(policies, key=len)
    workers = {"matchExpressions": [{"key": WORKER, "operator": "Exists"}]}
    assert policies[f"{name}-workers"]["podSelector"] == workers
    (rule,) = policies[f"{name}-workers"]["ingress"]
    assert rule["ports"] == [{"port": 1, "endPort": 65535, "protocol": "TCP"}]
    assert rule["from"] == [{"podSelector": workers}, {"podSelector": policies[name]["podSelector"]}]
    grpc, http = policies[name]["ingress"]
    assert grpc == {"ports": [{"port": "grpc", "protocol": "TCP"}], "from": [{"podSelector": workers}]}
    assert http["ports"] == [{"port": "http", "protocol": "TCP"}]
