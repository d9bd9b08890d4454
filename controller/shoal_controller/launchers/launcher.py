"""The launcher protocol for what starts and ends workers, and the environment variables that Shoal sets itself.

The shell knows launchers only by this protocol (`background.py` calls them); `registry.py` says which there are. A job
may not set these variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.spec import JobSpec


class JoinTokens(Protocol):
    """Makes the tokens that workers are started with."""

    def join(self, job: str, run: str) -> str:
        """The token of the workers of a run."""


class Launcher(Protocol):
    """Starts and ends workers. It reports the ends that it sees, as `Exited`.

    The shell calls it in the order of the effects, one call per job at a time, and gives each call a deadline.
    """

    async def spawn(self, worker: WorkerId, spec: JobSpec) -> Place:
        """Start this worker; returns where. A `ShoalError` says why it could not be started."""

    async def kill(self, worker: WorkerId, spec: JobSpec) -> None:
        """End the worker at once; one that is already gone is not an error."""

    async def adopt(self, workers: Sequence[WorkerId], spec: JobSpec) -> Mapping[WorkerId, Place | None]:
        """Where they live whom an earlier controller has started for this job; None: one of `workers` that it has not
        started. Whoever has ended is reported as all ends are.
        """

    def world_began(self, world: Plan, spec: JobSpec) -> None:
        """This is the world that trains now, which may be shown wherever its workers are. Never waits, and nothing is
        decided by it. Called again at a take-over.
        """

    async def forget(self, job: str) -> None:
        """End what is left of a job that is over, and delete its logs. Raises `OSError`."""

    async def release(self) -> None:
        """Let go of everything; the workers live on, and whoever leads next adopts them: another controller, or this
        one again.
        """


SET_BY_SHOAL = frozenset(f"SHOAL_{name}" for name in ("CONTROLLER", "JOB", "RUN", "WORKER_ID", "TOKEN"))
"""Whatever starts the worker."""
IN_PODS = ("LAUNCHER", "HOST", "FAILURE_DOMAIN", "GRACE_SECONDS", "WANTED_WORKERS")
SET_IN_PODS = SET_BY_SHOAL | {f"SHOAL_{name}" for name in IN_PODS}
