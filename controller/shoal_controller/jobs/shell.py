"""The shell: all jobs of this controller, and the only way by which requests, messages and reports reach them.

It restores the jobs from the store, gives each a `Runner`, ticks those that have not ended, waits while the store
fails, and stops as a whole when it may no longer decide (another controller has written). It decides nothing itself.
Sessions, launchers and the REST API know only the shell.

At start it reads the store's random id (`ensure_cluster_id`), which is sent to every worker. A worker believes that its
run has ended only from the store that welcomed it: an empty store on the same port (a typo, a volume that is not
mounted) knows nothing of its job.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

import structlog
from shoal_protos.acts import Cancel
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, NotFound, StoreError
from shoal_protos.text import shown_name

from shoal_controller.access.callers import Caller
from shoal_controller.core.machine import machine
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.jobs.event_bounds import bound_events
from shoal_controller.jobs.event_feed import EventFeed
from shoal_controller.jobs.job_repository import JobRepository, new_repository, stored_jobs
from shoal_controller.jobs.only_if import OnlyIf, is_repeated, version_of
from shoal_controller.jobs.ports import Outside, Step, View
from shoal_controller.jobs.records import JobEvent
from shoal_controller.jobs.runner import Life, Runner
from shoal_controller.observe.curves import record_curves
from shoal_controller.process.tasks import NamedLocks, end_task, guarded
from shoal_controller.store.store import Fenced, Put, Store, made_once

TICK_SECONDS = 0.1

OVER_TICKS = 10
"""A job that is over gets every tenth: some of its processes may still have to be ended."""

FORGET_AFTER_SECONDS = 7 * 86400.0
"""How long a job that is over stays visible."""

FORGET_LOOK_SECONDS = 60.0

EVENTS_LOOK_SECONDS = 1.0

FORGET_SECONDS = 60.0
"""How long it may take to forget one job."""

CHECK_SECONDS = 2.0
"""How long the store may take for the request that tells whether it can be used."""

MOST_JOBS = 1000
"""Most jobs, of which those that are over are forgotten, the oldest first, when new ones come."""

EVENTS_PAGE = 200
"""How many events a follower reads at a time."""

log = structlog.get_logger("shoal.shell")


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that never jump: the wall clock at the start of this life, and what has passed since."""
    began, at = time.time(), time.monotonic()
    return lambda: began + time.monotonic() - at


class Shell:
    """Every job's life. `connect`, then `start`; `stopped` is done when it has ended by itself."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] | None = None,
        forget_after_seconds: float = FORGET_AFTER_SECONDS,
        *,
        step: Step = machine.step,
        view: View = machine.view,
        lapsed: Callable[[], str] = str,
    ) -> None:
        """`lapsed`: why this controller may decide nothing at present, as a sentence; empty while it may."""
        self._store = store
        self._step = step
        self._view = view
        self._lapsed = lapsed
        self.clock = clock or steady_clock()
        """The time by which all jobs go, in seconds since the epoch."""
        self._forget_after_seconds = forget_after_seconds
        self._writer = secrets.token_hex(8)
        self._outside: Outside | None = None
        self._runners: dict[str, Runner] = {}
        self.runners: Mapping[str, Runner] = self._runners
        """Every job's life by its name. Only the shell changes it."""
        self._creating = asyncio.Lock()
        self._changing = NamedLocks()
        """Held by whoever makes or forgets that job: a cluster that is slow to forget one keeps nobody from others."""
        self._begun: dict[str, JobRepository] = {}
        """Repositories of new jobs that may or may not be stored, because the store failed."""
        self.feed = EventFeed(self._writer)
        """The newest events of all jobs."""
        self._cluster = ""
        self.since: float | None = None
        """Since when it leads, and remembers every job's course; None: it is a copy that is only shown."""
        self._tasks: list[asyncio.Task[None]] = []
        self.stopped: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def connect(self, outside: Outside) -> None:
        """Say who carries effects out. Once, before `start`."""
        self._outside = outside

    async def start(self) -> None:
        """Restore every job and go on with it."""
        assert self._outside is not None, "connect comes before start"
        self._cluster = await ensure_cluster_id(self._store)
        self.since = self.clock()
        for half_forgotten in await self.look():
            await half_forgotten.forget()
        for runner in self._runners.values():
            runner.go_on()
        log.info("jobs restored", jobs=sorted(self._runners))
        self._tasks = [
            guarded("ticks", self._tick(), self.give_up),
            guarded("forgetting", self._forget_the_old(), self.give_up),
            guarded("events", self._bound_events(), self.give_up),
            guarded("curves", record_curves(self._runners.values, self.clock, self._outside.record), self.give_up),
        ]

    async def look(self) -> list[JobRepository]:
        """Read every job as it lies in the store, to be shown; nothing is decided or written. Returned: those that an
        earlier life has not forgotten whole.
        """
        stored = await stored_jobs(self._store, self._writer)
        for job in stored:
            if not job.forgotten:
                runner = self._runners[job.repository.spec.job] = self._new_runner(job.repository.spec, job.repository)
                runner.restore(job.durable, job.unreadable)
        return [job.repository for job in stored if job.forgotten]

    async def stop(self, why: StoreError | None = None) -> None:
        """Decide nothing any more. Workers train on."""
        why = why or StoreError("this controller is stopping; try again")
        self.feed.close()
        for task in self._tasks:
            await end_task(task)
        await asyncio.gather(*(runner.stop(why) for runner in self._runners.values()))
        for runner in self._runners.values():
            runner.repository.close()

    def check_running(self) -> None:
        """Raises `StoreError` where it has ended by itself."""
        if self.stopped.done():
            raise StoreError(f"this controller has stopped: {self.stopped.result()}")

    async def check(self) -> None:
        """Raises `StoreError` unless this controller can decide and remember: a write is tried."""
        self.check_running()
        if self.trouble:
            raise StoreError(self.trouble)
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await self._store.transact([], [Put("/ready", self._writer.encode())])
        except TimeoutError as error:
            raise StoreError(f"the store has accepted no write for {CHECK_SECONDS:g} s") from error

    @property
    def trouble(self) -> str:
        """What keeps this controller from deciding, as a sentence; empty while nothing does."""
        return self._lapsed() or next(
            (f"job {name}: {trouble}" for name, runner in self._runners.items() if (trouble := runner.trouble)), ""
        )

    # ---- jobs

    def jobs(self) -> list[JobView]:
        """All of them, by name."""
        return [self._runners[name].view() for name in sorted(self._runners)]

    def view(self, job: str) -> JobView:
        return self.runner(job).view()

    def spec(self, job: str) -> JobSpec:
        """What it was made with: what each worker runs, which run of that name it is."""
        return self.runner(job).spec

    async def create(self, spec: JobSpec, by: Caller | None = None) -> JobView:
        """A new run of a job, durable when this returns. One of that name that is over is replaced; its events stay. A
        request that comes once more, by its key, gets the run that it has made.
        """
        assert self._outside is not None, "connect comes before create"
        spec = replace(self._outside.prepared(spec), owner=by.token if by is not None else "")
        spec = replace(spec, run=secrets.token_hex(8))
        async with self._changing.of(spec.job), self._creating:
            before = self._runners.get(spec.job)
            if any(is_repeated(spec, runner.spec) for runner in self._runners.values()):
                return self.view(spec.job)
            if before is not None and before.unserved:
                raise Conflict(before.unserved).coded(ErrorCode.JOB_UNSERVED)
            if before is not None and not before.view().phase.is_over:
                raise Conflict(
                    f"job {spec.job} exists and is {before.view().phase}; "
                    f"end it first (`shoal cancel {spec.job}`) or give the new one another name"
                ).coded(ErrorCode.JOB_EXISTS)
            if before is None:
                await self._make_room()
                repository = self._begun.setdefault(spec.job, new_repository(self._store, spec, self._writer))
            else:
                repository = before.repository
                await before.stop(StoreError(f"job {spec.job} has been replaced by a new run"))
                before.leave()
            runner = self._new_runner(spec, repository)
            await runner.begin(by)
            self._begun.pop(spec.job, None)
            self._runners[spec.job] = runner
            return runner.view()

    async def _make_room(self) -> None:
        """Forget the job that has been over for longest, where there are as many as may be."""
        if len(self._runners) < MOST_JOBS:
            return
        idle = [runner for name, runner in self._runners.items() if not self._changing.is_held(name)]
        over = [runner for runner in idle if runner.is_over and not runner.unserved]
        if not over:
            raise Conflict(f"{MOST_JOBS} jobs are not over, and more are not served; delete some first").coded(
                ErrorCode.TOO_MANY_JOBS
            )
        oldest = min(over, key=lambda runner: runner.repository.modified)
        async with self._changing.of(oldest.spec.job):  # nobody has it, so there is no wait for one who waits for us
            await self._forget(oldest)

    async def delete(self, job: str, by: Caller | None = None, only_if: OnlyIf | None = None) -> JobView:
        """Stop it; it stays visible, with its events. One that is over is forgotten, its events and logs too."""
        async with self._changing.of(job):
            runner = self.runner(job)
            if runner.unserved:
                raise Conflict(runner.unserved).coded(ErrorCode.JOB_UNSERVED)
            view = runner.view()
            if view.phase.is_over:
                if only_if is not None:
                    only_if.check(job, version_of(view))
                await self._forget(runner)
                log.info("an operator had a job forgotten", job=job, token=by.token if by else "")
                return view
        await self.submit(job, Cancel(), by, only_if)
        return self.view(job)

    async def _forget(self, runner: Runner) -> None:
        """Forget a job that is over. Where the store or the disk fails on the way it stays, to be forgotten later."""
        assert self._outside is not None, "connect comes before start"
        job = runner.spec.job
        await runner.stop(NotFound(f"job {job} is over and forgotten"))
        runner.leave()
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                if (launcher := self._outside.launchers.get(runner.spec.launcher)) is not None:
                    await launcher.forget(job)
                await runner.repository.forget()
        except (TimeoutError, OSError) as error:
            raise StoreError(f"job {job} is not forgotten yet ({error}); delete it again later") from error
        del self._runners[job]
        log.info("a job that was over is forgotten", job=job)

    async def _forget_the_old(self) -> None:
        """Now and then: whoever has been over for so long."""
        while True:
            await asyncio.sleep(FORGET_LOOK_SECONDS)
            for runner in list(self._runners.values()):
                ended_at = runner.view().ended_at
                if ended_at is None or runner.unserved or self.clock() - ended_at < self._forget_after_seconds:
                    continue
                try:
                    async with self._changing.of(runner.spec.job):
                        if self._runners.get(runner.spec.job) is runner:
                            await self._forget(runner)
                except StoreError as error:
                    log.warning("a job could not be forgotten", job=runner.spec.job, error=str(error))

    async def _bound_events(self) -> None:
        """Now and then."""
        while True:
            await asyncio.sleep(EVENTS_LOOK_SECONDS)
            try:
                await bound_events([one.repository for one in self._runners.values() if not one.unserved])
            except Fenced:
                raise
            except StoreError as error:
                log.warning("old events could not be dropped", error=str(error))

    async def submit(self, job: str, event: Event, by: Caller | None = None, only_if: OnlyIf | None = None) -> None:
        """Feed an event to a job; returns when its effects are carried out. Raises what refuses a request. `by`: the
        operator who asks, for the history. `only_if`: what the job's version must be by then.
        """
        await self.runner(job).submit(event, by, only_if)

    def hear(self, job: str, event: Event) -> None:
        """The same for what may wait for the job's next tick, and for which nobody waits."""
        self.runner(job).hear(event)

    # ---- events

    async def events(self, job: str, after: int = 0, limit: int = 0) -> list[JobEvent]:
        """The job's history beyond event number `after`, oldest first, at most `limit` of it (0: all that is kept,
        which `bound_events` bounds).
        """
        return await self.runner(job).repository.events(after, limit)

    async def follow(self, job: str, after: int, idle_seconds: float) -> AsyncGenerator[JobEvent | None]:
        """The same, and then every event as it becomes durable; None whenever nothing came for so long.

        Ends with the shell.
        """
        repository = self.runner(job).repository
        while not repository.closed:
            try:
                async with asyncio.timeout(idle_seconds):
                    await repository.more_events(after)
            except TimeoutError:
                yield None
                continue
            for event in await repository.events(after, EVENTS_PAGE):
                yield event
                after = event.revision

    # ---- inside

    def runner(self, job: str) -> Runner:
        """Raises `NotFound` for a job that there is not."""
        try:
            return self._runners[job]
        except KeyError:
            raise NotFound(f"there is no job {shown_name(job)}; {_names(sorted(self._runners))}").coded(
                ErrorCode.JOB_UNKNOWN
            ) from None

    def _new_runner(self, spec: JobSpec, repository: JobRepository) -> Runner:
        assert self._outside is not None, "connect comes before start"
        life = Life(
            self._step, self._view, self._outside, self.clock, self.give_up, self._lapsed, self._cluster,
            self.feed.put,
        )  # fmt: skip
        return Runner(spec, repository, life)

    async def _tick(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(TICK_SECONDS)
            for runner in self._runners.values():
                if not runner.is_over or number % OVER_TICKS == 0:
                    runner.tick()

    def give_up(self, error: BaseException) -> None:
        """A job can no longer be written, or something has ended that must not: nothing is decided from here on."""
        if self.stopped.done():
            return
        log.error("nothing more is decided here", error=str(error))
        self.stopped.set_result(error)
        for runner in self._runners.values():
            runner.halt(StoreError(f"this controller has stopped: {error}"))


def _names(jobs: list[str]) -> str:
    if not jobs:
        return "there are none yet"
    more = f" and {len(jobs) - 5} more" if len(jobs) > 5 else ""
    return f"there are {', '.join(jobs[:5])}{more}" if len(jobs) > 1 else f"the only one is {jobs[0]}"


KEY = "/cluster"
SIZE = 8


async def ensure_cluster_id(store: Store) -> str:
    """Return the store's id, made if there is none yet. Raises `StoreError`; `Damaged` where no waiting helps."""
    return await made_once(store, KEY, SIZE)
