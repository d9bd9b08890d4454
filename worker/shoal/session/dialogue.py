"""What this process says to its controller, and what it makes of the answers. No I/O, no clock, no thread.

Fed by the session's thread (`on_message`), by the training thread through its link (`update_status`, `answer`, …) and
by the builders; its driver carries out the effects that it returns, sends what `take_outgoing` gives, and holds one
lock around all of it. What is to be said is kept as the latest of each kind, so nothing piles up while no controller
is there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from shoal_protos.activity import Activity, StepPhase
from shoal_protos.description import Description, brief
from shoal_protos.gpu import Gpu
from shoal_protos.messages import (
    GRACE_SECONDS,
    PROTOCOL_VERSION,
    Alive,
    Ask,
    Describe,
    Drain,
    Ending,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Open,
    Ping,
    PlanMessage,
    Prepare,
    Ready,
    Refusal,
    Request,
    RequestKind,
    Result,
    Shutdown,
    Status,
    Telemetry,
    ToController,
    ToWorker,
    Welcome,
)
from shoal_protos.plan import Plan, check_plan
from shoal_protos.release import RELEASE

from shoal.core.membership import Membership
from shoal.session.link import Asked, Ended, Item, JobInfo, Opened, Planned, Stopped

REMEMBERED_ASKS = 64
HEARTBEAT_SECONDS, RECONNECT_SECONDS = 1.0, 10.0
"""Until the welcome says otherwise."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is for its controller, until it starts over under another id."""

    worker: str
    """Empty: the controller gives it one."""
    incarnation: str
    coordinate: int = 0
    """Its place in a cell, for as long as it lives."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What does not change in a process's life."""

    job: str
    host: str
    pid: int
    domain: str
    address: str
    """Address of its own rendezvous server."""
    run: str = ""
    """Run of the job, as its launcher named it; empty: the first welcome does."""
    grace_seconds: float = GRACE_SECONDS
    """What it asks for where it asks to be drained."""
    coordinate: int = 0
    """Its place in a cell."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Every group, built or being built, is over now."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build the group of this plan on a thread of its own."""

    plan: Plan
    rank: int
    joiner: bool
    """Its first message is awaited in the group."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message for the training thread."""

    item: Item


Effect = Abort | Build | Deliver


class Dialogue:
    """One per process; it outlives streams and controllers. `membership` is guarded by the driver's lock too."""

    def __init__(self, membership: Membership, process: ProcessInfo, description: Description, status: Status) -> None:
        self.membership = membership
        self.process, self.description = process, description
        self._brief = brief(description)
        self.heartbeat_seconds = HEARTBEAT_SECONDS
        self.reconnect_seconds = RECONNECT_SECONDS
        self.job = JobInfo(process.job, process.run)
        """Its run is empty until a launcher or the controller has named it."""
        self.cluster = ""
        """The id of the store that has welcomed this process."""
        self.welcomed = False
        self.ending: Shutdown | None = None
        """Set when the controller has said the last word."""
        self.status = 0
        """What this process then exits with, where it is to end and has not failed."""
        self.refusal = ""
        """The sentence of a final refusal, or of the last one that said to try again."""
        self.broken: tuple[str, ...] = ()
        """Peers to whom the current group's connection broke."""
        self.dead: tuple[str, ...] = ()
        """Incarnations of members on this host that have died, until a plan comes without them."""
        self.activities: Mapping[int, Activity] = {}
        """Activities by generation, as the driver last saw them: what this process does in its groups."""
        self.gpu: Gpu | None = None
        """The figures of the GPU, as the driver last saw them."""
        self._status, self._telemetry = status, Telemetry()
        self._held_back: Status | None = None
        """What is sent meanwhile, from a world's beginning until the training thread says where it stands in it."""
        self._last_sent = status
        self._sequence = 0
        self._drain = False
        self._echo = 0
        self._opened_generation = 0
        self._asks: deque[tuple[str, int]] = deque(maxlen=REMEMBERED_ASKS)
        self._inventory: Inventory | None = None
        self._result: Result | None = None
        self._due: dict[type[ToController], None] = {}
        self._has_news = False
        """The status has changed since it was last said."""

    # ---- what goes out

    def say_hello(self) -> Hello:
        """The first message of every stream. What else must be known goes out again after it."""
        self._due, self._has_news = {}, False
        if self._result is not None:
            self._due[Result] = None
        if self._drain:
            self._due[Request] = None
        checkpoint = self._status.checkpoint
        return Hello(
            version=PROTOCOL_VERSION,
            job=self.job.name,
            worker=self.membership.worker,
            incarnation=self.membership.incarnation,
            address=self.process.address,
            host=self.process.host,
            pid=self.process.pid,
            domain=self.process.domain,
            description=self._brief,
            status=self._number_status(),
            next_generation=max(self.membership.newest_planned, checkpoint.generation if checkpoint is not None else 0),
            run=self.job.run,
            release=RELEASE,
            coordinate=self.process.coordinate,
        )

    @property
    def due(self) -> bool:
        """Whether there is something to say."""
        return bool(self._due) or self._has_news

    def take_outgoing(self) -> list[ToController]:
        """What is due, in the order in which it became due; after that nothing is. A status that has changed is news
        for a heartbeat of its own only where nothing else of this has said it.
        """
        due, self._due = self._due, {}
        has_news, self._has_news = self._has_news, False
        outgoing = [self._compose(kind) for kind in due]
        if has_news and _is_news(self._current_status(), self._last_sent):
            outgoing.append(self._compose(Heartbeat))
        return [message for message in outgoing if message is not None]

    def beat(self) -> None:
        """A heartbeat is due."""
        self._due[Heartbeat] = None

    def _compose(self, kind: type[ToController]) -> ToController | None:
        if kind is Hello:
            return replace(self.say_hello(), description=self.description)
        if kind is Heartbeat:
            own, others = _own_and_others(self.membership, self.activities)
            telemetry = self._telemetry if self.gpu is None else replace(self._telemetry, gpu=self.gpu)
            return Heartbeat(self._number_status(), telemetry, self._echo, own, others)
        if kind is Ready:
            is_ready = self.membership.state is MemberState.READY
            return Ready(self.membership.promised, self._number_status()) if is_ready else None
        if kind is Request:
            return Request(RequestKind.DRAIN, self.process.grace_seconds, self.membership.generation)
        if kind is Inventory and self._inventory is not None:
            return replace(self._inventory, status=self._number_status())
        return self._result if kind is Result else None

    def _number_status(self) -> Status:
        """The status now, with the next number."""
        self._last_sent = replace(self._current_status(), sequence=self._sequence + 1)
        self._sequence += 1
        return self._last_sent

    def _current_status(self) -> Status:
        if self._held_back is not None:
            return replace(self._held_back, dead=self.dead, drain=self._drain)
        membership = self.membership
        return replace(
            self._status,
            generation=membership.generation,
            state=membership.state,
            promised=membership.newest_known,
            broken=self.broken,
            dead=self.dead,
            drain=self._drain,
            grace_seconds=self.process.grace_seconds,
        )

    def notice(self) -> None:
        """Something may have changed: it is said at once if more than the step did."""
        self._has_news = _is_news(self._current_status(), self._last_sent)

    @property
    def script_has_ended(self) -> bool:
        """Nothing is left to do here but to serve changes."""
        return self._status.ended and self._status.done

    # ---- from the training thread

    def update_status(self, status: Status, telemetry: Telemetry) -> None:
        """Where the training thread says that it stands."""
        self._status, self._telemetry, self._held_back = status, telemetry, None
        self.notice()

    def on_vote_over(self) -> list[Effect]:
        """A vote has passed that changes nothing: what came meanwhile is carried out now."""
        deferred = self.membership.take_deferred()
        return self._on_plan(deferred) if deferred is not None else []

    def answer(self, inventory: Inventory) -> None:
        """The answer to the last PREPARE."""
        if inventory.answers == self.membership.promised:
            self._inventory = inventory
            self._due[Inventory] = None
        self.notice()

    def report_ready(self, generation: int) -> bool:
        """False: another PREPARE came meanwhile."""
        if not self.membership.report_ready(generation):
            return False
        self._due[Ready] = None
        return True

    def begin(self, plan: Plan) -> None:
        """A world begins. The controller hears of it when the training thread next says where it stands."""
        self._held_back = self._current_status()
        self.membership.begin(plan)
        self._forget_peers(plan)
        if plan.recovery is not None and self._result is not None and plan.recovery.step < self._result.step:
            self._result = None  # the job goes back, and makes those steps again
        if self._result is not None:  # a controller of a restored store did not take it from a member of no world
            self._due[Result] = None

    def report(self, result: Result) -> None:
        """How it ended. Sent again on every new stream, and in every new world."""
        self._result = replace(result, generation=self.membership.generation)
        self._due[Result] = None

    # ---- from elsewhere

    def request_drain(self) -> None:
        """SIGTERM."""
        self._drain = True
        self._due[Request] = None
        self.beat()

    def on_broken_peers(self, peers: set[str]) -> None:
        """Connections of the current group were seen to break."""
        self.broken = tuple(sorted(peers.union(self.broken)))
        self.notice()

    def on_death(self, incarnation: str) -> None:
        """A member on this host was seen to die."""
        self.dead = tuple(sorted({*self.dead, incarnation}))
        self.notice()

    def start_over(self, incarnation: str) -> None:
        """Start over as a joiner with a new id from the controller."""
        self.membership.worker, self.membership.incarnation = "", incarnation
        self.membership.start_over()
        self.ending, self.welcomed, self.broken, self.dead = None, False, (), ()
        self._inventory = self._result = None
        self._asks.clear()  # what the life before was asked for it may have forgotten
        self._status = Status(self._sequence, 0, MemberState.WARMING_UP, 0, step=-1, committed_in=0)
        self._held_back = None

    # ---- from the controller

    def on_message(self, message: ToWorker) -> list[Effect]:
        """Raises `PeerError` for an unsound plan."""
        effects = self._take_in(message)
        self.notice()
        return effects

    def _take_in(self, message: ToWorker) -> list[Effect]:
        match message:
            case Describe():
                self._due[Hello] = None
            case Welcome():
                self._on_welcome(message)
            case Ping(number):
                self._echo = number
                self.beat()
            case Prepare(generation):
                return self._on_prepare(generation)
            case PlanMessage(plan):
                return self._on_plan(plan)
            case Open(generation) if self.membership.on_open(generation) and generation != self._opened_generation:
                self._opened_generation = generation
                return [Deliver(Opened(generation))]
            case Ask(kind, number) if (kind, number) not in self._asks:
                self._asks.append((kind, number))
                return [Deliver(Asked(kind, number))]
            case Shutdown():
                return self.end(message)
            case Refusal():
                self.refusal = message.sentence
                ended = is_final(message, self.membership.generation, self.cluster, self.job.run)
                return self.end(Shutdown(Ending.FAILED, message.sentence)) if ended else []
            case Open() | Ask() | Drain() | Alive():
                pass  # came before; a drain needs nothing but the plan that will leave us out
        return []

    def _on_welcome(self, welcome: Welcome) -> None:
        self.membership.worker = welcome.worker
        self.heartbeat_seconds, self.reconnect_seconds = welcome.heartbeat_seconds, welcome.reconnect_seconds
        resume = json.loads(welcome.resume) if welcome.resume else None
        self.job = JobInfo(
            self.job.name, welcome.run, resume, welcome.opened_generations, welcome.step, welcome.loss,
            welcome.checkpoint, welcome.checkpoint_marks, welcome.stall_seconds,
        )  # fmt: skip
        self.cluster, self.welcomed = welcome.cluster, True

    def _on_prepare(self, generation: int) -> list[Effect]:
        if self.membership.on_prepare(generation):
            self._inventory = None
            return [Deliver(Stopped(generation)), Abort()]
        if self._inventory is not None and self._inventory.answers == generation == self.membership.promised:
            self._due[Inventory] = None
        return []

    def _on_plan(self, plan: Plan) -> list[Effect]:
        check_plan(plan)
        membership = self.membership
        if plan.recovery is not None:
            wanted = membership.on_recovery(plan)
        else:
            wanted = membership.on_planned(plan) and membership.builds(plan)
        rank = plan.rank_of(membership.worker, membership.incarnation)
        if not wanted or rank is None:
            return []
        if plan.recovery is None:
            return [Build(plan, rank, joiner=membership.is_joiner)]
        self._forget_peers(plan)
        return [Build(plan, rank, joiner=False), Deliver(Planned(plan))]

    def _forget_peers(self, plan: Plan) -> None:
        """Connections are new with a plan, and a death that it was made after is known."""
        members = {member.incarnation for member in plan.members}
        self.broken, self.dead = (), tuple(incarnation for incarnation in self.dead if incarnation in members)

    def end(self, shutdown: Shutdown, status: int = 0) -> list[Effect]:
        """Nothing more is sent or taken in."""
        self.ending, self.status = shutdown, status
        return [Deliver(Ended(shutdown.ending, shutdown.reason, status)), Abort()]


_PROGRESS = frozenset({"sequence", "step", "boundaries"})
_without_progress = attrgetter(*(field.name for field in fields(Status) if field.name not in _PROGRESS))


def _is_news(status: Status, last_sent: Status) -> bool:
    """Whether it says what is worth a heartbeat of its own."""
    return bool(_without_progress(status) != _without_progress(last_sent))


def is_final(refusal: Refusal, generation: int, cluster: str, run: str) -> bool:
    """● Whether a process is to end. One that is in a world trains on beside a controller that cannot know.

    `generation`: of its world; `cluster`: the store that has welcomed it; `run`: what it was launched or welcomed for.
    """
    if not generation:
        return refusal.final and not (refusal.unknown_job and run)
    return refusal.ends_members and bool(cluster) and refusal.cluster == cluster


def _own_and_others(
    membership: Membership, activities: Mapping[int, Activity]
) -> tuple[Activity, tuple[Activity, ...]]:
    """What the training thread does, in the group of its world or of the one that takes its place; and the builds."""
    others = dict(activities)
    coming = [plan.generation for plan in (membership.recovery, membership.begins) if plan is not None]
    inside = [number for number in coming if number in others and _is_inside(others[number])]
    own = others.pop(next(iter(inside), membership.generation), Activity(membership.generation))
    return own, tuple(others.values())


def _is_inside(activity: Activity) -> bool:
    return activity.phase > StepPhase.BUILT or bool(activity.boundary)
