"""The link to a controller: what the training thread asks, carried out with the dialogue, the groups and the thread.

One lock guards the membership and all that follows from it; nothing under it waits. PREPARE is carried out here at
once, on the session's thread: the groups are aborted, and the training thread finds `Stopped` in its inbox.
"""

from __future__ import annotations

import copy
import os
import secrets
import socket
import threading
from collections.abc import Callable

from shoal_protos.description import Description
from shoal_protos.errors import UserError
from shoal_protos.messages import (
    NO_CONTROLLER,
    Ending,
    Hello,
    Inventory,
    Refusal,
    Result,
    Shutdown,
    Status,
    Telemetry,
    ToController,
    ToWorker,
)
from shoal_protos.plan import Plan
from shoal_protos.runs import Runs

from shoal.core.membership import Membership
from shoal.group.build import Cancellation, GroupSpec, Transport
from shoal.group.gloo import build_gloo
from shoal.group.group import Group
from shoal.group.rendezvous_server import RendezvousServer
from shoal.logs import get_logger
from shoal.session.dialogue import Abort, Build, Deliver, Dialogue, Effect, ProcessInfo
from shoal.session.groups import Building, Groups
from shoal.session.inbox import Inbox
from shoal.session.link import Begun, Ended, Item, JobProgress, Prepared, Recover, Resume, Stopped
from shoal.session.settings import SessionSettings
from shoal.session.signals import TermSignal, install, uninstall
from shoal.session.thread import SessionThread

REPORT_SECONDS = 60.0
"""How long a worker that ends waits for a controller that is not there."""

log = get_logger("shoal.session")


def _nothing() -> None:
    """Nobody asked to be called."""


class ControllerLink:
    """A `Link`. `transport` builds the groups."""

    alone = False

    def __init__(self, settings: SessionSettings, transport: Transport = build_gloo) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._membership = Membership(settings.worker, secrets.token_hex(8))
        self._inbox = Inbox()
        self._transport = transport
        self._groups = Groups(self._build_group, self._lock, self)
        self.before_building: Callable[[], None] = _nothing
        self._spoken = threading.Condition(self._lock)
        """Notified when the controller has welcomed us, refused us, or got our last word."""
        self._last_word_arrived = False
        self._closed = False
        self._server: RendezvousServer | None = None
        self._dialogue: Dialogue | None = None
        self._thread: SessionThread | None = None
        self._term: TermSignal | None = None

    @property
    def job(self) -> str:
        return self._settings.job

    @property
    def run(self) -> str:
        return self.dialogue.run

    @property
    def resume(self) -> Resume:
        return self.dialogue.resume

    @property
    def progress(self) -> JobProgress:
        return self.dialogue.progress

    @property
    def worker(self) -> str:
        return self._membership.worker

    @property
    def incarnation(self) -> str:
        return self._membership.incarnation

    @property
    def dialogue(self) -> Dialogue:
        assert self._dialogue is not None, "introduce comes first"
        return self._dialogue

    # ---- on the training thread

    def introduce(self, description: Description, status: Status) -> None:
        self._server = self._open_server()
        hostname = socket.gethostname()
        process = ProcessInfo(
            self._settings.job,
            hostname,
            os.getpid(),
            self._settings.domain or hostname,
            self._server.address,
            self._settings.run,
            self._settings.grace_seconds,
        )
        self._dialogue = Dialogue(self._membership, process, description, status)
        self._term = install(harmless=lambda: self.dialogue.welcomed)
        self._thread = SessionThread(self, self._settings, self._term)
        with self._spoken:
            self._spoken.wait_for(lambda: self.dialogue.welcomed or self.dialogue.ending is not None)
            ending, exit_status = self.dialogue.ending, self.dialogue.status
        if ending is not None:
            self.close()
            raise SystemExit(exit_status) if exit_status else UserError(ending.reason)

    def _open_server(self) -> RendezvousServer:
        host = self._settings.own_host()
        try:
            return RendezvousServer(host, lambda: self.incarnation)
        except OSError as error:
            raise UserError(
                f"no port can be opened on {host}: {error}. Set SHOAL_HOST to an address of this host."
            ) from None

    def end_warm_up(self) -> None:
        with self._lock:
            self._membership.end_warm_up()
            self.dialogue.notice()
        self._wake_if_due()

    @property
    def stopping(self) -> bool:
        return self._inbox.waiting

    def take(self, seconds: float | None = None) -> Item | None:
        self._look_for_broken_peers()
        item = self._inbox.take(seconds)
        if isinstance(item, Stopped | Ended):
            self._groups.bury()
        if isinstance(item, Ended) and item.ending is Ending.START_OVER:
            with self._lock:
                self.dialogue.start_over(secrets.token_hex(8))
            if self._thread is not None:
                self._thread.wake()
        return item

    def pause(self, seconds: float) -> None:
        self._inbox.pause(seconds)

    def answer(self, inventory: Inventory) -> None:
        with self._lock:
            self.dialogue.answer(inventory)
        self._wake_if_due()

    def report_ready(self, generation: int) -> bool:
        with self._lock:
            is_ready = self.dialogue.report_ready(generation)
        self._wake_if_due()
        return is_ready

    def enter_vote(self, holds: Runs) -> int:
        with self._lock:
            voted = self._membership.enter_vote(holds)
            self.dialogue.notice()
        self._wake_if_due()
        return voted

    def leave_vote(self, voted: list[int]) -> Prepared | None:
        with self._lock:
            membership = self._membership
            plan = membership.leave_vote(voted)
            if plan is None:
                self._carry_out(self.dialogue.on_vote_over)
                return None
            if plan.rank_of(self.worker, self.incarnation) is None:
                return Prepared(plan, None, 0.0)
            new = membership.builds(plan)
            building = self._groups.of(plan.generation if new else membership.generation)
            assert building is not None, f"generation {plan.generation} was voted without its group"
            return Prepared(plan, building.group, building.seconds if new else 0.0)

    def begin(self, plan: Plan, group: Group | None) -> None:
        with self._lock:
            self.dialogue.begin(plan)
            over = self._groups.begin(plan, group)
        self._groups.retire(over, abort=False)

    def membership(self) -> Membership:
        with self._lock:
            return copy.copy(self._membership)

    def publish(self, status: Status, telemetry: Telemetry) -> None:
        with self._lock:
            self.dialogue.update_status(status, telemetry)
        self._wake_if_due()

    def result(self, result: Result) -> None:
        with self._spoken:
            self.dialogue.report(result)
            self._wake_if_due()
            if result.failure and not self.silent:
                self._spoken.wait_for(lambda: self.silent, REPORT_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._groups.close()
        if self._thread is not None:
            self._thread.close()
        uninstall(self._term)
        if self._server is not None:
            self._server.close()

    def _wake_if_due(self) -> None:
        """Something may be due."""
        if self._thread is not None and self.dialogue.due:
            self._thread.wake()

    def _look_for_broken_peers(self) -> None:
        """The training thread comes here when an operation has failed."""
        with self._lock:
            membership = self._membership
            for plan in (membership.recovery, membership.begins, membership.plan):
                building = self._groups.of(plan.generation) if plan is not None else None
                if plan is not None and building is not None and building.group is not None:
                    self.dialogue.on_broken_peers({plan.members[rank].worker for rank in building.group.broken_peers})
        self._wake_if_due()

    # ---- on the session's thread

    @property
    def heartbeat_seconds(self) -> float:
        return self.dialogue.heartbeat_seconds

    @property
    def silent(self) -> bool:
        return self.dialogue.ending is not None or self._last_word_arrived

    def hello(self) -> Hello:
        with self._lock:
            return self.dialogue.hello()

    def outgoing(self, beat: bool) -> list[ToController]:
        with self._lock:
            if beat:
                self.dialogue.beat()
            if self.dialogue.due:
                self.dialogue.activities = self._groups.activities()
            return self.dialogue.outgoing()

    def on_message(self, message: ToWorker) -> None:
        before = self.dialogue.refusal
        self._carry_out(lambda: self.dialogue.on_message(message))
        if isinstance(message, Refusal) and self.dialogue.ending is None and message.sentence != before:
            log.warning("refused", reason=message.sentence, means="goes on, and tries again")

    def on_sigterm(self) -> None:
        log.info("sigterm", worker=self.worker, means="asks to be drained")
        with self._lock:
            self.dialogue.request_drain()
        self._wake_if_due()

    def on_last_word(self) -> None:
        with self._spoken:
            self._last_word_arrived = True
            self._spoken.notify_all()

    def on_controller_unreachable(self, seconds: float) -> None:
        """Who has nothing to lose waits only so long for a controller that is not there.

        That is a worker whose script has ended, and one in no world that a launcher has started: the launcher may be
        gone with the controller, and another one starts it again.
        """
        if self.dialogue.script_has_ended and seconds > REPORT_SECONDS:
            self._end(Ending.DONE, f"no controller was reachable for {seconds:.0f} s, and the script had ended")
        with self._lock:
            in_no_world = not any(self._membership.live)
        if self._settings.launcher and in_no_world and seconds > self.dialogue.reconnect_seconds + REPORT_SECONDS:
            why = f"no controller was reachable for {seconds:.0f} s, and this worker is in no world"
            log.warning("leaving", reason=why, status=NO_CONTROLLER)
            self._end(Ending.REPLACED, why, NO_CONTROLLER)

    def on_failure(self, error: Exception) -> None:
        """A thread of the session cannot go on; without it nothing would ever end a wait of the training thread."""
        self._end(Ending.FAILED, f"the session with the controller failed: {error}")

    def _end(self, ending: Ending, reason: str, status: int = 0) -> None:
        self._carry_out(lambda: self.dialogue.end(Shutdown(ending, reason), status))

    def _carry_out(self, decide: Callable[[], list[Effect]]) -> None:
        """All of it under one hold of the lock, but for the aborts."""
        with self._spoken:
            over = [building for effect in decide() for building in self._effect(effect)]
            void = self._groups.cancel(self._membership.live)
            self._spoken.notify_all()
        self._wake_if_due()
        for building in over:
            building.abort()
        self._groups.retire(void, abort=True)

    def _effect(self, effect: Effect) -> list[Building]:
        match effect:
            case Deliver(item):
                self._inbox.put(item)
            case Build(plan, rank):
                self._groups.build(plan, rank, joiner=plan.recovery is None and self._membership.is_joiner)
            case Abort():
                return self._groups.cancel_all()
        return []

    # ---- on a builder's thread

    def _build_group(self, spec: GroupSpec, cancellation: Cancellation) -> Group:
        self.before_building()
        return self._transport(spec, cancellation)

    # ---- on a builder's thread, under the lock

    def on_built(self, building: Building) -> None:
        plan = building.plan
        if plan.recovery is not None:
            assert building.group is not None
            self._inbox.put(Recover(plan, building.group, building.seconds))
        else:
            self._membership.on_built(plan.generation)
            self.dialogue.notice()
            self._wake_if_due()

    def on_begun(self, building: Building, state: bytes) -> None:
        assert building.group is not None
        self._inbox.put(Begun(building.plan, building.group, state))
        others = self._groups.cancel({building.plan.generation})
        self._groups.retire(others, abort=True)

    def on_peers_unreachable(self, building: Building, ranks: list[int]) -> None:
        """Nobody of this world may be to blame: a joiner that died on its way in is the controller's affair."""
        plan = building.plan
        if not ranks:
            others = [rank for rank in range(plan.world_size) if rank != building.rank]
            ranks = others if plan.builder == building.rank else [plan.builder]
        named = {plan.members[rank].worker for rank in ranks}
        if plan.recovery is None and self._membership.plan is not None:
            named &= {member.worker for member in self._membership.plan.members}
        self.dialogue.on_broken_peers(named)
        self._wake_if_due()
