"""A simulated job: the controller's own job machine, and its workers as one, which answer what it says.

What the controller hears, it hears in the messages of real workers. A death is noticed as on machines that refuse
connections to dead processes. What a world trains is in `stepping.py`.
"""

from __future__ import annotations

from collections import Counter

from shoal_protos.messages import (
    Describe,
    Ending,
    MemberState,
    Open,
    Ping,
    PlanMessage,
    Prepare,
    Shutdown,
    ToWorker,
    Welcome,
)
from shoal_protos.plan import Plan

from shoal_controller.core.machine.effects import AskPlanner, Close, Effect, Note, Probe, Send
from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Event,
    MessageReceived,
    PlannerAnswered,
    Probed,
    Started,
    Tick,
)
from shoal_controller.core.machine.machine import new_job, step
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.planning.question import answer
from shoal_controller.simulation.clock import Clock
from shoal_controller.simulation.member import SimulatedMember
from shoal_controller.simulation.paces import Paces, SimulatedJob
from shoal_controller.simulation.stepping import SteppingWorld

FIRST_TICK, LONGEST_TICK = 0.1, 20.0
"""Seconds between two looks at the time after something has happened. Then the job rests."""
TICKS_GROW = 3


class Fleet:
    """See the module's text. `host` has the job."""

    def __init__(self, clock: Clock, job: SimulatedJob, paces: Paces) -> None:
        self.clock, self.job, self.paces = clock, job, paces
        self.members: dict[int, SimulatedMember] = {}
        """By connection, those that live."""
        self.world = SteppingWorld(clock, job, paces, self)
        self.host = MachineHost(clock, job.spec(), self, paces.latency)
        self.look_is_due = False
        """At the next barrier: in the middle of a step it is not known what becomes of its seconds."""
        self._connections = 0
        self._on: dict[int, SimulatedMember] = {}
        """By machine."""
        self._building: Counter[int] = Counter()
        self._opened: dict[int, set[int]] = {}
        self._tick, self._ticks, self._looked_at = FIRST_TICK, 0, -1.0

    # ---- machines

    def come(self, machine: int) -> None:
        """A machine is there: its worker starts."""
        self._on[machine] = self._start(machine)

    def go(self, machine: int) -> None:
        """A machine is gone, with its worker."""
        if self._looked_at != self.clock.now:  # many may go at one instant
            self.look()
        member = self._on.pop(machine)
        member.alive = False
        if self.members.pop(member.connection, None) is not None:
            self.host.feed(Disconnected(member.connection, "reset"))
            self.on_change()

    def _start(self, machine: int) -> SimulatedMember:
        self._connections += 1
        member = SimulatedMember(self.job, self._connections, machine)
        self.members[member.connection] = member
        self.host.feed(Connected(member.connection, member.hello()))
        self.clock.after(self.paces.start, self._warm, member)
        self.on_change()
        return member

    def _warm(self, member: SimulatedMember) -> None:
        if member.alive and member.state is MemberState.WARMING_UP:
            member.state, member.checkpoint = MemberState.WAITING, self.world.checkpoint
            self.say(member)
            self.on_change()

    def _start_again(self, member: SimulatedMember) -> None:
        """Its process ends, and another one takes its place."""
        member.alive = False
        if self.members.pop(member.connection, None) is not None:
            self.host.feed(Disconnected(member.connection, "reset"))
            if self._on.get(member.machine) is member:
                self._on[member.machine] = self._start(member.machine)

    # ---- what the controller hears

    def say(self, member: SimulatedMember) -> None:
        """A member says where it stands."""
        self.host.feed(MessageReceived(member.connection, member.heartbeat()))

    def look(self) -> None:
        """All say where they stand, and the controller looks at the time."""
        self._looked_at = self.clock.now
        for member in self.members.values():
            self.say(member)
        self.host.feed(Tick())

    def look_at_barrier(self) -> None:
        """The same, when the step under way is done."""
        self.look_is_due = self.world.is_stepping
        if not self.look_is_due:
            self.look()

    def on_barrier(self) -> None:
        """Steps were committed: now it is known what became of their seconds."""
        if self.look_is_due:
            self.look_is_due = False
            self.look()

    def on_change(self) -> None:
        """Something has happened: time may bring something."""
        self._tick = FIRST_TICK
        self._ticks += 1
        self.clock.after(self._tick, self._look_again, self._ticks)

    def _look_again(self, number: int) -> None:
        if number == self._ticks:
            self.look_at_barrier()
            if self._tick < LONGEST_TICK or not self.host.job.is_calm:
                self._tick = min(TICKS_GROW * self._tick, LONGEST_TICK)
                self.clock.after(self._tick, self._look_again, number)

    # ---- what the controller says

    def on_message(self, connection: int, message: ToWorker) -> None:
        member = self.members.get(connection)
        if member is None:
            return
        match message:
            case Welcome():
                member.worker = message.worker
            case Describe():
                self.host.feed(Connected(connection, member.hello()))
            case Ping():
                self.say(member)
            case Prepare(generation) if member.may_stop(generation):
                self._stop(member, generation)
            case PlanMessage(plan) if plan.recovery is not None and member.may_recover(plan):
                self._recover(member, plan)
            case PlanMessage(plan) if plan.recovery is None:
                self.world.learn(member, plan, self.members.values())
            case Open(generation) if member.state is MemberState.READY and generation == member.promised:
                self._open(member, generation)
            case Shutdown(ending) if ending in (Ending.REPLACED, Ending.START_OVER):
                self._start_again(member)
            case Shutdown():
                member.state = MemberState.LEFT
            case _:
                pass

    def on_close(self, connection: int) -> None:
        self.members.pop(connection, None)

    def on_probe(self, probe: Probe) -> None:
        lives = any(member.incarnation == probe.incarnation for member in self.members.values())
        self.host.feed(Probed(probe.worker, probe.incarnation, refused=not lives, reached=lives))

    # ---- a world from inventories

    def _stop(self, member: SimulatedMember, generation: int) -> None:
        """It says what it holds when it has stopped."""
        seconds = self.world.stop(member)
        member.stop(generation)
        self.clock.after(seconds, self._answer, member, generation)

    def _answer(self, member: SimulatedMember, generation: int) -> None:
        if member.alive and member.promised == generation and member.recovery is None:
            self.host.feed(MessageReceived(member.connection, member.inventory()))

    def _recover(self, member: SimulatedMember, plan: Plan) -> None:
        member.recovery, member.state = plan, MemberState.BUILDING
        self._building[plan.generation] += 1
        if self._building[plan.generation] == plan.world_size and self._is_whole(plan):
            seconds = self.paces.group
            if plan.recovery is not None and plan.recovery.checkpoint:
                seconds += self.paces.restore
            self.clock.after(seconds, self._ready, plan)

    def _is_whole(self, plan: Plan) -> bool:
        """Whether none has gone since it began to build."""
        return sum(member.recovery is plan for member in self.members.values()) == plan.world_size

    def _ready(self, plan: Plan) -> None:
        for member in self.members.values():
            if member.recovery is plan:
                member.state = MemberState.READY
                self.host.feed(MessageReceived(member.connection, member.ready()))
        self.on_change()

    def _open(self, member: SimulatedMember, generation: int) -> None:
        """The world begins when all its members know that it may."""
        plan, opened = member.recovery, self._opened.setdefault(generation, set())
        opened.add(member.connection)
        if plan is not None and len(opened) == plan.world_size:
            self._building.clear()
            self._opened.clear()
            self.world.begin(plan, self.members.values())


class MachineHost:
    """The job machine and planner on a virtual clock: the very ones that run in the controller. `notes` are the job's
    history.

    All events of one instant are one batch, and effects are carried out in their order. There is no store and no
    launcher, because nothing here is lost and machines come by themselves; the planner answers in the instant.
    """

    def __init__(self, clock: Clock, spec: JobSpec, fleet: Fleet, latency: float) -> None:
        self.job = new_job(spec, clock.now)
        self.notes: list[tuple[float, Note]] = []
        self._clock, self._fleet, self._latency = clock, fleet, latency
        self._inbox: list[Event] = []
        self.feed(Started())

    def feed(self, event: Event) -> None:
        """Hand the machine an event, with all others of this instant."""
        if not self._inbox:
            self._clock.after(0.0, self._handle)
        self._inbox.append(event)

    def _handle(self) -> None:
        batch, self._inbox = self._inbox, []
        self.job, effects = step(self.job, batch, self._clock.now)
        outgoing: list[Effect] = []
        for effect in effects:
            if isinstance(effect, AskPlanner):
                self.feed(PlannerAnswered(effect, answer(effect.question)))
            elif isinstance(effect, Note):
                self.notes.append((self._clock.now, effect))
            elif isinstance(effect, Send | Close | Probe):
                outgoing.append(effect)
        if outgoing:
            self._clock.after(self._latency, self._deliver, outgoing)

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._fleet.on_message(effect.connection, effect.message)
            elif isinstance(effect, Close):
                self._fleet.on_close(effect.connection)
            elif isinstance(effect, Probe):
                self._fleet.on_probe(effect)
