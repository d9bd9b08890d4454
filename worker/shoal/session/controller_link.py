"""The link to a controller: the training thread's face of a session.

What the session's thread does is in `driver.py`, what the two share in `shared.py`.
"""

from __future__ import annotations

import copy
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace

from shoal_protos.description import Description
from shoal_protos.errors import UserError
from shoal_protos.limits import check_address_space, check_open_files
from shoal_protos.messages import (
    START_AGAIN,
    Ending,
    Inventory,
    Result,
    Status,
    Telemetry,
)
from shoal_protos.plan import Plan
from shoal_protos.runs import Runs

from shoal.core.membership import Membership
from shoal.group.build import Cancellation, GroupSpec, Transport
from shoal.group.gloo import build_gloo
from shoal.group.group import Group, WorldChanged
from shoal.group.rendezvous import RendezvousServer
from shoal.process.gpu_watch import GpuWatch
from shoal.session.dialogue import Dialogue, Identity, ProcessInfo
from shoal.session.driver import REPORT_SECONDS, SessionDriver, not_taken_in
from shoal.session.link import Ended, Item, JobInfo, Prepared
from shoal.session.settings import SessionSettings
from shoal.session.shared import SharedSession
from shoal.session.signals import TermSignal, install, uninstall
from shoal.session.thread import SessionThread

NEEDED_MEBIBYTES = 256
"""Address space of a session's threads and buffers."""


def _nothing() -> None:
    """Nobody asked to be called."""


class ControllerLink:
    """A `Link`. `transport` builds the groups. `identity`: who this process is, where it has been seated. `gpu`: what
    watches the GPU that it computes on.
    """

    alone = False

    def __init__(
        self,
        settings: SessionSettings,
        transport: Transport = build_gloo,
        identity: Identity | None = None,
        gpu: GpuWatch | None = None,
    ) -> None:
        self._settings, self._transport, self._gpu = settings, transport, gpu
        self._identity = identity or Identity(settings.worker, secrets.token_hex(8))
        self._shared = SharedSession(settings, self._build_group, self._identity)
        self.driver = SessionDriver(self._shared)
        self.before_building: Callable[[], None] = _nothing
        self._closed = False
        self._server: RendezvousServer | None = None
        self._thread: SessionThread | None = None
        self._term: TermSignal | None = None

    @property
    def job(self) -> JobInfo:
        return self.dialogue.job

    @property
    def worker(self) -> str:
        return self._shared.membership.worker

    @property
    def incarnation(self) -> str:
        return self._shared.membership.incarnation

    @property
    def dialogue(self) -> Dialogue:
        return self._shared.dialogue

    def introduce(self, description: Description, status: Status) -> None:
        check_address_space("the session with the controller", NEEDED_MEBIBYTES)
        check_open_files("a worker")
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
            self._identity.coordinate,
        )
        shared = self._shared
        shared.introduce(process, description, status)
        if self._gpu is not None:
            self._gpu.start()
            shared.gpu = self._gpu
        self._term = install(harmless=lambda: self.dialogue.welcomed)
        self._thread = SessionThread(self.driver, self._settings, self._term)
        shared.wake = self._thread.wake
        with shared.spoken:
            shared.spoken.wait_for(lambda: self.dialogue.welcomed or self.dialogue.ending is not None)
            ending, exit_status = self.dialogue.ending, self.dialogue.status
        if ending is not None:
            self.close()
            raise not_taken_in(ending, exit_status)

    def _open_server(self) -> RendezvousServer:
        host = self._settings.own_host()
        try:
            return RendezvousServer(host, lambda: self.incarnation)
        except OSError as error:
            raise UserError(
                f"no port can be opened on {host}: {error}. Set SHOAL_HOST to an address of this host."
            ) from None

    def end_warm_up(self) -> None:
        with self._shared.changing() as dialogue:
            self._shared.membership.end_warm_up()
            dialogue.notice()

    @property
    def stopping(self) -> bool:
        return self._shared.inbox.waiting

    def take(self, seconds: float | None = None) -> Item | None:
        self._shared.note_broken_peers()
        item = self._shared.inbox.take(seconds)
        if isinstance(item, Ended):
            self._shared.groups.bury()
        if isinstance(item, Ended) and item.ending is Ending.START_OVER:
            with self._shared.lock:
                self.dialogue.start_over(secrets.token_hex(8))
            self._shared.wake()
        if isinstance(item, Ended) and item.ending is Ending.REPLACED and not self._settings.launcher:
            return replace(item, status=START_AGAIN)
        return item

    def pause(self, seconds: float) -> None:
        self._shared.inbox.pause(seconds)

    def answer(self, inventory: Inventory) -> None:
        with self._shared.changing() as dialogue:
            dialogue.answer(inventory)
        self._shared.groups.bury()  # while the controller plans: closing takes up to 20 ms

    def report_ready(self, generation: int) -> bool:
        with self._shared.changing() as dialogue:
            return dialogue.report_ready(generation)

    def enter_vote(self, holds: Runs) -> int:
        with self._shared.changing() as dialogue:
            membership = self._shared.membership
            known, voted = membership.newest_known, membership.enter_vote(holds)
            if membership.newest_known != known:
                dialogue.notice()
        return voted

    def leave_vote(self, voted: list[int]) -> Prepared | None:
        with self._shared.lock:
            membership = self._shared.membership
            plan = membership.leave_vote(voted)
            if plan is None:
                if membership.deferred is not None:
                    self._shared.carry_out(self.dialogue.on_vote_over)
                return None
            if plan.rank_of(self.worker, self.incarnation) is None:
                return Prepared(plan, None, 0.0)
            new = membership.builds(plan)
            building = self._shared.groups.of(plan.generation if new else membership.generation)
            if building is None and self._shared.silent:
                raise WorldChanged("this worker's part in the job ended during the vote")
            assert building is not None, f"generation {plan.generation} was voted without its group"
            return Prepared(plan, building.group, building.seconds if new else 0.0)

    def begin(self, plan: Plan, group: Group | None) -> None:
        with self._shared.lock:
            self.dialogue.begin(plan)
            over = self._shared.groups.begin(plan, group)
        self._shared.groups.retire(over, abort=False)

    def membership(self) -> Membership:
        with self._shared.lock:
            return copy.copy(self._shared.membership)

    def publish(self, status: Status, telemetry: Telemetry) -> None:
        with self._shared.changing() as dialogue:
            dialogue.update_status(status, telemetry)

    def result(self, result: Result) -> None:
        shared = self._shared
        with shared.spoken:
            shared.dialogue.report(result)
            shared.wake_if_due()
            if result.failure and not shared.silent:
                shared.spoken.wait_for(lambda: shared.silent, REPORT_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._shared.groups.close()
        if self._thread is not None:
            self._thread.close()
        if self._gpu is not None:
            self._gpu.close()
        uninstall(self._term)
        if self._server is not None:
            self._server.close()

    # ---- on a builder's thread

    def _build_group(self, spec: GroupSpec, cancellation: Cancellation) -> Group:
        self.before_building()
        return self._transport(spec, cancellation)
