"""What a pod and its node say of a worker: it waits, runs, has ended, or is to go. Pure; read from what the API serves.

● A node that is not ready proves nothing: its kubelet may be cut off while the pod trains on. That its node is not
there any more, or has the taint `out-of-service`, does: whoever says so has seen to it that nothing runs there.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.events import Exited, Preempted, Waiting
from shoal_controller.core.machine.pending import Notice, PendingReason
from shoal_controller.launchers.kubernetes.pod_manifest import CONTAINER, LEFT_OVER_SECONDS, WORKER

Object = Mapping[str, Any]

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

GOING_TAINTS = (
    "ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption",
    "cloud.google.com/impending-node-termination", "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance", "aws-node-termination-handler/asg-lifecycle-termination",
)  # fmt: skip
"""Taints of nodes that are to go."""
HINT_TAINTS = ("aws-node-termination-handler/rebalance-recommendation", "DeletionCandidateOfClusterAutoscaler")
"""Taints of nodes that may be to go: most of them stay."""

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
HOPELESS_REASONS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CrashLoopBackOff")
"""The cluster has tried, and waits longer before each time that it tries again."""


@dataclass(frozen=True, slots=True)
class PodState:
    """All that is known of a worker by its pod, as the events that tell its job."""

    place: Place
    wait: Waiting | None = None
    announcement: Preempted | None = None
    hint: str = ""
    """Why it may be to go."""
    end: Exited | None = None
    deleted_at: str = ""
    """When a pod that is being deleted is to be gone."""


def worker_of(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(WORKER, ""))


def node_of(pod: Object) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def is_terminating(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def state_of(pod: Object, node: Object | None, taints: Sequence[str], now: float) -> PodState:
    """`node`: as far as it is known. `taints`: of nodes that are to go, besides `GOING_TAINTS`."""
    phase = pod.get("status", {}).get("phase", "Pending")
    running = phase == "Running"
    metadata = pod["metadata"]
    place = Place.of_pod(metadata["name"], metadata["uid"], node_of(pod) if running else "")
    if phase in ("Succeeded", "Failed"):
        return PodState(place, end=_end(pod))
    if running and node is not None and OUT_OF_SERVICE in _taints(node):  # of a pod just placed its node is older news
        why = f"its node {node_of(pod)} has the taint {OUT_OF_SERVICE}"
        return PodState(place, end=Exited(worker_of(pod), None, why))
    if (keepers := metadata.get("finalizers")) and metadata.get("deletionGracePeriodSeconds") == 0:
        why = f"its pod {metadata['name']} was deleted, and only its finalizers keep it ({', '.join(keepers)})"
        return PodState(place, end=Exited(worker_of(pod), None, why))
    wait = None if running else _start_wait(pod)
    hints = [key for key in _taints(node or {}) if key in HINT_TAINTS]
    hint = f"its node {node_of(pod)} has the taint {hints[0]}" if hints else ""
    announcement = _announcement(pod, node, (*GOING_TAINTS, *taints), now)
    return PodState(place, wait, announcement, hint, deleted_at=str(metadata.get("deletionTimestamp") or ""))


def gone(pod: Object, why: str) -> Exited:
    """The end of a pod that is not there any more, with its exit status where that is known."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return _end(pod)
    return Exited(worker_of(pod), None, why)


# ---- it waits


def _conditions(pod: Object) -> Mapping[str, Object]:
    return {str(one.get("type")): one for one in pod.get("status", {}).get("conditions") or ()}


def _start_wait(pod: Object) -> Waiting:
    worker = worker_of(pod)
    scheduled = _conditions(pod).get("PodScheduled", {})
    message = str(scheduled.get("message") or "")
    if not node_of(pod):
        if scheduled.get("reason") == "SchedulingGated" or pod.get("spec", {}).get("schedulingGates"):
            gates = ", ".join(str(gate.get("name")) for gate in pod.get("spec", {}).get("schedulingGates") or ())
            return Waiting(worker, PendingReason.GATED, message or f"the pod is held back by {gates or 'a queue'}")
        return Waiting(worker, PendingReason.UNSCHEDULABLE, message or "the scheduler has not placed the pod yet")
    waiting = [found for status in _statuses(pod) if (found := status.get("state", {}).get("waiting"))]
    worst = next((one for one in waiting if one.get("reason") in HOPELESS_REASONS), waiting[0] if waiting else {})
    reason, message = str(worst.get("reason") or ""), str(worst.get("message") or "")
    kind = PendingReason.IMAGE if reason in IMAGE_REASONS else PendingReason.CONTAINER
    sentence = ": ".join(filter(None, (reason, message))) or f"node {node_of(pod)} has not started the pod yet"
    return Waiting(worker, kind, sentence, reason in HOPELESS_REASONS)


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


# ---- it has ended


def _end(pod: Object) -> Exited:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    worker = worker_of(pod)
    ended = next(
        (one["state"]["terminated"] for one in _statuses(pod)
         if one.get("name") == CONTAINER and one.get("state", {}).get("terminated")), None,
    )  # fmt: skip
    evicted = ": ".join(filter(None, (str(status.get("reason") or ""), str(status.get("message") or ""))))
    if ended is None:
        return Exited(worker, None, f"its pod {name} has ended ({evicted or 'its exit status is not known'})")
    code = int(ended.get("exitCode", 0))
    number = int(ended.get("signal") or 0) or (code - 128 if code > 128 else 0)
    cause = str(ended.get("reason") or "")
    extra = "; ".join(filter(None, (cause if cause not in ("Error", "Completed") else "", evicted)))
    suffix = f" ({extra})" if extra else ""
    tail = str(ended.get("message") or "")
    if number:
        return Exited(worker, -number, f"its pod {name} was ended by {_signal(number)}{suffix}", tail)
    return Exited(worker, code, f"its pod {name} ended with status {code}{suffix}", tail)


def _signal(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


# ---- it is to go


def _taints(node: Object) -> list[str]:
    return [str(taint.get("key")) for taint in node.get("spec", {}).get("taints") or ()]


def _announcement(pod: Object, node: Object | None, taints: Sequence[str], now: float) -> Preempted | None:
    """The most pressing one: a pod that is being deleted has the least time."""
    worker, name, spec = worker_of(pod), pod["metadata"]["name"], pod.get("spec", {})
    grace = float(spec.get("terminationGracePeriodSeconds", 30))
    if is_terminating(pod):
        left = _seconds(pod["metadata"]["deletionTimestamp"]) - now
        return _announced(worker, Notice.DELETED, f"its pod {name} is being deleted", min(grace, left))
    disrupted = _conditions(pod).get("DisruptionTarget", {})
    if disrupted.get("status") == "True":
        words = ": ".join(filter(None, (str(disrupted.get("reason") or ""), str(disrupted.get("message") or ""))))
        return _announced(
            worker, Notice.DISRUPTED, f"its pod {name} is to be evicted ({words or 'no reason given'})", grace
        )
    if node is None:
        return None
    if found := [key for key in _taints(node) if key in taints]:
        return _announced(worker, Notice.TAINTED, f"its node {node_of(pod)} has the taint {found[0]}", grace)
    if node.get("spec", {}).get("unschedulable"):
        return _announced(worker, Notice.CORDONED, f"its node {node_of(pod)} is cordoned", grace)
    return None


def _announced(worker: WorkerId, notice: Notice, why: str, seconds: float) -> Preempted:
    return Preempted(worker, notice, why, max(0.0, round(seconds - LEFT_OVER_SECONDS, 1)))


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
