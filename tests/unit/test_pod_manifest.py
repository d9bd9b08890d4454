"""What the launcher asks a cluster to make, and the section that says so: refused by name where it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from api_server import check_fields
from pydantic import ValidationError
from rule import Edit, holds, rule
from shoal_controller.api.models import JobBody
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.job_defaults import section_of
from shoal_controller.launchers.kubernetes.pod_manifest import PodTerms, pod, secret
from shoal_controller.launchers.launcher import SET_IN_PODS
from shoal_protos.validation import every_sentence

JOB: dict[str, Any] = {
    "job": "demo", "launcher": "kubernetes", "command": ["python", "train.py"], "workers": {"wanted": 4, "min": 2},
    "env": {"A": "1"}, "kubernetes": {"image": "registry/train:1"},
}  # fmt: skip

GPU_CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}


def made(worker: str = "w0", **section: Any) -> dict[str, Any]:
    """The pod of a job with this in its section; every field is one that Kubernetes has."""
    body = JobBody.model_validate({**JOB, "kubernetes": {**JOB["kubernetes"], **section}})
    spec = body.spec(2)
    terms = PodTerms(JobSpec(**{**_fields(spec), "run": "a1b2"}), section_of(spec), ("c:7071", "d:7071"), True)
    found = pod(worker, terms)
    check_fields(found, "V1Pod", "Pod")
    return found


def _fields(spec: JobSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as error:
        JobBody.model_validate({**JOB, **fields})
    return every_sentence(error.value.errors(), "the body", JobBody)


# ---- the pod


def test_a_pod_has_what_every_pod_must_have() -> None:
    found = made()
    assert found["metadata"] == {
        "name": "demo-w0",
        "labels": {
            "app.kubernetes.io/name": "shoal", "app.kubernetes.io/component": "worker",
            "app.kubernetes.io/instance": "demo", "app.kubernetes.io/managed-by": "shoal",
            "shoal.dev/job": "demo", "shoal.dev/run": "a1b2", "shoal.dev/worker": "w0",
        },
    }  # fmt: skip
    spec = found["spec"]
    (container,) = spec.pop("containers")
    assert spec == {
        "restartPolicy": "Never", "shareProcessNamespace": True, "enableServiceLinks": False,
        "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 60,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }  # fmt: skip
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "privileged": False,
        "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert (container["image"], container["command"]) == ("registry/train:1", ["python", "train.py"])


@holds("What every pod must have is")
def test_a_worker_is_told_who_it_is_where_it_is_and_how_long_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the controller's own")
    variables = {one["name"]: one for one in made(graceSeconds=120)["spec"]["containers"][0]["env"]}
    plain = {name: one["value"] for name, one in variables.items() if "value" in one}
    assert {name: value for name, value in plain.items() if name.startswith(("SHOAL", "A"))} == {
        "A": "1", "SHOAL_CONTROLLER": "c:7071,d:7071", "SHOAL_JOB": "demo", "SHOAL_RUN": "a1b2",
        "SHOAL_WORKER_ID": "w0", "SHOAL_LAUNCHER": "kubernetes", "SHOAL_GRACE_SECONDS": "115",
        "SHOAL_WANTED_WORKERS": "4",
    }  # fmt: skip
    assert variables["SHOAL_HOST"]["valueFrom"]["fieldRef"] == {"fieldPath": "status.podIP"}
    assert variables["SHOAL_FAILURE_DOMAIN"]["valueFrom"]["fieldRef"] == {"fieldPath": "spec.nodeName"}
    assert variables["SHOAL_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "demo-shoal-token", "key": "token"}


def test_a_pod_of_several_workers_starts_a_process_for_each_and_has_the_name_of_the_first() -> None:
    found = made("w4", processesPerPod=2, resources={"limits": {"nvidia.com/gpu": 2}}, gang="kueue", queue="q")
    container = found["spec"]["containers"][0]
    assert container["command"] == ["shoal", "worker", "--processes", "2", "--", "python", "train.py"]
    assert {"name": "SHOAL_WORKER_ID", "value": "w4,w5"} in container["env"]
    assert (found["metadata"]["name"], found["metadata"]["labels"]["shoal.dev/worker"]) == ("demo-w4", "w4")
    first = made("w0", processesPerPod=2, gang="kueue", queue="q")["metadata"]
    assert first["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "1", "`min` is one pod"


def test_the_section_reaches_the_pod() -> None:
    toleration = {"key": "spot", "operator": "Exists"}
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    secret_variable = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key"}}}
    found = made(
        resources={"limits": {"nvidia.com/gpu": 1}}, nodeSelector={"gpu": "yes"}, tolerations=[toleration],
        affinity={"nodeAffinity": {}}, topologySpreadConstraints=[spread], volumes=[claim],
        volumeMounts=[{"name": "data", "mountPath": "/data"}], shmSize="8Gi", env=[secret_variable],
        serviceAccount="trainer", priorityClass="low", imagePullSecrets=["pull"], runAsUser=1000, fsGroup=1000,
        labels={"team": "a"}, annotations={"note": "b"}, imagePullPolicy="Always",
    )  # fmt: skip
    spec, container = found["spec"], found["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}} and container["imagePullPolicy"] == "Always"
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"gpu": "yes"}, [toleration])
    assert (spec["affinity"], spec["topologySpreadConstraints"]) == ({"nodeAffinity": {}}, [spread])
    assert spec["volumes"] == [claim, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/data", "/dev/shm"]
    assert container["env"][0] == secret_variable
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("trainer", "low")
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (1000, 1000)
    assert found["metadata"]["labels"]["team"] == "a" and found["metadata"]["annotations"] == {"note": "b"}


def test_the_claims_of_a_section_are_the_pods_and_its_workers_container_gets_them_beside_its_limits() -> None:
    shared = {"name": "link", "resourceClaimName": "rack-1.link"}
    limits = {"cpu": 8, "nvidia.com/gpu": 1}
    found = made(resources={"limits": limits}, resourceClaims=[GPU_CLAIM, shared])["spec"]
    assert found["resourceClaims"] == [GPU_CLAIM, shared]
    (container,) = found["containers"]
    assert container["resources"] == {"limits": limits, "claims": [{"name": "gpu"}, {"name": "link"}]}
    assert made(resourceClaims=[GPU_CLAIM])["spec"]["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}
    assert "resourceClaims" not in made()["spec"] and "resources" not in made()["spec"]["containers"][0]


@rule(
    "What every pod must have is set over whatever the job says: SIGTERM reaches Python, the failure domain is "
    "the node's name, nobody becomes root",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.launchers.kubernetes.pod_manifest",
            '        "shareProcessNamespace": True,',
            '        "shareProcessNamespace": False,',
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.pod_manifest",
            '"SHOAL_FAILURE_DOMAIN": "spec.nodeName"',
            '"SHOAL_FAILURE_DOMAIN": "metadata.name"',
        ),
    ],
)
def test_a_patch_adds_what_is_not_in_the_section_and_changes_nothing_that_must_be() -> None:
    found = made(podTemplate={
        "metadata": {"labels": {"shoal.dev/job": "other"}},
        "spec": {
            "hostIPC": True, "restartPolicy": "Always", "shareProcessNamespace": False,
            "automountServiceAccountToken": True, "securityContext": {"runAsNonRoot": False, "runAsGroup": 7},
            "containers": [
                {"name": "worker", "stdin": True, "securityContext": {"privileged": True}},
                {"name": "beside", "image": "registry/logs:1", "securityContext": {"allowPrivilegeEscalation": True}},
            ],
        },
    })  # fmt: skip
    spec = found["spec"]
    assert found["metadata"]["labels"]["shoal.dev/job"] == "demo"
    assert (spec["hostIPC"], spec["restartPolicy"], spec["shareProcessNamespace"]) == (True, "Never", True)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsGroup"] == 7
    worker, beside = spec["containers"]
    assert worker["stdin"] is True and worker["image"] == "registry/train:1"
    assert worker["securityContext"]["privileged"] is False
    assert beside["securityContext"]["allowPrivilegeEscalation"] is False


def test_no_container_of_a_patch_takes_back_what_its_pod_must_have() -> None:
    root = {"runAsNonRoot": False, "runAsUser": 0, "seccompProfile": {"type": "Unconfined"}, "privileged": True}
    found = made(podTemplate={
        "metadata": {"labels": None, "annotations": None},
        "spec": {
            "securityContext": None,
            "containers": [{"name": "worker", "securityContext": root, "env": [
                {"name": "B", "value": "2"}, {"name": "SHOAL_TOKEN", "value": "another's"},
            ]}],
            "initContainers": [{"name": "first", "image": "i", "securityContext": root}],
        },
    })  # fmt: skip
    for container in (*found["spec"]["containers"], *found["spec"]["initContainers"]):
        context = container["securityContext"]
        assert (context["runAsNonRoot"], context["privileged"]) == (True, False), container["name"]
        assert context["seccompProfile"] == {"type": "RuntimeDefault"} and context["capabilities"] == {"drop": ["ALL"]}
    env = {one["name"]: one for one in found["spec"]["containers"][0]["env"]}
    assert env.keys() == {"B", *SET_IN_PODS} and "valueFrom" in env["SHOAL_TOKEN"]


def test_the_token_lies_in_a_secret_of_the_job() -> None:
    found = secret(JobSpec("demo", 1, run="a1b2"), "join:demo:a1b2:0f")
    check_fields(found, "V1Secret", "Secret")
    assert found["metadata"]["name"] == "demo-shoal-token" and found["stringData"] == {"token": "join:demo:a1b2:0f"}


def test_a_controller_without_this_launcher_imports_no_client_of_a_cluster() -> None:
    program = "import sys, shoal_controller.server; print([m for m in sys.modules if 'kubernetes_asyncio' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n"


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kubernetes": {"image": "i", "imge": "j"}}, "`kubernetes.imge`"),
        ({"kubernetes": {"image": "i", "resources": {"limit": {}}}}, "`kubernetes.resources.limit`"),
        ({"kubernetes": {"image": "i", "graceSeconds": 5}}, "`kubernetes.graceSeconds` is 5"),
        ({"kubernetes": {"image": "i", "shmSize": "much"}}, "`kubernetes.shmSize`"),
        ({"kubernetes": {"image": "i", "gang": "slurm"}}, "`kubernetes.gang`"),
        ({"kubernetes": {"image": "i", "gang": "kueue"}}, "`kubernetes.queue` is missing"),
        ({"kubernetes": {"image": "i", "runAsUser": 0}}, "`kubernetes.runAsUser` is 0"),
        (
            {"kubernetes": {"image": "i", "env": [{"name": "SHOAL_HOST", "value": "x"}]}},
            "`kubernetes.env` sets SHOAL_HOST, which is set by Shoal itself; leave it out",
        ),
        (
            {"kubernetes": {"image": "i", "labels": {"shoal.dev/job": "x"}}},
            "`kubernetes` sets shoal.dev/job, which is set by Shoal itself; leave it out",
        ),
        (
            {"kubernetes": {"image": "i", "podTemplate": {"status": {}}}},
            "`kubernetes.podTemplate` has the key status; expected metadata or spec",
        ),
        *(
            ({"kubernetes": {"image": "i", "podTemplate": {part: patch}}}, f"podTemplate.{part}.{expected}")
            for part, patch, expected in (
                ("metadata", {"labels": "x"}, "labels` is 'x'; expected an object"),
                ("metadata", {"annotations": [1]}, "annotations` is [1]; expected an object"),
                ("spec", {"containers": None}, "containers` is None; expected a list of containers"),
                ("spec", {"containers": "x"}, "containers` is 'x'; expected a list of containers"),
                ("spec", {"containers": [{}]}, "containers[0]` has no name"),
                ("spec", {"containers": [None]}, "containers[0]` has no name"),
                ("spec", {"initContainers": [{"name": 1}]}, "initContainers[0]` has no name"),
                ("spec", {"securityContext": "x"}, "securityContext` is 'x'; expected an object"),
                ("spec", {"containers": [{"name": "a", "securityContext": 1}]}, "containers[0].securityContext` is 1"),
                ("spec", {"containers": [{"name": "a", "env": {"A": 1}}]}, "containers[0].env` is {'A': 1}"),
            )
        ),
        (
            {"kubernetes": {"image": "i", "resources": {"limits": {"cpu": float("inf")}}}},
            "`kubernetes.resources.limits.cpu",
        ),
        *(
            ({"kubernetes": {"image": "i", "resourceClaims": claims}}, f"`kubernetes.resourceClaims[{expected}")
            for claims, expected in (
                ([{}], "0]` has the name None; expected at most 63 small letters, digits and `-`, such as `gpu`"),
                ([{"name": "My_GPU"}], "0]` has the name 'My_GPU'; expected at most 63 small letters"),
                ([{"name": "gpu"}], "0]` (gpu) has neither of resourceClaimTemplateName and resourceClaimName; exp"),
                (
                    [{"name": "gpu", "resourceClaimTemplateName": "a", "resourceClaimName": "b"}],
                    "0]` (gpu) has both of resourceClaimTemplateName and resourceClaimName; expected one of them",
                ),
                (
                    [GPU_CLAIM, GPU_CLAIM],
                    "1]` has the name 'gpu', as another one before it; give each claim a name of its own",
                ),
                (
                    [{**GPU_CLAIM, "source": {}}],
                    "0]` (gpu) has the key source; expected name and resourceClaimTemplateName or resourceClaimName",
                ),
                (
                    [{"name": "gpu", "resourceClaimName": "a/../b"}],
                    "0]` (gpu) has resourceClaimName 'a/../b'; expected the name of an object of the job's namespace",
                ),
                (
                    [{"name": "gpu", "resourceClaimName": 5}],
                    "0]` (gpu) has resourceClaimName 5; expected the name of an object of the job's namespace",
                ),
            )
        ),
        (
            {"kubernetes": {"image": "i", "resourceClaims": ["gpu"]}},
            '`kubernetes.resourceClaims[0]` is "gpu"; expected an object',
        ),
        ({"command": []}, "`command` is missing; launcher kubernetes needs the command of each worker"),
        ({"launcher": "local"}, "`kubernetes` is given, but `launcher` is local; leave the section out"),
        (
            {"job": "My_Job"},
            "`job` is 'My_Job'; pods are named after their job: expected at most 52 small letters, digits and `-`",
        ),
        ({"job": "a" * 53}, "pods are named after their job"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], expected: str) -> None:
    assert expected in refusal(**fields)


def test_the_section_comes_back_from_the_spec_as_it_was_given() -> None:
    body = JobBody.model_validate({**JOB, "kubernetes": {"image": "i", "shmSize": "1Gi"}})
    assert json.loads(body.spec(2).kubernetes) == {"image": "i", "shmSize": "1Gi"}
    assert section_of(body.spec(2)) == body.kubernetes
