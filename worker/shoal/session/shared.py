"""What the threads of a session share: the membership, the dialogue, the groups and the inbox, under one lock.

Nothing under the lock waits. What the dialogue decides is carried out here: PREPARE at once, on the session's thread,
where the groups are aborted; the training thread finds `Stopped` in its inbox. The builders' threads report here.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shoal_protos.description import Description
from shoal_protos.messages import Ending, Shutdown, Status

from shoal.core.membership import Membership
from shoal.group.build import Transport
from shoal.session.dialogue import Abort, Build, Deliver, Dialogue, Effect, ProcessInfo
from shoal.session.groups import Building, BuildOutcome, Built, Groups, Joined, NotBuilt
from shoal.session.inbox import Inbox
from shoal.session.link import Begun, Recover
from shoal.session.settings import SessionSettings


def _nobody() -> None:
    """The session's thread has not begun."""


class SharedSession:
    """The session's one state. `transport` builds the groups."""

    def __init__(self, settings: SessionSettings, transport: Transport) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.spoken = threading.Condition(self.lock)
        """Notified when the controller has welcomed us, refused us, or got our last word."""
        self.membership = Membership(settings.worker, secrets.token_hex(8))
        self.inbox = Inbox()
        self.groups = Groups(transport, self.lock, self._on_outcome, self.on_failure)
        self.wake: Callable[[], None] = _nobody
        """Tells the session's thread that something is due."""
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

    # ---- on a builder's thread, under the lock

    def _on_outcome(self, outcome: BuildOutcome) -> None:
        match outcome:
            case Built(building):
                self._on_built(building)
            case Joined(building, state):
                self._on_joined(building, state)
            case NotBuilt(building, ranks):
                self._on_not_built(building, ranks)

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
