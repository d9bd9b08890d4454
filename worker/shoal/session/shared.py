"""What the threads of a session share, under one lock: the membership, the dialogue, the groups and the inbox.

Nothing under the lock waits. What the dialogue decides is carried out here: PREPARE at once, on the session's thread,
where the groups are aborted; the training thread finds `Stopped` in its inbox. The builders' threads report here.

`Groups` are those being built, those kept for plans that may begin, and the one that trains. Each is built on a thread
of its own, because building waits for other processes. They are called under the lock, which the builders take too when
they are done. Cancelling ends a group's waits under the lock; aborting and closing comes after, outside: a group that
the training thread may be inside is closed by the training thread (`bury`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from shoal_protos.activity import Activity, StepPhase
from shoal_protos.description import Description
from shoal_protos.messages import Ending, Shutdown, Status
from shoal_protos.plan import Plan
from shoal_protos.training_log import get_logger

from shoal.core.membership import Membership
from shoal.exchange.packing import receive_framed
from shoal.exchange.traffic import FIRST_MESSAGE
from shoal.group.build import WORLD, Cancellation, GroupSpec, Transport
from shoal.group.group import Group, GroupProgress, WorldChanged
from shoal.group.rendezvous import reachable
from shoal.process.gpu_watch import GpuWatch
from shoal.session.dialogue import Abort, Build, Deliver, Dialogue, Effect, Identity, ProcessInfo
from shoal.session.link import Begun, Inbox, Recover
from shoal.session.settings import SessionSettings

log = get_logger("shoal.session")


def _nobody() -> None:
    """The session's thread has not begun."""


class SharedSession:
    """The session's one state. `transport` builds the groups."""

    def __init__(self, settings: SessionSettings, transport: Transport, identity: Identity) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.spoken = threading.Condition(self.lock)
        """Notified when the controller has welcomed us, refused us, or got our last word."""
        self.membership = Membership(identity.worker, identity.incarnation)
        self.inbox = Inbox()
        self.groups = Groups(transport, self.lock, self._on_outcome, self.on_failure)
        self.wake: Callable[[], None] = _nobody
        """Tells the session's thread that something is due."""
        self.gpu: GpuWatch | None = None
        """What watches the GPU that this process computes on."""
        self.last_word_arrived = False
        self._dialogue: Dialogue | None = None

    @property
    def dialogue(self) -> Dialogue:
        assert self._dialogue is not None, "introduce comes first"
        return self._dialogue

    def introduce(self, process: ProcessInfo, description: Description, status: Status) -> None:
        self._dialogue = Dialogue(self.membership, process, description, status)

    @property
    def silent(self) -> bool:
        """Nothing is to be sent or taken in any more."""
        return self.dialogue.ending is not None or self.last_word_arrived

    @contextmanager
    def changing(self) -> Iterator[Dialogue]:
        """The dialogue under the lock; what is due afterwards goes out."""
        with self.lock:
            yield self.dialogue
        self.wake_if_due()

    def wake_if_due(self) -> None:
        if self.dialogue.due:
            self.wake()

    def carry_out(self, decide: Callable[[], list[Effect]]) -> None:
        """All of it under one hold of the lock, but for the aborts."""
        with self.spoken:
            over = [building for effect in decide() for building in self._act(effect)]
            void = self.groups.cancel(self.membership.live)
            self.spoken.notify_all()
        self.wake_if_due()
        for building in over:
            building.abort()
        self.groups.retire(void, abort=True)

    def _act(self, effect: Effect) -> list[Building]:
        match effect:
            case Deliver(item):
                self.inbox.put(item)
            case Build(plan, rank, joiner):
                self.groups.build(plan, rank, joiner)
            case Abort():
                return self.groups.cancel_all()
        return []

    def end(self, ending: Ending, reason: str, status: int = 0) -> None:
        self.carry_out(lambda: self.dialogue.end(Shutdown(ending, reason), status))

    def on_failure(self, error: Exception) -> None:
        """A thread of the session cannot go on; without it nothing would ever end a wait of the training thread."""
        self.end(Ending.FAILED, f"the session with the controller failed: {error}")

    def note_broken_peers(self) -> None:
        """An operation has failed on the training thread: its groups know with whom."""
        with self.changing() as dialogue:
            membership = self.membership
            for plan in (membership.recovery, membership.begins, membership.plan):
                building = self.groups.of(plan.generation) if plan is not None else None
                if plan is not None and building is not None and building.group is not None:
                    dialogue.on_broken_peers({plan.members[rank].worker for rank in building.group.broken_peers})

    # ---- on a builder's thread or another one of the groups', under the lock

    def _on_outcome(self, outcome: BuildOutcome) -> None:
        match outcome:
            case Built(building):
                self._on_built(building)
            case Joined(building, state):
                self._on_joined(building, state)
            case NotBuilt(building, ranks):
                self._on_not_built(building, ranks)
            case PeerDied(incarnation):
                self.dialogue.on_death(incarnation)
                self.wake_if_due()

    def _on_built(self, building: Building) -> None:
        plan = building.plan
        if plan.recovery is not None:
            assert building.group is not None
            self.inbox.put(Recover(plan, building.group, building.seconds))
        else:
            self.membership.on_built(plan.generation)
            self.dialogue.notice()
            self.wake_if_due()

    def _on_joined(self, building: Building, state: bytes) -> None:
        assert building.group is not None
        self.inbox.put(Begun(building.plan, building.group, state))
        others = self.groups.cancel({building.plan.generation})
        self.groups.retire(others, abort=True)

    def _on_not_built(self, building: Building, ranks: Sequence[int]) -> None:
        """Nobody of this world may be to blame: a joiner that died on its way in is the controller's affair."""
        plan = building.plan
        if not ranks:
            others = [rank for rank in range(plan.world_size) if rank != building.rank]
            ranks = others if plan.builder == building.rank else [plan.builder]
        named = {plan.members[rank].worker for rank in ranks}
        if plan.recovery is None and self.membership.plan is not None:
            named &= {member.worker for member in self.membership.plan.members}
        self.dialogue.on_broken_peers(named)
        self.wake_if_due()


MOST_BUILDERS = 64
"""Threads at once. A plan beyond that is not built here, so it does not begin."""
JOIN_SECONDS = 1.0
"""Time for threads to end that were told to. One whose peer died while they connected takes gloo's 30 s, and is
left."""


@dataclass(eq=False, slots=True)
class Building:
    """The group of one plan, from the start of its building to its end."""

    plan: Plan
    rank: int
    joiner: bool
    """It waits in the group for the first message."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    progress: GroupProgress = field(init=False)
    """Whom it waits for; then the group's."""
    group: Group | None = None
    seconds: float = 0.0
    """What building took."""

    def __post_init__(self) -> None:
        self.progress = GroupProgress(self.plan.generation)

    def activity(self) -> Activity:
        """What this process does in it."""
        return self.progress.activity(lambda rank: self.plan.members[rank].worker)

    def abort(self) -> None:
        """Every operation in it, and its building, ends now."""
        self.cancellation.cancel()
        if self.group is not None:
            self.group.abort()

    def close(self) -> None:
        """Free what it holds."""
        if self.group is not None:
            self.group.close()


@dataclass(frozen=True, slots=True)
class Built:
    """The group is there."""

    building: Building


@dataclass(frozen=True, slots=True)
class Joined:
    """A joiner has got the first message in its group: the generation has begun."""

    building: Building
    state: bytes


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """It could not be built. `ranks`: who cannot be reached from here."""

    building: Building
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The process of a member was seen to die."""

    incarnation: str


BuildOutcome = Built | Joined | NotBuilt | PeerDied


class Groups:
    """All of this process's groups by generation.

    `report` is called with each outcome, under the lock and only while the building is wanted (a death may be reported
    later); `alarm` without it, when a builder's thread fails by a bug.
    """

    def __init__(
        self,
        transport: Transport,
        lock: threading.RLock,
        report: Callable[[BuildOutcome], None],
        alarm: Callable[[Exception], None],
    ) -> None:
        self._transport, self._lock, self._report, self._alarm = transport, lock, report, alarm
        self._wanted: dict[int, Building] = {}
        self._over: list[Building] = []
        self._threads: list[threading.Thread] = []

    def of(self, generation: int) -> Building | None:
        """The building of a generation, where it is wanted."""
        return self._wanted.get(generation)

    def activities(self) -> dict[int, Activity]:
        """What this process does in each group that is wanted, by generation. Under the lock."""
        return {generation: building.activity() for generation, building in self._wanted.items()}

    # ---- under the lock

    def build(self, plan: Plan, rank: int, joiner: bool) -> None:
        """Start building; its outcome is reported."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MOST_BUILDERS:
            log.error("group_not_built", generation=plan.generation, why=f"{MOST_BUILDERS} groups are being built")
            return
        building = self._wanted[plan.generation] = Building(plan, rank, joiner)
        self._start(f"shoal-group-{plan.generation}", self._build, building)

    def cancel(self, live: set[int]) -> list[Building]:
        """Cancels all but the groups of these generations; the caller aborts what is returned, outside the lock."""
        over = [self._wanted.pop(generation) for generation in list(self._wanted) if generation not in live]
        for building in over:
            building.cancellation.cancel()
        return over

    def cancel_all(self) -> list[Building]:
        """Cancels all of them; the training thread, which may be inside one, closes them with `bury`."""
        over = self.cancel(set())
        self._over += over
        return over

    def begin(self, plan: Plan, group: Group | None) -> list[Building]:
        """A world begins in `group` (None: without this process). Returns the others, to be retired."""
        mine = [building for building in self._wanted.values() if group is not None and building.group is group]
        self._wanted = {n: building for n, building in self._wanted.items() if building not in mine}
        over = self.cancel(set())
        for building in mine:
            building.plan, building.progress.generation = plan, plan.generation
            self._wanted[plan.generation] = building
        return over

    # ---- outside the lock

    def retire(self, over: list[Building], abort: bool) -> None:
        """Closes groups that nobody is inside, on a thread: closing takes up to 20 ms."""
        if over:
            self._start("shoal-group-closing", _close_all, over, abort)

    def bury(self) -> None:
        """On the training thread: close what was cancelled. Its buffers are free afterwards."""
        with self._lock:
            over, self._over = self._over, []
        for building in over:
            building.close()

    def close(self) -> None:
        """All groups end. On the training thread."""
        with self._lock:
            over = self.cancel_all()
        for building in over:
            building.abort()
        self.bury()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- a builder's thread

    def _start(self, name: str, target: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=target, args=given, name=name, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _build(self, building: Building) -> None:
        try:
            self._build_and_join(building)
        except Exception as error:
            log.exception("building_failed", generation=building.plan.generation)
            self._alarm(error)

    def _build_and_join(self, building: Building) -> None:
        began = time.monotonic()
        try:
            spec = GroupSpec.of(building.plan, building.rank, WORLD, building.progress)
            spec = replace(spec, on_death=partial(self._on_death, building.plan))
            group = self._transport(spec, building.cancellation)
        except WorldChanged as error:
            self._look_around(building, str(error))
            return
        with self._lock:
            wanted = not building.cancellation.is_cancelled
            if wanted:
                building.progress.reach(StepPhase.BUILT)
                building.group, building.seconds = group, time.monotonic() - began
                self._report(Built(building))
        if not wanted:
            group.abort()
            group.close()
        elif building.joiner:
            self._await_first_message(building, group)

    def _on_death(self, plan: Plan, rank: int) -> None:
        """On a thread of its own, at any time."""
        with self._lock:
            self._report(PeerDied(plan.members[rank].incarnation))

    def _await_first_message(self, building: Building, group: Group) -> None:
        """Until the generation begins, or until it never will: then another one does."""
        try:
            state = receive_framed(group, building.plan.builder, FIRST_MESSAGE)
        except WorldChanged:
            return
        with self._lock:
            if not building.cancellation.is_cancelled:
                self._report(Joined(building, state))

    def _look_around(self, building: Building, why: str) -> None:
        """Looks who is out of reach from here."""
        if building.cancellation.is_cancelled:
            return
        log.warning("group_not_built", generation=building.plan.generation, why=why)
        members = building.plan.members
        others = [(rank, member) for rank, member in enumerate(members) if rank != building.rank]
        ranks = tuple(rank for rank, member in others if not reachable(member.address, member.incarnation))
        with self._lock:
            if not building.cancellation.is_cancelled:
                self._report(NotBuilt(building, ranks))


def _close_all(over: list[Building], abort: bool) -> None:
    for building in over:
        if abort:
            building.abort()
        building.close()
