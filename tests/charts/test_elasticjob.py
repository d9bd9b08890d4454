"""The resource ElasticJob: its rules, run by a CEL library as an API server runs them, and the limits that make them
cheap enough for one.

Where an API server is given (`make cluster`), it judges the resource too: `test_cluster.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from charts.desk import page_manifest
from charts.rendering import CHART, ROOT, Json
from charts.tools import generator
from custom_resources import definition, pruned, refusals, with_defaults
from pydantic.alias_generators import to_camel
from shoal_controller.api.models import JobBody
from shoal_controller.elastic_jobs.resource_forms import job_spec_of
from shoal_controller.launchers.kubernetes.job_defaults import section_of

RESOURCE: Json = definition()
(VERSION,) = RESOURCE["spec"]["versions"]
SCHEMA: Json = VERSION["schema"]["openAPIV3Schema"]
SPEC: Json = {"command": ["python", "train.py"], "lanes": 8, "workers": {"min": 1, "wanted": 4, "max": 8}}
SPEC |= {"kubernetes": {"image": "trainer:1", "resources": {"limits": {"nvidia.com/gpu": 1}}}}

PER_LANE = "spec.lanes, times the processes of a cell: every worker or cell trains at least one lane"
OF_A_CELL, OF_A_POD = (
    "the processes of a cell (spec.cell)",
    "the processes of a pod (spec.kubernetes.processesPerPod)",
)
PAIRS: Json = {"cell": {"tensor": 2}}
PODS: Json = {"kubernetes": {"image": "trainer:1", "processesPerPod": 4}}
IMMUTABLE = "cannot be changed; delete the resource and create it anew"
WRONG_NAMES = ["Job", "a.b", "a_b", "-a", "a-", "", "a" * 53]
RIGHT_NAMES = ["a", "0", "a-b", "a" * 52]
SPARES_BEYOND_LANES = (
    "spec.workers.wanted and spares together must be at most spec.lanes: a spare trains when a worker is lost"
)
WRONG_SPECS: list[tuple[Json, str]] = [
    ({"workers": {"min": 5, "wanted": 4}}, "spec.workers.wanted must be at least spec.workers.min"),
    ({"workers": {"wanted": 4, "max": 3}}, "spec.workers.wanted must be at most spec.workers.max"),
    ({"workers": {"min": 4, "max": 3}}, "spec.workers.min must be at most spec.workers.max"),
    ({"workers": {"wanted": 9}}, f"spec.workers.wanted must be at most {PER_LANE}"),
    ({"workers": {"min": 9}}, f"spec.workers.min must be at most {PER_LANE}"),
    ({"workers": {"max": 9}}, f"spec.workers.max must be at most {PER_LANE}"),
    ({"workers": {"wanted": 8, "spares": 1}}, SPARES_BEYOND_LANES),
    ({**PAIRS, "workers": {"max": 18}}, f"spec.workers.max must be at most {PER_LANE}"),
    ({**PAIRS, "workers": {"min": 3}}, f"spec.workers.min must be a multiple of {OF_A_CELL}"),
    ({**PAIRS, "workers": {"max": 7}}, f"spec.workers.max must be a multiple of {OF_A_CELL}"),
    ({**PAIRS, "workers": {"wanted": 1}}, f"spec.workers.wanted must be at least {OF_A_CELL}"),
    ({**PODS, "workers": {"min": 2}}, f"spec.workers.min must be a multiple of {OF_A_POD}"),
    ({**PODS, "workers": {"max": 6}}, f"spec.workers.max must be a multiple of {OF_A_POD}"),
    ({**PODS, "workers": {"wanted": 3}}, f"spec.workers.wanted must be at least {OF_A_POD}"),
]  # fmt: skip
WRONG_CHANGES: list[tuple[Json, str]] = [
    ({"lanes": 16}, f"spec.lanes {IMMUTABLE}"),
    ({"lanes": None}, f"spec.lanes {IMMUTABLE}"),
    ({**PAIRS, "workers": {"min": 2, "wanted": 4, "max": 8}}, f"spec.cell {IMMUTABLE}"),
    ({"command": ["python", "other.py"]}, f"spec.command {IMMUTABLE}"),
    ({"launcher": "none"}, f"spec.launcher {IMMUTABLE}"),
]


def resource(name: str = "job", **changed: Any) -> Json:
    """A resource with its defaults, as the API server has it when the rules are run."""
    spec = {key: value for key, value in {**SPEC, **changed}.items() if value is not None}
    return {"metadata": {"name": name}, "spec": with_defaults(SCHEMA["properties"]["spec"], spec)}


def parts(schema: Json, place: str = "") -> Iterator[tuple[str, Json]]:
    """A schema and all schemas in it."""
    yield place, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{place}.{name}")
    for kind in ("items", "additionalProperties"):
        if isinstance(schema.get(kind), dict):
            yield from parts(schema[kind], f"{place}[]")


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_kubernetes_knows_every_field_of_the_definition(version: str) -> None:
    kubernetes_validate.validate(RESOURCE, version, strict=True)


def test_the_file_is_current() -> None:
    assert (CHART / "crd" / "elasticjobs.yaml").read_text() == generator("elasticjob").page(), "run `make docs`"


def test_its_specification_is_that_of_a_job_without_the_name() -> None:
    right = {to_camel(name) for name in JobBody.model_fields} - {"job"}
    fields = SCHEMA["properties"]["spec"]["properties"]
    assert set(fields) == right | set(JobBody.model_fields) - {"job"}
    assert {name for name in fields if "_" not in name} == right


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_restarts": 3}, "spec.max_restarts: write maxRestarts"),
        ({"kubernetes": {"node_selector": {"pool": "gpus"}}}, "spec.kubernetes.node_selector: write nodeSelector"),
        ({"kubernetes": {"volume_mounts": [{"name": "a"}]}}, "spec.kubernetes.volume_mounts: write volumeMounts"),
        ({"kubernetes": {"fs_group": 7}}, "spec.kubernetes.fs_group: write fsGroup"),
    ],
)
def test_a_key_as_python_writes_it_is_refused_with_the_right_one(wrong: Json, sentence: str) -> None:
    """● An API server drops an unknown key without a word, unless it is asked to be strict."""
    assert list(refusals(SCHEMA, resource(**wrong))) == [sentence]
    assert wrong.items() <= pruned(SCHEMA, resource(**wrong))["spec"].items(), "pruned before the rule sees it"


def test_secrets_of_images_are_named_as_a_pod_names_them() -> None:
    named = resource(kubernetes={"image": "a", "imagePullSecrets": [{"name": "regcred"}, "other"]})
    jsonschema.Draft4Validator(SCHEMA).validate(named)
    assert list(refusals(SCHEMA, named)) == [] and pruned(SCHEMA, named)["spec"] == named["spec"]
    item = {**named, "metadata": {"name": "job", "uid": "u"}}
    assert section_of(job_spec_of(item)).image_pull_secrets == ["regcred", "other"]


def test_a_right_resource_breaks_no_rule() -> None:
    pairs = resource(**PAIRS, **PODS, workers={"min": 4, "wanted": 7, "max": 16})
    for right in (resource(), resource(lanes=None), resource(workers=None), resource(workers={"wanted": 1}), pairs):
        assert list(refusals(SCHEMA, right)) == []
        jsonschema.Draft4Validator(SCHEMA).validate(right)  # the draft that Kubernetes' schemas are of


@pytest.mark.parametrize("name", RIGHT_NAMES)
def test_a_name_that_pods_can_be_named_after_is_taken(name: str) -> None:
    assert list(refusals(SCHEMA, resource(name))) == []
    assert len(f"{name}-w99999") <= 63


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_another_name_is_refused_in_one_sentence(name: str) -> None:
    (sentence,) = refusals(SCHEMA, resource(name))
    assert sentence.startswith("metadata.name must be a DNS label of at most 52 characters")


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_SPECS, ids=[str(wrong) for wrong, _ in WRONG_SPECS])
def test_numbers_that_do_not_fit_are_refused_in_one_sentence(wrong: Json, sentence: str) -> None:
    assert list(refusals(SCHEMA, resource(**wrong))) == [sentence]


@pytest.mark.parametrize(("changed", "sentence"), WRONG_CHANGES, ids=[str(changed) for changed, _ in WRONG_CHANGES])
def test_what_a_job_is_made_of_cannot_be_changed(changed: Json, sentence: str) -> None:
    assert list(refusals(SCHEMA, resource(**changed), resource())) == [sentence]


def test_a_job_can_be_scaled() -> None:
    assert list(refusals(SCHEMA, resource(workers={"min": 1, "wanted": 8, "max": 8}), resource())) == []


def test_everything_that_a_rule_can_read_has_a_greatest_size() -> None:
    """The API server estimates the cost of a rule by these, and refuses a resource whose rules may cost too much."""
    unbounded = []
    for place, part in parts(SCHEMA):
        limits = {"string": "maxLength", "array": "maxItems"}
        limit = limits.get(part.get("type", ""))
        if limit and place not in (".apiVersion", ".kind") and limit not in part and "enum" not in part:
            unbounded.append(place)
        if isinstance(part.get("additionalProperties"), dict) and "maxProperties" not in part:
            unbounded.append(place)
    assert unbounded == []


def test_what_is_compared_with_its_old_value_is_cheap_enough_for_an_api_server() -> None:
    """By its estimate: a tenth of all that may be there, of which one rule may cost 10 million."""

    def size(part: Json) -> int:
        of_one = size(part["items"]) if "items" in part else 1
        return int(part.get("maxLength", part.get("maxItems", 1))) * of_one

    compared = [
        size(part) / 10
        for _, part in parts(SCHEMA)
        for one in part.get("x-kubernetes-validations", [])
        if one["rule"] == "self == oldSelf"
    ]
    assert len(compared) == 2 and max(compared) < 10_000_000


def test_every_part_of_the_schema_has_one_type() -> None:
    """What the API server calls a structural schema."""
    for place, part in parts(SCHEMA):
        free = {"x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"} & set(part)
        assert ("type" in part) or free, place
        assert not {"$ref", "anyOf", "title"} & set(part), place
        assert part.get("additionalProperties") is not False, place
        assert not ("properties" in part and "additionalProperties" in part), place


def test_what_scaling_and_columns_read_is_in_the_schema() -> None:
    places = {place for place, _ in parts(SCHEMA)}
    scale = VERSION["subresources"]["scale"]
    assert set(scale.values()) <= places
    columns = {column["jsonPath"] for column in VERSION["additionalPrinterColumns"]}
    assert columns - {".metadata.creationTimestamp"} <= places


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_example_of_an_autoscaler_is_right_and_scales_what_the_page_makes(version: str) -> None:
    found = yaml.safe_load((ROOT / "deploy" / "autoscaler.yaml").read_text())
    kubernetes_validate.validate(found, version, strict=True)
    made = yaml.safe_load(page_manifest())
    target = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": made["metadata"]["name"]}
    assert found["spec"]["scaleTargetRef"] == target
    bounds = made["spec"]["workers"]
    assert (found["spec"]["minReplicas"], found["spec"]["maxReplicas"]) == (bounds["min"], bounds["max"])
    text = (ROOT / "docs" / "elastic_jobs.md").read_text()
    for name, window in found["spec"]["behavior"].items():
        assert f"{name}: {{stabilizationWindowSeconds: {window['stabilizationWindowSeconds']}}}" in text
