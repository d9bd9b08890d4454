"""The chart with many values: both helms accept it, Kubernetes 1.33 and 1.37 know every field, wrong values are refused
in one sentence, and what is made from the models of its values is current.

A manifest of a kind that Kubernetes itself has not (cert-manager's, prometheus-operator's) has no schema here.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import kubernetes_validate
import pytest
import yaml
from charts.rendering import (
    ALL_VALUES,
    CHART,
    HELMS,
    NAMESPACE,
    NEWEST,
    RELEASE,
    ROOT,
    VALUES,
    WHOLE,
    Json,
    containers,
    helm,
    helm_without_cluster,
    of_kind,
    pods,
    rendered,
)
from charts.tools import generator
from shoal_controller.settings import Settings

WRONG = sorted((ROOT / "tests" / "attacks" / "chart").glob("*.txt"))
VERSIONS = ("1.33", "1.37")
SEEN: set[tuple[str, str]] = set()
"""Manifests that were found right for a version: most are the same with many values."""
FOREIGN_KINDS = {"Certificate", "ServiceMonitor", "PrometheusRule"}


def case(file: Path) -> str:
    return file.stem


@pytest.fixture(scope="module")
def chart_generator() -> ModuleType:
    return generator("chart")


def test_there_are_enough_files_of_values() -> None:
    assert len(ALL_VALUES) >= 20


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("values", VALUES, ids=case)
def test_both_helms_find_nothing_wrong_with_the_chart(name: str, values: Path) -> None:
    linted = helm(name, "lint", "--strict", CHART, "--values", values)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "WARNING" not in linted.stdout + linted.stderr


NUMBERS = (
    "fullnameOverride=shoal", "nameOverride=2", "imagePullSecrets[0]=3", "token.existingSecret=4",
    "serviceAccount.create=false", "serviceAccount.name=5", "controller.priorityClassName=6",
    "etcd.volume.storageClass=7", "tls.source=certManager", "tls.issuer.name=8", "ingress.enabled=true",
    "ingress.hosts[0]=9", "ingress.className=10", "monitoring.serviceMonitor.tokenSecret=11", "controller.env.12=13",
)  # fmt: skip
"""Names that YAML reads as numbers, where they are not quoted."""
BOOLEANS = ("serviceAccount.create=false", "ingress.enabled=true")


@pytest.mark.parametrize("namespace", ["1400", "null"])
def test_names_that_yaml_reads_as_something_else_stay_names(namespace: str) -> None:
    options = [part for one in NUMBERS for part in ("--set" if one in BOOLEANS else "--set-string", one)]
    done = helm(NEWEST, "template", "1", CHART, "--namespace", namespace, *options)
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert {one["metadata"].get("namespace", namespace) for one in manifests} == {namespace}
    for one in manifests:
        if one["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", HELMS)
def test_a_package_holds_the_whole_chart(name: str, tmp_path: Path) -> None:
    packed = helm(name, "package", CHART, "--destination", tmp_path)
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.glob("shoal-*.tgz")
    again = helm(name, "template", RELEASE, archive, "--namespace", NAMESPACE, "--values", ALL_VALUES[0])
    assert again.returncode == 0, again.stderr
    assert without_secrets(yaml.safe_load_all(again.stdout)) == without_secrets(rendered(ALL_VALUES[0], name))


@pytest.mark.parametrize("values", VALUES, ids=case)
def test_both_helms_make_the_same_manifests(values: Path) -> None:
    old, new = (without_secrets(rendered(values, name)) for name in HELMS)
    assert old == new


def without_secrets(manifests: Iterable[Json]) -> list[Json]:
    """What is not made anew each time."""
    return [one for one in manifests if one and one["kind"] != "Secret"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES, ids=case)
def test_kubernetes_knows_every_field_of_every_manifest(values: Path, version: str) -> None:
    known = [one for one in rendered(values) if one["kind"] not in FOREIGN_KINDS]
    assert known
    for one in known:
        if (key := (version, yaml.safe_dump(one))) not in SEEN:
            kubernetes_validate.validate(one, version, strict=True)
            SEEN.add(key)


@pytest.mark.parametrize("values", VALUES, ids=case)
def test_no_two_manifests_are_one_object(values: Path) -> None:
    named = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered(values)]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("values", VALUES, ids=case)
def test_whatever_selects_pods_finds_some_or_names_workers(values: Path) -> None:
    manifests = rendered(values)
    labels = [metadata["labels"] for _, metadata, _ in pods(manifests)]
    selectors = [one["spec"]["selector"] for one in of_kind(manifests, "Service")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(manifests, "PodDisruptionBudget")]
    policies = [one["spec"]["podSelector"] for one in of_kind(manifests, "NetworkPolicy")]
    selectors += [one["matchLabels"] for one in policies if "matchLabels" in one]
    assert [one for one in selectors if not any(one.items() <= those.items() for those in labels)] == []


@pytest.mark.parametrize("values", VALUES, ids=case)
def test_secrets_and_maps_that_a_pod_names_are_made_or_given(values: Path) -> None:
    manifests = rendered(values)
    made = {one["metadata"]["name"] for one in of_kind(manifests, "Secret", "ConfigMap", "Certificate")}
    given = {word.strip('",[]{}') for word in values.read_text().replace(":", " ").split()}
    named = set()
    for _, _, spec in pods(manifests):
        for volume in spec.get("volumes", []):
            named |= {
                volume[kind][key] for kind, key in (("secret", "secretName"), ("configMap", "name")) if kind in volume
            }
    for _, container in containers(manifests):
        sources = [variable.get("valueFrom", {}).get("secretKeyRef") for variable in container.get("env", [])]
        named |= {source["name"] for source in sources if source}
    assert named - made - given == set()


@pytest.mark.parametrize("values", VALUES, ids=case)
def test_the_controller_is_given_nothing_but_settings_that_it_has(values: Path) -> None:
    (deployment,) = of_kind(rendered(values), "Deployment")
    (controller,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value", "given") for one in controller["env"] if one["name"].startswith("SHOAL_")}
    settings = {name.removeprefix("SHOAL_").lower(): value for name, value in given.items()}
    assert set(settings) - set(Settings.model_fields) == set()
    found = Settings(**settings)
    assert "kubernetes" in found.allowed_launchers and "local" not in found.allowed_launchers
    assert found.kubernetes_controllers.endswith("-workers.ml.svc:7071")
    assert found.store.startswith(("etcd://", "embedded:"))


@pytest.mark.parametrize("wrong", WRONG if WHOLE else WRONG[:3] + WRONG[-3:], ids=case)
@pytest.mark.parametrize("name", HELMS)
def test_wrong_values_are_refused_in_one_sentence(name: str, wrong: Path, tmp_path: Path) -> None:
    text, _, expected = wrong.read_text().partition("---\n")
    (tmp_path / "values.yaml").write_text(text)
    sentences = dict(line.split(": ", 1) for line in expected.splitlines() if line.startswith("helm "))
    sentence = sentences.get(f"helm {name[-1]}", expected.strip())
    done = helm(name, "template", RELEASE, CHART, "--values", tmp_path / "values.yaml")
    assert done.returncode == 1
    lines = [line.strip().removeprefix("- ") for line in done.stderr.splitlines()]
    assert [line for line in lines if line.endswith(sentence)], done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("release", ["ml.team-a", "x" * 53])
def test_whatever_the_release_is_called_its_objects_have_names_that_kubernetes_takes(release: str) -> None:
    namespace = "n" * 63
    done = helm(NEWEST, "template", release, CHART, "--namespace", namespace, "--values", VALUES[0])
    assert done.returncode == 0, done.stderr
    manifests = tuple(one for one in yaml.safe_load_all(done.stdout) if one)
    for one in of_kind(manifests, "Service"):
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", one["metadata"]["name"])
    assert all(len(one["metadata"]["name"]) <= 52 for one in of_kind(manifests, "StatefulSet")), "its pods have a label"
    (role,) = of_kind(manifests, "ClusterRole")
    assert role["metadata"]["name"].endswith("-nodes"), "two releases of one namespace are not one"
    refused = helm(NEWEST, "template", "1.0", CHART)
    assert "everything would be named 1-0-shoal, but a service's name begins with a letter" in refused.stderr


GIVEN = ("--set", "token.existingSecret=given", "--set", "tls.source=secret", "--set", "tls.secret=given")


@pytest.mark.parametrize("name", HELMS)
def test_without_a_cluster_two_renders_are_equal_or_refused(name: str) -> None:
    def render(*options: str) -> subprocess.CompletedProcess[str]:
        return helm_without_cluster(name, "template", RELEASE, CHART, "--namespace", NAMESPACE, *options)

    once, again = render(*GIVEN), render(*GIVEN)
    assert once.returncode == 0, once.stderr
    assert once.stdout == again.stdout
    token, both = render(), render("--set", "tls.source=generated")
    assert (token.returncode, both.returncode) == (1, 1)
    assert "there is no cluster to ask, so each render would make a root token; make a secret" in token.stderr
    assert "and name it in token.existingSecret, and certificates; set tls.source to certManager" in both.stderr


def test_everyday_values_of_other_charts_reach_the_pods() -> None:
    (values,) = (one for one in ALL_VALUES if "everyday" in one.name)
    manifests = rendered(values)
    assert list(of_kind(manifests, "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")) == [], "no right at all"
    registries = {container["image"].split("/")[0] for _, container in containers(manifests)}
    assert registries == {"mirror.example.org"}
    for _, _, spec in pods(manifests):
        assert [one["name"] for one in spec["imagePullSecrets"]] == ["regcred", "other", "mirror"]
    (metadata, spec), *_ = ((metadata, spec) for name, metadata, spec in pods(manifests) if name == "Deployment shoal")
    (controller,) = spec["containers"]
    assert metadata["labels"]["team"] == "ml"
    assert controller["resources"]["limits"] == {"cpu": 4, "memory": "2Gi", "ephemeral-storage": "1Gi"}
    assert controller["resources"]["requests"] == {"cpu": 0.5, "memory": "384Mi"}
    assert controller["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert "/etc/ssl/extra" in {mount["mountPath"] for mount in controller["volumeMounts"]}
    assert [one["topologyKey"] for one in spec["topologySpreadConstraints"]] == ["zone"]
    (ingress,) = of_kind(manifests, "Ingress")
    rules = [(rule["host"], path["path"]) for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    assert rules == [("a.example.org", "/"), ("b.example.org", "/shoal"), ("c.example.org", "/")]
    assert [one["metadata"]["name"] for one in of_kind(manifests, "ServiceMonitor")] == ["shoal", "shoal-etcd"]


def test_the_notes_name_the_next_commands() -> None:
    done = helm(NEWEST, "install", RELEASE, CHART, "--namespace", NAMESPACE)
    notes = done.stdout.partition("NOTES:")[2]
    for command in (
        "kubectl --namespace ml rollout status deployment/shoal",
        "helm test shoal --namespace ml",
        "kubectl --namespace ml exec deployment/shoal -- shoal jobs",
    ):
        assert command in notes
    assert max(map(len, notes.splitlines())) <= 130


def test_what_is_made_from_the_models_of_values_is_current(chart_generator: ModuleType) -> None:
    for file, text in chart_generator.written().items():
        assert file.read_text() == text, f"{file.relative_to(ROOT)} is not current; run `make docs`"


def test_every_value_is_documented(chart_generator: ModuleType) -> None:
    def undocumented(part: dict[str, object], name: str) -> list[str]:
        inner = part.get("properties")
        below = (
            [one for key, found in inner.items() for one in undocumented(found, f"{name}.{key}")]
            if isinstance(inner, dict)
            else []
        )
        return below + ([] if part.get("description") else [name])

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert [name for key, part in schema["properties"].items() for name in undocumented(part, key)] == []
    assert schema["additionalProperties"] is False
