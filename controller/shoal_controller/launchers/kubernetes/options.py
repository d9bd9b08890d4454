"""What the Kubernetes launcher is told by the controller's settings. Plain data; imports no client of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal_controller.worker_tokens import WorkerTokens


@dataclass(frozen=True, slots=True)
class PodOptions:
    """What all jobs' pods get."""

    controllers: Callable[[], Sequence[str]]
    """`HOST:PORT` of the controllers, as pods reach them."""
    tokens: WorkerTokens | None = None
    """What makes the join tokens; None: workers need none."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Which cluster it is, and what is looked at there."""

    kubeconfig: str = ""
    """Empty: the cluster that this process runs in."""
    namespace: str = ""
    """Empty: this process's own, or the kubeconfig's."""
    nodes: bool = True
    """Whether nodes may be read. Without them no taint, cordon or vanished node is seen."""
    taints: tuple[str, ...] = ()
    """Taints of nodes that are to go, besides those that are known."""
