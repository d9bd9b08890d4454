"""What a job wants done: the outputs of `machine.step`, carried out by the shell strictly in order.

`Persist` is durable before anything after it goes out, so a generation is in the store before anyone hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_protos.messages import ToWorker
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Goal
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.planning.question import Question


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the job's durable state (what of `job.durable` has changed) before going on."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one connection; drop it silently if the connection is gone."""

    connection: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Close:
    """End a stream after what was sent on it."""

    connection: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Look who answers at a worker's rendezvous port: answered by `Probed` within a second."""

    worker: WorkerId
    incarnation: str
    address: str
    watched: bool = True
    """Whether a connection that is accepted is watched until it ends; otherwise its greeting is the answer."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Find the processes that an earlier life of the controller has started: answered by `Spawned` or `Exited` for each
    that the launcher knows, and by `Spawned`, `Exited` or `NeverStarted` for each of `workers`.
    """

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process for this worker: answered by `Spawned` or `Exited`."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Kill:
    """End this worker's process now (SIGKILL): answered by `Exited`."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class AskPlanner:
    """Have a question answered (`planning.question.answer`): `PlannerBegan`, then `PlannerAnswered` or `PlannerFailed`
    follow.
    """

    number: int
    """Questions of one controller's life are numbered from 1."""
    question: Question
    goal: Goal | None
    """What a planned change is asked for."""


@dataclass(frozen=True, slots=True)
class Note:
    """One entry of the job's event history; the same sentence goes to the log."""

    kind: EventKind
    message: str
    worker: WorkerId = ""
    data: Mapping[str, object] = field(default_factory=dict)
    """Figures, JSON-able."""


Effect = Persist | Send | Close | Probe | Adopt | Spawn | Kill | AskPlanner | Note
