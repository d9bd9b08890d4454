"""Every launcher that a controller can have: how it is made, and what the bodies of its jobs must say.

`api/models.py` checks bodies by `LAUNCHERS`; `server.py` makes the launchers that are allowed. Each is imported when it
is made: the client of a cluster takes a second, and commands check bodies without one. What decisions depend on is in
the core (`core/machine/spec.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal_controller.launchers.kubernetes.section import ClusterOptions, PodOptions, pod_faults
from shoal_controller.launchers.launcher import Launcher
from shoal_controller.launchers.worker_logs import WorkerLogs

if TYPE_CHECKING:
    from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi
    from shoal_controller.launchers.kubernetes.pod_launcher import Submit
    from shoal_controller.launchers.kubernetes.request_outcomes import Asked
    from shoal_controller.launchers.local import LocalLauncher


@dataclass(frozen=True, slots=True)
class LauncherMeans:
    """What launchers are made of; each takes its own."""

    local: LocalLauncher
    """This machine's, which the command that runs the controller also uses."""
    pods: PodOptions
    cluster: ClusterOptions
    asked: Asked
    """Hears of all requests to a cluster."""
    submit: Submit
    """To a run of a job: what became of its workers."""


@dataclass(frozen=True, slots=True)
class Made:
    """A launcher that can be used."""

    launcher: Launcher
    cluster: ClusterApi | None = None
    """The cluster whose resources ask for its jobs; None: only REST does."""
    logs: WorkerLogs | None = None
    """Logs of its workers; None: they are files of this machine, or there are none."""


def _no_faults(_: str, __: object) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Registered:
    """A kind of launcher."""

    make: Callable[[LauncherMeans], AbstractAsyncContextManager[Made]]
    """For as long as the context lasts."""
    is_here: bool = False
    """Its workers are processes of this machine, whose records and logs lie in the controller's folders."""
    faults: Callable[[str, Any], Iterator[str]] = _no_faults
    """Sentences on what is wrong with a job's name or its section, None where it has no section."""


@asynccontextmanager
async def _local(means: LauncherMeans) -> AsyncIterator[Made]:
    yield Made(means.local)


@asynccontextmanager
async def _kubernetes(means: LauncherMeans) -> AsyncIterator[Made]:
    from shoal_controller.launchers.kubernetes.pod_launcher import connected, kubernetes_launcher
    from shoal_controller.launchers.kubernetes.pod_logs import PodLogs

    async with (
        connected(means.cluster, means.asked) as api,
        kubernetes_launcher(api, means.pods, means.cluster, means.submit) as launcher,
    ):
        yield Made(launcher, api, PodLogs(api))


LAUNCHERS: Mapping[str, Registered] = {
    "local": Registered(_local, is_here=True),
    "kubernetes": Registered(_kubernetes, faults=pod_faults),
}
"""By kind. The section of a kind in a job's body, where it has one, has the kind's name (`JobBody`)."""
