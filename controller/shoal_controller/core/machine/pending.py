"""Why a worker that was asked for has not started, and who says that one is to go: what a cluster knows of its pods.

Few kinds, for people and for metrics; each comes with the cluster's own message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class PendingReason(StrEnum):
    """What a pod waits for."""

    UNSCHEDULABLE = "unschedulable"
    """No machine has room for it, or it is not placed yet."""
    GATED = "gated"
    """A queue holds it back."""
    QUOTA = "quota"
    """The namespace's quota is used up: it is not made yet."""
    REFUSED = "refused"
    """The cluster refuses to make it."""
    IMAGE = "image"
    """Its image is being pulled, or cannot be."""
    CONTAINER = "container"
    """Its volumes or containers are being set up, or cannot be."""
    CLUSTER = "cluster"
    """The cluster does not answer."""


ADVICE: Mapping[PendingReason, str] = {
    PendingReason.UNSCHEDULABLE: "add nodes that have room, or ask for less in `kubernetes.resources`",
    PendingReason.QUOTA: "have the quota raised, or ask for fewer workers",
    PendingReason.IMAGE: "check `kubernetes.image` and `kubernetes.imagePullSecrets`",
}
"""What people can do about it. What the others wait for says so itself, or passes."""


def with_advice(reason: PendingReason, why: str) -> str:
    """The cluster's own message, and what to do about it."""
    return f"{why.rstrip('.')}; {ADVICE[reason]}" if reason in ADVICE else why


class Notice(StrEnum):
    """What announces that a worker is to go."""

    DELETED = "deleted"
    """Its pod was deleted, or evicted."""
    DISRUPTED = "disrupted"
    """Its pod is about to be evicted: condition `DisruptionTarget`."""
    CORDONED = "cordoned"
    """Nothing new may run on its node."""
    TAINTED = "tainted"
    """Its node has a taint that says so."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One worker that has not started."""

    reason: PendingReason
    why: str
    since: float
    """Since when it has waited for this reason."""
