"""What the launcher asks the API server to make: a worker's pod, and the secret with its job's token. Pure.

A pod is known by its labels: job, run and worker. A pod of several workers has the name and the label of the first, and
`shoal worker` in it starts a process for each. What a pod of ours must have is set last, over all that the job's
section and its patch say: a worker that misses its SIGTERM, or may become root, is nobody's wish.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_protos.channel import GRPC_VARIABLES
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.gang import gang_annotations, gang_labels, gang_scheduler
from shoal_controller.launchers.kubernetes.resource_kind import owner_reference
from shoal_controller.launchers.kubernetes.section import Json, KubernetesSection
from shoal_controller.launchers.launcher import SET_IN_PODS

JOB, RUN, WORKER = "shoal.dev/job", "shoal.dev/run", "shoal.dev/worker"
MANAGED = "app.kubernetes.io/managed-by=shoal,app.kubernetes.io/component=worker"
"""Selects the pods of all jobs."""

CONTAINER = "worker"
LEFT_OVER_SECONDS = 5
"""So much of a pod's grace is left when its worker's is over: it ends, and its container with it."""
UNPRIVILEGED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **GRPC_VARIABLES}


@dataclass(frozen=True, slots=True)
class PodTerms:
    """What all pods of a job have in common."""

    spec: JobSpec
    section: KubernetesSection
    controllers: Sequence[str]
    """`HOST:PORT` of the controllers, as pods reach them."""
    has_token: bool


def pod_name(job: str, worker: WorkerId) -> str:
    """`worker`: the first one of its pod."""
    return f"{job}-{worker}"


def together(worker: WorkerId, spec: JobSpec) -> tuple[WorkerId, ...]:
    """The workers of this one's pod, which ids that follow each other have."""
    each = spec.started_together
    if each == 1:
        return (worker,)
    first = int(worker.removeprefix("w")) // each * each
    return tuple(f"w{number}" for number in range(first, first + each))


def secret_name(job: str) -> str:
    return f"{job}-shoal-token"


def run_label(run: str) -> str:
    """A run's uid as a label takes it."""
    return run if len(run) <= 63 and run.isalnum() else hashlib.sha256(run.encode()).hexdigest()[:32]


def labels_of(spec: JobSpec) -> dict[str, str]:
    """Of all that belongs to a job's run."""
    return {
        "app.kubernetes.io/name": "shoal", "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/instance": spec.job, "app.kubernetes.io/managed-by": "shoal",
        JOB: spec.job, RUN: run_label(spec.run),
    }  # fmt: skip


def pods_of(job: str) -> str:
    """The label selector of a job's pods, whatever its run."""
    return f"{MANAGED},{JOB}={job}"


def pods_path(namespace: str) -> str:
    """All of a namespace."""
    return f"/api/v1/namespaces/{namespace}/pods"


def owners(spec: JobSpec) -> Json:
    """The resource that the job was made from, with which all goes that belongs to it; of other jobs nothing."""
    return {"ownerReferences": [owner_reference(spec.job, spec.resource)]} if spec.resource else {}


def secret(spec: JobSpec, token: str) -> Json:
    """The join token of a job's run."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(spec.job), "labels": labels_of(spec), **owners(spec)},
        "type": "Opaque",
        "stringData": {"token": token},
    }


def pod(worker: WorkerId, terms: PodTerms) -> Json:
    """The pod of one worker; where pods have several, of those whose first it is."""
    section = terms.section
    wanted: Json = {
        "metadata": {"labels": dict(section.labels), "annotations": dict(section.annotations)},
        "spec": {"containers": [_container(worker, terms)], **_placement(section), **_volumes(section)},
    }
    manifest = merged(wanted, section.pod_template)
    _require(manifest, worker, terms)
    return {"apiVersion": "v1", "kind": "Pod", **manifest}


def _container(worker: WorkerId, terms: PodTerms) -> Json:
    section, spec = terms.section, terms.spec
    memory = [{"name": "shm", "mountPath": "/dev/shm"}] if section.shm_size else []
    container: Json = {
        "name": CONTAINER, "image": section.image, "command": _command(spec),
        "resources": _resources(section),
        "env": _env(worker, terms),
        "volumeMounts": [*section.volume_mounts, *memory],
    }  # fmt: skip
    if section.image_pull_policy is not None:
        container["imagePullPolicy"] = section.image_pull_policy
    return {key: value for key, value in container.items() if value not in ([], {})}


def _resources(section: KubernetesSection) -> Json:
    claims = [{"name": claim["name"]} for claim in section.resource_claims]
    return {**section.resources.model_dump(exclude_defaults=True), **({"claims": claims} if claims else {})}


def _command(spec: JobSpec) -> list[str]:
    if spec.started_together == 1:
        return list(spec.command)
    return ["shoal", "worker", "--processes", str(spec.started_together), "--", *spec.command]


def _env(worker: WorkerId, terms: PodTerms) -> list[Json]:
    """Nothing of the controller's own environment. What Shoal says comes last, so that it stands."""
    spec = terms.spec
    plain = {
        **DEFAULTS, **spec.env, "SHOAL_CONTROLLER": ",".join(terms.controllers), "SHOAL_JOB": spec.job,
        "SHOAL_RUN": spec.run, "SHOAL_WORKER_ID": ",".join(together(worker, spec)), "SHOAL_LAUNCHER": "kubernetes",
        "SHOAL_WANTED_WORKERS": str(spec.wanted),
        "SHOAL_GRACE_SECONDS": str(terms.section.grace_seconds - LEFT_OVER_SECONDS),
    }  # fmt: skip
    fields = {"SHOAL_HOST": "status.podIP", "SHOAL_FAILURE_DOMAIN": "spec.nodeName"}
    variables: list[Json] = [{"name": name, "value": value} for name, value in plain.items()]
    variables += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    if terms.has_token:
        reference = {"secretKeyRef": {"name": secret_name(spec.job), "key": "token"}}
        variables.append({"name": "SHOAL_TOKEN", "valueFrom": reference})
    own = {variable["name"] for variable in variables}
    return [*(variable for variable in terms.section.env if variable["name"] not in own), *variables]


def _placement(section: KubernetesSection) -> Json:
    fields = {
        "nodeSelector": dict(section.node_selector), "tolerations": section.tolerations, "affinity": section.affinity,
        "topologySpreadConstraints": section.topology_spread_constraints,
        "resourceClaims": section.resource_claims,
        "serviceAccountName": section.service_account, "priorityClassName": section.priority_class,
        "schedulerName": gang_scheduler(section),
        "imagePullSecrets": [{"name": name} for name in section.image_pull_secrets],
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value}


def _volumes(section: KubernetesSection) -> Json:
    memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": section.shm_size}}
    volumes = [*section.volumes, *([memory] if section.shm_size else [])]
    return {"volumes": volumes} if volumes else {}


def _require(manifest: Json, worker: WorkerId, terms: PodTerms) -> None:
    """● What every pod has, whatever was asked for: see the module's text."""
    spec, section = terms.spec, terms.section
    metadata, body = manifest["metadata"], manifest["spec"]
    for kind in ("labels", "annotations"):
        metadata.setdefault(kind, {})
    metadata["name"] = pod_name(spec.job, worker)
    metadata["labels"] |= labels_of(spec) | {WORKER: worker} | gang_labels(worker, spec, section, run_label(spec.run))
    metadata["annotations"] |= gang_annotations(worker, spec, section)
    metadata |= owners(spec)
    if not metadata["annotations"]:
        del metadata["annotations"]
    body |= {
        "restartPolicy": "Never",
        "shareProcessNamespace": True,  # else Python is process 1, on which SIGTERM has no effect
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": section.grace_seconds,
    }
    user = {"runAsUser": section.run_as_user} if section.run_as_user is not None else {}
    group = {"fsGroup": section.fs_group} if section.fs_group is not None else {}
    body["securityContext"] = {**(body.get("securityContext") or {}), **UNPRIVILEGED, **user, **group}
    for container in [*body["containers"], *(body.get("initContainers") or ())]:
        # ● What a container says for itself beats what its pod says for all of them.
        confined = {**UNPRIVILEGED, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container["securityContext"] = {**(container.get("securityContext") or {}), **confined, "privileged": False}
        if container["name"] == CONTAINER:
            container["terminationMessagePolicy"] = "FallbackToLogsOnError"
            own = [variable for variable in _env(worker, terms) if variable["name"] in SET_IN_PODS]
            others = [one for one in container.get("env") or () if one.get("name") not in SET_IN_PODS]
            container["env"] = [*others, *own]


def merged(target: Json, patch: Mapping[str, Any]) -> Json:
    """A patch on an object: objects are merged, a null removes, lists are replaced, but those of containers, which are
    merged by name.
    """
    result = copy.deepcopy(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            before = result.get(key)
            result[key] = merged(before if isinstance(before, dict) else {}, value)
        elif key == "containers" and isinstance(value, list) and isinstance(result.get(key), list):
            result[key] = _merged_by_name(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged_by_name(items: list[Json], patches: list[Json]) -> list[Json]:
    by_name = {item["name"]: item for item in items}
    for patch in patches:
        by_name[patch["name"]] = merged(by_name.get(patch["name"], {}), patch)
    return list(by_name.values())
