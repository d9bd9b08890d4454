"""Gangs: the first `min` workers of a job start together or not at all, by what Kueue and Volcano document. Pure.

Kueue admits a group of pods of a fixed size, so only the first `min` are one, and every further pod is admitted alone.
A PodGroup of Volcano has a least number of members and no greatest, so all pods of a job are in it. Nothing here talks
to a cluster: `pod_manifest.py` puts this into pods, `pod_writer.py` makes the PodGroup.
"""

from __future__ import annotations

from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.section import Json, KubernetesSection

KUEUE = "kueue.x-k8s.io"
VOLCANO_GROUP, VOLCANO_VERSION = "scheduling.volcano.sh", "v1beta1"
POD_GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
"""By which Volcano's scheduler finds the PodGroup of a pod."""
VOLCANO_SCHEDULER = "volcano"


def pod_group_name(job: str) -> str:
    return f"{job}-shoal"


def pod_groups_path(namespace: str) -> str:
    return f"/apis/{VOLCANO_GROUP}/{VOLCANO_VERSION}/namespaces/{namespace}/podgroups"


def pod_group(spec: JobSpec, section: KubernetesSection, metadata: Json) -> Json:
    """What Volcano is told of a job. `metadata`: labels and owners of all that belongs to it."""
    wanted = {
        "minMember": least_pods(spec), "queue": section.queue, "priorityClassName": section.priority_class,
    }  # fmt: skip
    return {
        "apiVersion": f"{VOLCANO_GROUP}/{VOLCANO_VERSION}",
        "kind": "PodGroup",
        "metadata": {"name": pod_group_name(spec.job), **metadata},
        "spec": {key: value for key, value in wanted.items() if value is not None},
    }


def gang_scheduler(section: KubernetesSection) -> str | None:
    """The scheduler of the pods; one of another name may be a Volcano, too."""
    return section.scheduler or (VOLCANO_SCHEDULER if section.gang == "volcano" else None)


def gang_labels(worker: WorkerId, spec: JobSpec, section: KubernetesSection, run: str) -> dict[str, str]:
    """`run`: the label of the job's run. A group of an earlier run that Kueue still keeps is another one."""
    if section.gang != "kueue":
        return {}
    group = {f"{KUEUE}/pod-group-name": f"{spec.job}-{run[:8]}"} if _is_among_first(worker, spec) else {}
    return {f"{KUEUE}/queue-name": section.queue or "", **group}


def gang_annotations(worker: WorkerId, spec: JobSpec, section: KubernetesSection) -> dict[str, str]:
    if section.gang == "volcano":
        return {POD_GROUP_ANNOTATION: pod_group_name(spec.job)}
    if section.gang != "kueue" or not _is_among_first(worker, spec):
        return {}
    # ● Nobody takes the place of a member that has ended: ids are never used again. Kueue must not wait for one, else
    # the group's quota and its pods, which have a finalizer, would stay for ever.
    return {f"{KUEUE}/pod-group-total-count": str(least_pods(spec)), f"{KUEUE}/retriable-in-group": "false"}


def least_pods(spec: JobSpec) -> int:
    """Pods of the fewest workers that the job trains with."""
    return -(-spec.least_workers // spec.started_together)


def _is_among_first(worker: WorkerId, spec: JobSpec) -> bool:
    number = worker.removeprefix("w")
    return number.isdecimal() and int(number) < spec.least_workers
