"""Defaults of an administrator for pods: a job's own section replaces them, and keeps those it was made with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from shoal.config.load import load_config
from shoal_controller.api.models import JobBody, body_of
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.elastic_jobs.resource_forms import changed_keys, job_spec_of
from shoal_controller.launchers.kubernetes.job_defaults import JobDefaults, section_of
from shoal_controller.launchers.kubernetes.pod_manifest import PodTerms, pod
from shoal_protos.errors import UserError

GIVEN: dict[str, Any] = {
    "image": "team/train:7", "nodeSelector": {"pool": "gpus"}, "tolerations": [{"key": "spot", "operator": "Exists"}],
    "volumes": [{"name": "data", "emptyDir": {}}], "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "checkpointRoot": "s3://checkpoints/team/",
}  # fmt: skip
DEFAULTS = JobDefaults.of(json.dumps(GIVEN))


def asked(**section: Any) -> JobSpec:
    """A resource's job, whose section is left out where it is empty."""
    spec = {"command": ["python", "train.py"], **({"kubernetes": section} if section else {})}
    return job_spec_of({"metadata": {"name": "demo", "uid": "u"}, "spec": spec})


def made(spec: JobSpec) -> dict[str, Any]:
    return pod("w0", PodTerms(spec, section_of(spec), ("c:7071",), False))["spec"]


def variables(spec: JobSpec) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in made(spec)["containers"][0]["env"]}


def test_a_resource_without_a_section_gets_pods_as_the_administrator_has_them() -> None:
    filled = DEFAULTS.filled(asked())
    found = made(filled)
    assert (found["containers"][0]["image"], found["nodeSelector"]) == ("team/train:7", {"pool": "gpus"})
    assert found["tolerations"] == GIVEN["tolerations"] and GIVEN["volumes"][0] in found["volumes"]
    assert variables(filled)["SHOAL_CHECKPOINT_ROOT"] == "s3://checkpoints/team"
    shown = body_of(filled, shows_values=True)["kubernetes"]
    assert isinstance(shown, dict) and shown["image"] == "team/train:7"
    assert section_of(JobBody.model_validate(body_of(filled, shows_values=True)).spec(2)) == section_of(filled)


def test_what_a_job_says_itself_replaces_the_default_of_that_key() -> None:
    own = [{"name": "SHOAL_CHECKPOINT_ROOT", "value": "/mine"}, {"name": "A", "value": "1"}]
    filled = DEFAULTS.filled(asked(image="mine:1", tolerations=[], env=own))
    found = made(filled)
    assert found["containers"][0]["image"] == "mine:1" and "tolerations" not in found
    assert found["nodeSelector"] == {"pool": "gpus"}
    assert (variables(filled)["SHOAL_CHECKPOINT_ROOT"], variables(filled)["A"]) == ("/mine", "1")


def test_mounts_of_a_default_volume_go_with_it_and_others_stay() -> None:
    more = [*GIVEN["volumeMounts"], {"name": "patched", "mountPath": "/p"}]
    defaults = JobDefaults.of(json.dumps({**GIVEN, "volumeMounts": more}))
    for volumes, left in (([{"name": "mine"}], more[1:]), ([], more[1:]), ([{"name": "data"}], more)):
        assert section_of(defaults.filled(asked(volumes=volumes))).volume_mounts == left
    own = [{"name": "data", "mountPath": "/mine"}]
    assert section_of(defaults.filled(asked(volumes=[], volumeMounts=own))).volume_mounts == own


def test_a_root_of_the_file_system_stays_one() -> None:
    assert (
        variables(JobDefaults.of('{"image": "a", "checkpointRoot": "/"}').filled(asked()))["SHOAL_CHECKPOINT_ROOT"]
        == "/"
    )


def test_a_job_that_is_too_large_with_the_defaults_is_refused_in_a_sentence() -> None:
    many = [{"name": f"V{number}", "value": "1"} for number in range(100)]
    assert JobDefaults().filled(asked(image="a", env=many))
    with pytest.raises(
        UserError, match=r"with the administrator's defaults, `kubernetes.env` is .*; expected at most 100"
    ):
        DEFAULTS.filled(asked(env=many))


def test_a_job_keeps_the_defaults_that_it_was_made_with_and_its_resource_is_unchanged() -> None:
    job = DEFAULTS.filled(asked(image="mine:1"))
    assert changed_keys(job, asked(image="mine:1")) == []
    assert changed_keys(job, asked(image="mine:2")) == ["kubernetes.image"]
    assert made(job)["nodeSelector"] == {"pool": "gpus"}


def test_other_launchers_have_no_such_defaults() -> None:
    spec = JobSpec("a", 2, launcher="local", command=("x",))
    assert DEFAULTS.filled(spec) is spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (asked(), "`kubernetes` is missing; launcher kubernetes needs a section with an image"),
        (asked(nodeSelector={"a": "b"}), "`kubernetes.image` is missing; name the image of the workers"),
    ],
)
def test_without_a_default_a_job_needs_an_image(spec: JobSpec, words: str) -> None:
    with pytest.raises(UserError, match=words):
        JobDefaults().filled(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "SHOAL_KUBERNETES_DEFAULTS is not JSON: EOF while parsing an object"),
        ("[" * 100_000, "SHOAL_KUBERNETES_DEFAULTS is not JSON: recursion limit exceeded"),
        ('{"image": "\\ud800"}', "SHOAL_KUBERNETES_DEFAULTS is not JSON: unexpected end of hex escape"),
        (json.dumps({"image": "i" * 1001}), "`image` is .*at most 1000 characters"),
        (json.dumps({"tolerations": [{}] * 101}), "`tolerations` is .*; expected at most 100 entries"),
        (json.dumps({"imagePullSecrets": ["a"] * 21}), "`imagePullSecrets` is .*; expected at most 20 entries"),
        (
            '{"checkpointRoot": "s3://"}',
            '`checkpointRoot` is "s3://" in SHOAL_KUBERNETES_DEFAULTS; expected a folder',
        ),
        ('{"imge": "a"}', "`imge` is an unknown key"),
        ('{"image": 7}', "`image` is 7; expected"),
        ("[]", "SHOAL_KUBERNETES_DEFAULTS"),
    ],
)
def test_defaults_that_cannot_be_are_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        JobDefaults.of(text)


def test_a_config_without_a_path_saves_below_the_root_and_one_with_a_path_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def path(**checkpoint: Any) -> str | None:
        shoal = {"max_steps": 2, "lanes": 2, "checkpoint": {"every_steps": 1, **checkpoint}}
        return load_config({"train_micro_batch_size_per_gpu": 1, "shoal": shoal}).checkpoint.path

    with pytest.raises(UserError, match=r"no `shoal.checkpoint.path` says where to save"):
        path()
    monkeypatch.setenv("SHOAL_JOB", "demo")
    monkeypatch.setenv("SHOAL_CHECKPOINT_ROOT", "/")
    assert path() == "/demo"
    monkeypatch.setenv("SHOAL_CHECKPOINT_ROOT", "/saves")
    assert (path(), path(path="/mine")) == ("/saves/demo", "/mine")
    with pytest.raises(UserError, match="says where to save"):
        path(path=None)
