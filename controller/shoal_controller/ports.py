"""What the shell needs from others: what decides, who sends to workers, who starts processes.

`server.py` hands implementations to `Shell.connect`; `sessions/`, `launchers/` and `metrics.py` provide them, tests
bring small ones. The shell itself knows only these shapes. Whatever happens outside comes back by `Shell.submit`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal_protos.messages import ToWorker
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.effects import Effect
from shoal_controller.core.machine.events import Event, NeverStarted, Spawned
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.spec import JobSpec, JobView

Step = Callable[[Job, Event, float], tuple[Job, Sequence[Effect]]]
"""What an event makes of a job at a time (`machine.step`). A `UserError` refuses an operator's request, and nothing has
changed.
"""
View = Callable[[Job, float], JobView]
"""What people see of a job at a time (`machine.view`)."""


class Senders(Protocol):
    """The streams of the workers (`sessions.service`). Neither call waits or raises: what is gone is dropped."""

    def send(self, connection: int, message: ToWorker) -> None:
        """Put a message on a stream; a stream whose bounded outbox is full is ended."""

    def close(self, connection: int) -> None:
        """End a stream after what was sent on it."""


class Launcher(Protocol):
    """Starts and ends worker processes. Ends that it sees it reports by `shell.submit(job, Exited(…))`.

    The shell calls it in the order of the effects, one call per job at a time, and gives each call a deadline.
    """

    async def spawn(self, worker: WorkerId, spec: JobSpec) -> Spawned:
        """Start a process for this worker. A `ShoalError` says why it could not be started."""

    async def kill(self, worker: WorkerId, spec: JobSpec) -> None:
        """End the worker's process at once; one that is already gone is no error."""

    async def adopt(self, workers: Sequence[WorkerId], spec: JobSpec) -> Sequence[Spawned | NeverStarted]:
        """What became of the processes that an earlier controller started for this job, and of `workers` in any case.

        One event for each that lives or never was; ends are reported as all ends are.
        """

    async def forget(self, job: str) -> None:
        """End what is left of a job that is over, and delete its logs. Raises `OSError`."""

    async def close(self) -> None:
        """Let go of everything of this controller's; the workers live on."""


class Prober(Protocol):
    """Asks an address whether a process still lives (`probes.py`)."""

    def __call__(self, address: str, incarnation: str) -> Awaitable[tuple[bool, bool]]:
        """Whether the process of that incarnation answered there, and whether the host refuses the port."""


@dataclass(frozen=True, slots=True)
class Outside:
    """All that the shell's effects reach."""

    senders: Senders
    prober: Prober
    launchers: Mapping[str, Launcher] = field(default_factory=dict)
    """Launchers by the spec's `launcher`; `none` has none."""
