"""What this controller is at present: it leads, it follows another one, or it waits for its store.

REST and the sessions look here before they do anything for a job. `server.py` makes it; a term (`term.py`) puts its
shell here. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from shoal_protos.errors import NotFound, StoreError

from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.spec import JobView
from shoal_controller.core.planning.question import Answer, Question
from shoal_controller.jobs.ports import Begun, Outside, SizeWriter
from shoal_controller.jobs.shell import CHECK_SECONDS, Shell
from shoal_controller.jobs.streams import Streams
from shoal_controller.launchers.worker_logs import WorkerLogs
from shoal_controller.leadership.election import ControllerPlace, Election, Leadership
from shoal_controller.leadership.introductions import UNPROVED, HandedOn, Introductions
from shoal_controller.process.tasks import first_of
from shoal_controller.store.store import NotLeading, Revision, Store

ENDING = "this controller is shutting down"

COPY_SECONDS = 1.0
"""How old the copy may be from which a controller answers when nobody leads."""


class ControllerState:
    """One controller's. `join` when the store is open, `lead` and `leave` by each of its terms."""

    def __init__(self) -> None:
        self.shell: Shell | None = None
        """All jobs, while this controller leads."""
        self.sizes: SizeWriter | None = None
        """What writes the size of jobs that were made from resources; None: this controller has none."""
        self.pod_logs: WorkerLogs | None = None
        """Logs of workers that are pods; None: this controller has no cluster."""
        self._leadership: Leadership | None = None
        self._store: Store | None = None
        self._election: Election | None = None
        self.introductions: Introductions | None = None
        """What neighbours say of their clients; None until the store is open."""
        self._led = asyncio.Event()
        """Set while this controller leads."""
        self._ending = asyncio.Event()
        """Set for good when this controller is told to end: whoever waits for a leader waits no longer."""
        self._has_settled = False
        self._copy: Shell | None = None
        self._copied = 0.0
        self._copying: asyncio.Task[Shell] | None = None
        """One for all that ask meanwhile: where the store is away they do not wait behind each other."""

    def join(self, store: Store, election: Election, introductions: Introductions) -> None:
        """The store is open, and this controller stands for election."""
        self._store, self._election, self.introductions = store, election, introductions

    def lead(self, leadership: Leadership, shell: Shell) -> None:
        """It leads, with this shell."""
        self.shell, self._leadership = shell, leadership
        self._led.set()

    def leave(self) -> None:
        """It leads no longer."""
        self._led.clear()
        self.shell = self._leadership = self.sizes = None

    def end(self) -> None:
        """It shuts down: nothing is said to wait for that this process will not see."""
        self._ending.set()

    async def settled(self) -> None:
        """Returns when somebody leads: this controller, or another one."""
        assert self._election is not None, "join comes before settled"
        await first_of(self._led.wait(), self._election.until_another_leads())
        self._has_settled = True

    # ---- what it is

    @property
    def term(self) -> Revision:
        """The term in which this controller surely leads; 0: it does not."""
        return self._leadership.fence.modified if self._leadership is not None and not self._leadership.trouble else 0

    @property
    def clock(self) -> float:
        """Seconds since the epoch by the clock that all times of jobs go by."""
        return self.shell.clock() if self.shell is not None else time.time()

    @property
    def clock_correction(self) -> float:
        """Seconds by which this machine's clock was set ahead since this controller leads, or stood in a suspended
        machine: the clock of the jobs takes no notice, so that no deadline jumps.
        """
        return time.time() - self.clock if self.shell is not None else 0.0

    @property
    def is_leading(self) -> bool:
        """Whether this controller leads, as far as it knows."""
        return self.shell is not None

    @property
    def other(self) -> ControllerPlace | None:
        """The controller that leads in place of this one; None: this one, or nobody is known to."""
        if self._election is None or self.shell is not None or self._election.is_own:
            return None
        return self._election.leader

    def places(self) -> tuple[str, ...]:
        """Where workers reach the controllers of the store, as far as is known, the one that leads first."""
        return tuple(one.grpc for one in self._election.places) if self._election is not None else ()

    @property
    def trouble(self) -> str:
        """What keeps this controller from its work, as a sentence; empty while nothing does."""
        conflict = self._election.conflict or self._election.outdated if self._election is not None else ""
        if self.shell is not None:
            return self.shell.trouble or conflict
        if self._ending.is_set():
            return ENDING
        if self._store is None:
            return "the store has not answered yet"
        if self._election is not None and self._election.hindrance:
            return self._election.hindrance
        return conflict if self.other is not None else "no controller leads at present"

    @property
    def age_seconds(self) -> float:
        """How old what this controller can say of its own may be."""
        if self._leadership is not None:
            return self._leadership.lapsed_seconds
        return self._election.leaderless_seconds if self._election is not None else 0.0

    def jobs(self) -> list[JobView]:
        """All jobs, of the one that surely leads; nothing elsewhere, so that nothing is counted twice."""
        return self.shell.jobs() if self.shell is not None and self.term else []

    def word(self, address: str, request: HandedOn) -> str:
        """What the controller to which a request is handed on is told of its client."""
        return self.introductions.word(address, request) if self.introductions is not None else UNPROVED

    def check(self) -> None:
        """Raises `StoreError` unless requests are served: a controller has led once, and nothing has stopped."""
        if self.shell is not None:
            self.shell.check_running()
        elif self._ending.is_set() or not self._has_settled:
            raise StoreError(self.trouble)

    async def check_store(self) -> None:
        """Raises `StoreError` unless the store answers: the leader writes, others read and stand for election."""
        self.check()
        if self.shell is not None:
            return await self.shell.check()
        assert self._store is not None and self._election is not None
        if self._election.hindrance:
            raise StoreError(self._election.hindrance)
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await self._store.get("/ready")
        except TimeoutError as error:
            raise StoreError(f"the store has not answered for {CHECK_SECONDS:g} s") from error

    # ---- for REST

    async def await_leader(self, seconds: float) -> None:
        """Returns when somebody is known to lead, or after so long, or when this controller shuts down."""
        if self.shell is not None or self.other is not None or self._election is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await first_of(self.settled(), self._ending.wait())

    async def until_succeeded(self, leader: ControllerPlace) -> None:
        """Returns when this one, which is or was known to lead, does so no longer."""
        assert self._election is not None, "who has none knows no leader"
        await self._election.until_not_led_by(leader)

    def leading(self) -> Shell:
        """For whatever only the leader may do. Raises `NotLeading`."""
        if self.shell is None:
            if self._ending.is_set() and self.other is None:
                raise NotLeading(f"{ENDING}; try again once a controller runs")
            leader = self.other.grpc if self.other is not None else ""
            where = f"the controller at {self.other.http} does" if self.other is not None else ""
            where = "; ".join(filter(None, [where, self.trouble]))
            raise NotLeading(f"this controller does not lead ({where}); try again", leader)
        return self.shell

    async def readable(self) -> Shell:
        """To read from: the leader's own jobs; where nobody leads, a copy of what lies in the store."""
        if self.shell is not None:
            return self.shell
        if self._store is None or self._ending.is_set():
            raise StoreError(f"{self.trouble}; try again")
        if self._copying is None:
            now = asyncio.get_running_loop().time()
            if self._copy is not None and now - self._copied <= COPY_SECONDS:
                return self._copy
            self._copying = asyncio.create_task(self._copy_store(self._store, now), name="a copy of the store")
            self._copying.add_done_callback(self._end_copying)
        return await asyncio.shield(self._copying)

    async def _copy_store(self, store: Store, now: float) -> Shell:
        self._copy, self._copied = await _copy_of(store, lambda: self.trouble), now
        return self._copy

    def _end_copying(self, task: asyncio.Task[Shell]) -> None:
        """Whoever has waited for it gets the shell or the error; whoever asks later, another one."""
        self._copying = None
        if not task.cancelled():
            task.exception()

    # ---- for sessions

    def expect(self, job: str) -> None:
        """Raises `NotFound` for a job that there is not, `NotLeading` where another controller is to be asked."""
        self.leading().runner(job)

    async def submit(self, job: str, event: Event) -> None:
        """What a worker's stream says, to the shell."""
        await self.leading().submit(job, event)

    def hear(self, job: str, event: Event) -> None:
        """What a worker's stream says that is not news, to the shell."""
        self.leading().hear(job, event)

    # ---- for launchers

    async def report(self, job: str, run: str, event: Event) -> None:
        """The same for one who then forgets it: raises `StoreError`, too, where it may only have been heard, and the
        next leader would not know. `run`: the worker's; empty where it is not known. A later run of the job hears
        nothing of it: its own workers have the same names.
        """
        shell = self.leading()
        if run not in ("", shell.runner(job).spec.run):
            raise NotFound(f"run {run} of job {job} is over, and replaced by another one")
        await shell.submit(job, event)
        if shell.trouble:
            raise StoreError(f"nothing was decided yet: {shell.trouble}")


async def _no_planner(_: Question, __: Begun) -> Answer:
    raise StoreError("nothing is planned for jobs that are only looked at")


async def _copy_of(store: Store, trouble: Callable[[], str]) -> Shell:
    """All jobs as they lie in the store, to be looked at: their reasons say, too, why nothing is decided."""
    copy = Shell(store, lapsed=trouble)
    copy.connect(Outside(Streams(), {}, _no_planner))
    await copy.look()
    return copy
