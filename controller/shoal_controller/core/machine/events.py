"""What can happen to a job: the inputs of `machine.step`, which come in batches (`first_batch`). Plain data.

An operator's requests are in `shoal_protos/acts.py`.

A `connection` is a number that the sessions room gives to each stream; it is never used twice in a controller's life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shoal_protos.acts import OperatorRequest
from shoal_protos.messages import AskSeat, Heartbeat, Hello, Inventory, Ready, Request, Result
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.effects import AskPlanner
from shoal_controller.core.machine.pending import Notice, PendingReason
from shoal_controller.core.planning.question import Answer


@dataclass(frozen=True, slots=True)
class Proof:
    """What the token of a worker's stream proves: `worker_tokens.py` reads it, `phases/claims.py` judges it.

    A join token names a run of a job; a session token also one process of it.
    """

    job: str
    run: str
    worker: WorkerId = ""
    """Empty: a join token, which proves nothing of who shows it."""
    incarnation: str = ""

    @property
    def names_a_process(self) -> bool:
        return bool(self.incarnation)


@dataclass(frozen=True, slots=True)
class Started:
    """The controller has (re)started with the job's durable state. The first event of every life."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The shell sends one every 0.1 s while the job lives."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker opened a stream and said hello. Answered by `Welcome` or `Refusal` on that connection."""

    connection: int
    hello: Hello
    proof: Proof | None = None
    """What its token proves; None: nothing need be proved."""
    release: str = field(default="", compare=False)
    """The release of Shoal that this controller runs."""

    @property
    def opening(self) -> Hello:
        """What it opened the stream with."""
        return self.hello


@dataclass(frozen=True, slots=True)
class SeatAsked:
    """A process that has not built its model asks for its coordinate. Answered by `Seat` or `Refusal` on that
    connection, which ends then.
    """

    connection: int
    opening: AskSeat
    proof: Proof | None = None
    """What its token proves; None: nothing need be proved."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A worker said something on an accepted connection."""

    connection: int
    message: Heartbeat | Ready | Inventory | Request | Result


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A stream ended; whether its worker is dead is not known by that."""

    connection: int
    why: str


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to `Probe`: what a connection to the worker's rendezvous port met."""

    worker: WorkerId
    incarnation: str
    refused: bool
    """The host refuses the port. What that proves: `phases/failure_detector.py`."""
    reached: bool = False
    """The process of this incarnation has answered there (before the host refused the port, if it did)."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """The launcher has asked for this worker, or has found it after a restart of the controller. Told again when a pod
    has started.
    """

    worker: WorkerId
    place: Place


@dataclass(frozen=True, slots=True)
class Waiting:
    """A worker was asked for, and what it is to run in has not started: no machine has room, its image is not there."""

    worker: WorkerId
    reason: PendingReason
    why: str
    """The cluster's own message."""
    hopeless: bool = False
    """It will not start by itself, however long anybody waits."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """What a worker runs in, or on, is to go: its drain begins at once. Told again, it is still one drain."""

    worker: WorkerId
    notice: Notice
    why: str
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Spared:
    """Nothing announces any more that this worker is to go."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class Endangered:
    """What a worker runs on may be to go, says whoever runs it; empty: it says so no longer. A spare is asked for."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class NeverStarted:
    """No process of this worker is there, and none has ended: an earlier controller died before it started one."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Exited:
    """The launcher saw the worker's process end, or could not start it: its death is confirmed."""

    worker: WorkerId
    code: int | None
    """Exit status; negative: the signal; None: unknown (adopted) or never started."""
    why: str
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class PlannerBegan:
    """The planner has taken up a question: those of other jobs, for which it stood in line, are answered."""

    number: int


@dataclass(frozen=True, slots=True)
class PlannerAnswered:
    """A plan for what was asked, or the blocks of which nobody has a copy."""

    asked: AskPlanner
    answer: Answer


@dataclass(frozen=True, slots=True)
class PlannerFailed:
    """There is no answer to this question: its process died, or the planner failed."""

    number: int
    why: str


Event = (
    Started | Tick | Connected | SeatAsked | MessageReceived | Disconnected | Probed | Spawned | Waiting | Preempted
    | Spared | Endangered | NeverStarted | Exited | PlannerBegan | PlannerAnswered | PlannerFailed | OperatorRequest
)  # fmt: skip

One = TypeVar("One")


MOST_AT_ONCE = 64
"""Events of one batch. A thousand hellos are not handled in one go: other jobs' heartbeats wait meanwhile."""


def first_batch(waiting: Sequence[One], event_of: Callable[[One], Event]) -> tuple[list[One], list[One]]:
    """Of what waits, the oldest first: what the machine is given now, and the rest. All that is there is one batch up
    to `MOST_AT_ONCE`, but for an operator's request, which is one by itself: where it is refused, nothing else is. ● A
    tick comes last: time never overtakes what was heard.
    """
    line = sorted(waiting, key=lambda one: isinstance(event_of(one), Tick))
    requests = (place for place, one in enumerate(line) if isinstance(event_of(one), OperatorRequest))
    size = min(next(requests, len(line)), MOST_AT_ONCE) or 1
    return line[:size], line[size:]
