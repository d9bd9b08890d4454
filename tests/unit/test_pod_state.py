"""What a pod and its node say: waits, runs, ends, is to go."""

from __future__ import annotations

from typing import Any

import pytest
from rule import Edit, rule
from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.events import Exited, Preempted, Waiting
from shoal_controller.core.machine.pending import Notice, PendingReason
from shoal_controller.launchers.kubernetes.pod_state import GOING_TAINTS, state_of

NOON = 1_780_000_000.0


def pod(phase: str = "Running", node: str = "a", **status: Any) -> dict[str, Any]:
    metadata = {"name": "demo-w0", "uid": "u", "labels": {"shoal.dev/worker": "w0"}}
    return {"metadata": metadata, "spec": {"nodeName": node, "terminationGracePeriodSeconds": 60},
            "status": {"phase": phase, **status}}  # fmt: skip


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}}]}


def ended(code: int, **more: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": code, **more}}}]}


def node(*taints: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "spec": {"taints": [{"key": key} for key in taints], **spec}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (pod("Pending", ""), Waiting("w0", PendingReason.UNSCHEDULABLE, "the scheduler has not placed the pod yet")),
        (pod("Pending", "", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                         "message": "0/3 nodes are available"}]),
         Waiting("w0", PendingReason.UNSCHEDULABLE, "0/3 nodes are available")),
        ({**pod("Pending", ""), "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}},
         Waiting("w0", PendingReason.GATED, "the pod is held back by kueue.x-k8s.io/admission")),
        (pod("Pending"), Waiting("w0", PendingReason.CONTAINER, "node a has not started the pod yet")),
        (pod("Pending", **waiting("ContainerCreating")), Waiting("w0", PendingReason.CONTAINER, "ContainerCreating")),
        (pod("Pending", **waiting("ErrImagePull", "no such host")),
         Waiting("w0", PendingReason.IMAGE, "ErrImagePull: no such host")),
        (pod("Pending", **waiting("ImagePullBackOff", "not found")),
         Waiting("w0", PendingReason.IMAGE, "ImagePullBackOff: not found", hopeless=True)),
        (pod("Pending", **waiting("InvalidImageName")),
         Waiting("w0", PendingReason.IMAGE, "InvalidImageName", hopeless=True)),
        (pod("Pending", initContainerStatuses=waiting("CrashLoopBackOff", "back-off 40s")["containerStatuses"]),
         Waiting("w0", PendingReason.CONTAINER, "CrashLoopBackOff: back-off 40s", hopeless=True)),
        (pod(), None),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_pod_waits_for(found: dict[str, Any], expected: Waiting | None) -> None:
    assert state_of(found, None, (), NOON).wait == expected


def test_a_pod_has_a_node_once_it_runs() -> None:
    assert state_of(pod("Pending"), None, (), NOON).place == Place.of_pod("demo-w0", "u")
    assert state_of(pod(), None, (), NOON).place == Place.of_pod("demo-w0", "u", "a")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (pod("Succeeded", **ended(0)), Exited("w0", 0, "its pod demo-w0 ended with status 0")),
        (pod("Failed", **ended(1, message="ValueError: x")),
         Exited("w0", 1, "its pod demo-w0 ended with status 1", "ValueError: x")),
        (pod("Failed", **ended(137, reason="OOMKilled")),
         Exited("w0", -9, "its pod demo-w0 was ended by SIGKILL (OOMKilled)")),
        (pod("Failed", **ended(143)), Exited("w0", -15, "its pod demo-w0 was ended by SIGTERM")),
        (pod("Failed", reason="Evicted", message="low on memory"),
         Exited("w0", None, "its pod demo-w0 has ended (Evicted: low on memory)")),
        (pod("Failed"), Exited("w0", None, "its pod demo-w0 has ended (its exit status is not known)")),
    ],
    ids=str,
)  # fmt: skip
def test_how_a_pod_has_ended(found: dict[str, Any], expected: Exited) -> None:
    assert state_of(found, None, (), NOON).end == expected


@rule(
    "That a node is gone, or out of service, proves the death of its pods; that it is not ready proves nothing",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.launchers.kubernetes.pod_state",
            "    if running and node is not None and OUT_OF_SERVICE in _taints(node):  # of a pod just placed "
            "its node is older news\n",
            "    if node is not None and not node:\n",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.pod_launcher",
            "*self._nodes.items) and self._nodes.synced.is_set():",
            "*self._nodes.items) and not tracked.uid:",
        ),
    ],
)
def test_a_node_that_is_out_of_service_proves_a_death_and_one_that_is_not_ready_does_not() -> None:
    assert state_of(pod(), node("node.kubernetes.io/out-of-service"), (), NOON).end is not None
    unreachable = {
        **node("node.kubernetes.io/unreachable"),
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
    }
    state = state_of(pod(), unreachable, (), NOON)
    assert state.end is None and state.announcement is None


def test_a_pod_that_its_node_has_not_started_is_no_death_though_the_node_was_out_of_service_when_last_heard_of() -> (
    None
):
    """Pods and nodes are watched apart: a pod may be placed on a node whose taint is gone, before that is known."""
    assert state_of(pod("Pending"), node("node.kubernetes.io/out-of-service"), (), NOON).end is None


@pytest.mark.parametrize("taint", GOING_TAINTS)
def test_a_taint_of_a_node_that_is_to_go_announces_it(taint: str) -> None:
    assert state_of(pod(), node(taint), (), NOON).announcement == Preempted(
        "w0", Notice.TAINTED, f"its node a has the taint {taint}", 55.0
    )


@pytest.mark.parametrize(
    "taint", ["aws-node-termination-handler/rebalance-recommendation", "DeletionCandidateOfClusterAutoscaler", "mine"]
)
def test_a_hint_and_any_other_taint_announce_nothing(taint: str) -> None:
    assert state_of(pod(), node(taint), (), NOON).announcement is None


def test_a_taint_of_the_settings_announces_it() -> None:
    found = state_of(pod(), node("mine"), ("mine",), NOON).announcement
    assert found is not None and found.notice is Notice.TAINTED


def test_of_several_notices_the_most_pressing_one_is_told() -> None:
    cordoned = node("karpenter.sh/disrupted", unschedulable=True)
    dying = pod(conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}])
    assert state_of(pod(), node(unschedulable=True), (), NOON).announcement == Preempted(
        "w0", Notice.CORDONED, "its node a is cordoned", 55.0
    )
    disrupted = state_of(dying, cordoned, (), NOON).announcement
    assert disrupted is not None and disrupted.notice is Notice.DISRUPTED
    dying["metadata"]["deletionTimestamp"] = "2026-05-28T20:26:50Z"
    deleted = state_of(dying, cordoned, (), NOON).announcement
    assert deleted == Preempted("w0", Notice.DELETED, "its pod demo-w0 is being deleted", 5.0)
    assert state_of(dying, cordoned, (), NOON + 60).announcement == Preempted(
        "w0", Notice.DELETED, "its pod demo-w0 is being deleted", 0.0
    )
