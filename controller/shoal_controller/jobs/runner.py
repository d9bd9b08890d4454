"""The life of one job: a short loop that feeds its events to the machine and carries the effects out in order.

One task per job takes from a bounded inbox all that lies there, first come, first served, and never waits for more: a
batch for the machine. A tick comes after all that lies there by then, so time never overtakes what was heard: the
machine counts on that when it counts silence. While the store takes no write, or another controller may lead, nothing
is decided, training goes on, and what streams say is kept in a `Backlog`: to the job it is as if its controller were
slow. Made by `shell.py`. What is slow (starting processes, probing, planning) is done by `background.py` and comes back
as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
from shoal_protos.acts import Cancel, OperatorRequest
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, ShoalError, StoreError, UserError
from shoal_protos.messages import Ending, Refusal, Shutdown

from shoal_controller.access.callers import Caller
from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.effects import (
    Adopt,
    AskPlanner,
    Close,
    Effect,
    Kill,
    Note,
    Persist,
    Probe,
    Send,
    Spawn,
)
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Connected, Disconnected, Event, SeatAsked, Started, first_batch
from shoal_controller.core.machine.job import Job, new_job, restore
from shoal_controller.core.machine.phases.progress import as_of_now
from shoal_controller.core.machine.phases.waiting import CALM_TICKS, rests_until
from shoal_controller.core.machine.spec import JobSpec, JobView, Phase
from shoal_controller.core.machine.view import Sample, copies_wanted, has_ended, sample
from shoal_controller.jobs.audit import Create, audit_entry
from shoal_controller.jobs.background import BackgroundWork
from shoal_controller.jobs.job_inbox import JobInbox, Submission, settle
from shoal_controller.jobs.job_repository import JobRepository
from shoal_controller.jobs.only_if import OnlyIf, version_of
from shoal_controller.jobs.ports import Outside, Step, View
from shoal_controller.jobs.records import JobEvent
from shoal_controller.jobs.streams import JobStreams
from shoal_controller.observe.job_series import JobSeries
from shoal_controller.process.tasks import end_task, guarded
from shoal_controller.store.store import Unfit, UnknownOutcome

REQUEST_SECONDS = 10.0
"""How long an operator waits for the answer."""

PATIENCE_SECONDS, PAUSE_SECONDS = 3.0, 0.05
"""How long an operator's request waits for a store that takes nothing, or for a lease, and how often it looks: a leader
that a busy machine has frozen for longer than its lease has another one at once.
"""

STOP_SECONDS = 5.0
"""How long a write in hand may take when the job's loop is to end."""

LAST_WRITE_SECONDS = 1.0
"""How long the write of its steps may take after that: nothing is decided by them."""

log = structlog.get_logger("shoal.job")


@dataclass(frozen=True, slots=True)
class Life:
    """What all jobs of a controller's life share."""

    step: Step
    view: View
    outside: Outside
    clock: Callable[[], float]
    alarm: Callable[[BaseException], None]
    """Hears that a job can no longer be decided for by this controller."""
    lapsed: Callable[[], str] = str
    """Why nothing may be decided at present, as a sentence; empty while it may."""
    cluster: str = ""
    """The store's own id."""
    on_events: Callable[[str, Sequence[JobEvent]], None] = lambda _job, _events: None
    """Hears of a job's events once they are in the store."""


class Runner:
    """One job. `begin`, or `restore` and `go_on`, then events by `submit` and `tick`, then `stop`."""

    def __init__(self, spec: JobSpec, repository: JobRepository, life: Life) -> None:
        self.spec = spec
        self.repository = repository
        self._life = life
        self._inbox = JobInbox(spec.job)
        self._streams = JobStreams(life.outside.streams, life.outside.controllers, life.cluster)
        self._job = new_job(spec, life.clock())
        self._carried_out = self._job
        """The job as it is in the store: what people see, so that nothing they have seen is forgotten."""
        self._broken = ""
        self._unserved = ""
        self._in_hand: Sequence[Submission] = ()
        self._late: list[JobEvent] = []
        """That streams have ended, where nothing else was written since."""
        self._ticked_at = life.clock()
        self._rests_until = 0.0
        """Before this time a job that waits needs no tick."""
        repository.on_trouble = self._on_trouble
        repository.on_events = partial(life.on_events, spec.job)
        self._shown = _blank_view(spec)
        self._background = BackgroundWork(spec, life.outside, self.submit, self._inbox.keep)
        self.series = JobSeries(life.clock())
        """Its course, as far as this life has seen it."""
        self._loop: asyncio.Task[None] | None = None
        self._halted: ShoalError | None = None

    def view(self) -> JobView:
        """What people see now; of a job whose machine failed: what they saw last, and why it failed."""
        if self._broken or self._unserved:
            return replace(self._shown, phase=Phase.FAILED, reason=self._broken or self._unserved)
        shown = self._life.view(self._carried_out, self._life.clock())
        self._shown = replace(shown, deepest_inbox=self._inbox.deepest)
        if hindrance := self.trouble or self.repository.speed.sentence:
            return replace(self._shown, reason="; ".join(filter(None, (hindrance, self._shown.reason))))
        return self._shown

    @property
    def trouble(self) -> str:
        """Why nothing is decided at present, as a sentence: the store does not take what is to be written, or another
        controller may lead. Empty while neither is so.
        """
        if lapsed := self._life.lapsed():
            return lapsed
        trouble = self.repository.trouble
        if trouble is None:
            return ""
        seconds = asyncio.get_running_loop().time() - trouble.since
        return f"the store has accepted no write for {seconds:.0f} s ({trouble.why}); nothing is decided until it does"

    def preview(self, request: OperatorRequest) -> JobView:
        """The job as it would be if this were asked now; nothing is changed. Raises what would refuse it."""
        if refused := self._broken or self._unserved:
            raise Conflict(refused).coded(ErrorCode.JOB_UNSERVED)
        now = self._life.clock()
        return self._life.view(self._life.step(self._carried_out, [request], now)[0], now)

    @property
    def unserved(self) -> str:
        """Why this job's records are left as they are, as a sentence; empty for a job that is served."""
        return self._unserved

    @property
    def is_over(self) -> bool:
        return bool(self._broken or self._unserved) or self._carried_out.durable.phase.is_over

    @property
    def halted(self) -> ShoalError | None:
        """Why nothing more is handled here; None while it is."""
        return self._halted

    def has_ended(self, worker: str) -> bool:
        """Whether a worker is gone, or the job over."""
        return bool(self._broken or self._unserved) or has_ended(self._carried_out, worker)

    # ---- its life

    async def begin(self, by: Caller | None = None) -> None:
        """A new job: durable when this returns."""
        self._job = new_job(self.spec, self._life.clock())
        await self.repository.renew(self._job.durable, self._audit(Create(), by))
        self._carried_out = self._job
        self.go_on()

    def restore(self, durable: Durable, unreadable: str = "") -> None:
        """A job of an earlier life. One that cannot be read is not served and left as it is; no other is harmed."""
        self._broken = self.repository.broken
        try:
            if unreadable:
                raise StoreError(unreadable)
            if not self._broken:
                self._job = restore(durable, self._life.clock())
                self._carried_out = self._job
                self.view()
        except Exception as error:
            self._unserved = f"job {self.spec.job} is not served, its records are left as they are: {error}"
            log.error("a job is not served", job=self.spec.job, error=str(error), exc_info=not unreadable)

    def go_on(self) -> None:
        """Handle what comes from now on."""
        self._background.start(self._life.alarm)
        self._loop = guarded(f"job {self.spec.job}", self._run(), self._life.alarm)

    def halt(self, why: ShoalError) -> None:
        """Handle nothing more than the event in hand; whoever submits from now on gets `why`."""
        self._halted = self._halted or why
        self._inbox.wake()

    async def stop(self, why: ShoalError) -> None:
        """Stop and wait for the end. A write in hand is finished, if the store does not take too long."""
        in_order = self._halted is None and not (self.trouble or self._broken or self._unserved)
        self.halt(why)
        if self._loop is not None:
            await asyncio.wait([self._loop], timeout=STOP_SECONDS)
            await end_task(self._loop)
        await self._background.stop()
        self._inbox.end(self._halted)
        if in_order and self._job is self._carried_out:
            await _write_last(self._job, self.repository, self._late)

    def leave(self) -> None:
        """Let go of the streams of a job that another run replaces."""
        self._streams.close_all()

    async def submit(self, event: Event, by: Caller | None = None, only_if: OnlyIf | None = None) -> None:
        """Returns when its effects are carried out, or, while the store fails, when it was heard. Raises the
        `UserError` that refuses an operator's request, and a `StoreError` where that could not be stored in time, or
        nothing was decided for so long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        while True:
            try:
                return await self._submit(event, by, only_if)
            except _NotNow:
                if self._halted is not None or loop.time() >= deadline:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)

    async def _submit(self, event: Event, by: Caller | None, only_if: OnlyIf | None) -> None:
        """An attempt. Raises `_NotNow` where an operator's request has come to nothing and may be made again."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        submission = Submission(event, done, by, only_if)
        if self.trouble:
            if isinstance(event, OperatorRequest):
                raise _NotNow(self)
            return self._inbox.keep(event)
        await self._inbox.put(submission)
        if self._halted is not None and (self._loop is None or self._loop.done()):
            settle([submission], self._halted)
            self._inbox.end(self._halted)  # others may be waiting for a place
        if not isinstance(event, OperatorRequest):
            return await done
        await asyncio.wait([done], timeout=REQUEST_SECONDS)
        if not done.done():
            done.add_done_callback(asyncio.Future.exception)  # nobody waits for it any more
            raise UnknownOutcome(
                f"job {self.spec.job} could not store this within {REQUEST_SECONDS:g} s: "
                f"{self.trouble or 'it is busy'}. It may still be done: look before you try again"
            )
        return done.result()

    def hear(self, event: Event) -> None:
        """A heartbeat with nothing new in it. It is handled with the next tick, or before whatever comes first: that
        costs a third of what it costs to handle each by itself.
        """
        if self._halted is not None:
            raise self._halted
        if not (self._broken or self._unserved):
            self._inbox.keep(event)

    def _on_trouble(self) -> None:
        """The store fails: whoever has said something need not wait until it answers again."""
        settle([one for one in self._in_hand if not one.is_request], None)
        self._inbox.set_aside_but_requests()

    def tick(self) -> None:
        """Time has passed, for a job that is handled at all; some of it, for one in which time brings nothing soon."""
        if self._broken or self._unserved or self.trouble:
            return
        now = self._life.clock()
        if self._ticked_at <= now < self._rests_until:
            return
        if self._job.is_calm and 0 <= now - self._ticked_at < CALM_TICKS * self.spec.heartbeat_seconds:
            return
        self._ticked_at = now
        self._inbox.put_tick()

    def record(self) -> Sample:
        """Put the job as it is now into its series and return it; where it is over, only forget old points."""
        now = self._life.clock()
        point = sample(self._carried_out)
        if self.is_over:
            self.series.forget_the_old(now)
        else:
            self.series.record(point, now)
        return point

    async def _run(self) -> None:
        if not (self._broken or self._unserved):
            await self._handle([Started()])
        while self._halted is None:
            first = await self._inbox.take_first()
            if self._life.lapsed():
                settle(self._inbox.set_aside(first), _NotNow(self))
                continue
            await self._catch_up()
            await self._answer(self._inbox.take_batch(first))
            await asyncio.sleep(0)  # a line that is not empty is no wait: other jobs come before its next batch

    async def _catch_up(self) -> None:
        """Hear what was said while the store failed, and what is not news."""
        while self._halted is None and (events := self._inbox.take_kept()):
            while events and self._halted is None:
                batch, events = first_batch(events, lambda event: event)
                await self._handle(batch)
                await asyncio.sleep(0)

    async def _answer(self, batch: Sequence[Submission]) -> None:
        """Handle it, unless the job has been halted, and tell whoever submitted it."""
        if self._halted is not None:
            return settle(batch, self._halted)
        self._in_hand = batch
        try:
            if (only_if := batch[0].only_if) is not None:
                only_if.check(self.spec.job, version_of(self.view()))
            await self._handle([submission.event for submission in batch], batch[0].by)
        except UserError as error:
            settle(batch, error)
        except BaseException as error:
            settle(batch, error if isinstance(error, StoreError) else _cut_off(self.spec))
            raise
        else:
            settle(batch, None)

    # ---- one batch

    async def _handle(self, events: Sequence[Event], by: Caller | None = None) -> None:
        for event in events:
            self._streams.on_event(event)
        if self._broken or self._unserved:
            for event in events:
                self._answer_broken(event)
            return
        try:
            self._job, effects = self._life.step(self._job, events, self._life.clock())
            can_wait = all(isinstance(event, Disconnected) for event in events)
            await self._carry_out(effects, self._audit(events[0], by), can_wait)
            self._carried_out = self._job
            self._rests_until = rests_until(self._job) if not self._late else 0.0
            self._background.show(self._job.durable.current)
            self.series.see_world(self._job.durable.current, copies_wanted(self._job.durable))
        except StoreError as error:
            if not isinstance(error, Unfit):
                raise
            await self._break(error)
        except Exception as error:
            if isinstance(error, UserError) and isinstance(events[0], OperatorRequest):
                raise
            await self._break(error)

    async def _carry_out(self, effects: Sequence[Effect], audit: Sequence[JobEvent], can_wait: bool) -> None:
        """Carry out effects in order; all notes are written with the first `Persist`, which writes the state as it is
        after the step. `can_wait`: without one they are written with what comes next, a tick at the latest: where a
        stream has ended a loss comes, and a write before it would hold its PREPARE up.
        """
        lasting = any(isinstance(effect, Persist) for effect in effects)
        if lasting:
            await asyncio.sleep(0)  # for a thousand workers the text alone takes long enough
        events = [*self._late, *audit, *_recorded(effects, self._job, self._life.clock())]
        self._late = []
        for effect in effects:
            if isinstance(effect, Persist) and lasting:
                await self.repository.write(events, self._job.durable)
                events, lasting = [], False
                continue
            match effect:
                case Send(connection, message):
                    self._streams.send(connection, message)
                case Close(connection):
                    self._streams.close(connection)
                case Probe() | Adopt() | Spawn() | Kill() | AskPlanner():
                    self._background.run(effect)
        if events and can_wait:
            self._late = events
        elif events:
            await self.repository.write(events)

    def _audit(self, request: Event | Create, by: Caller | None) -> list[JobEvent]:
        """What the history says of a request of an operator, before what came of it."""
        if by is None or not isinstance(request, OperatorRequest | Create):
            return []
        world = self._job.durable.current
        entry = audit_entry(request, by, self._life.clock(), world.generation if world is not None else 0)
        log.info(entry.message, job=self.spec.job, kind=entry.kind, token=by.token, address=by.address)
        return [entry]

    # ---- a machine that fails

    async def _break(self, error: Exception) -> None:
        """The job has failed; the controller and its other jobs have not."""
        cause = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        self._broken = f"job {self.spec.job} cannot continue because of a bug in Shoal: {cause}"
        log.error("a job cannot go on", job=self.spec.job, error=cause, exc_info=error)
        event = JobEvent(self._life.clock(), str(EventKind.FAILED), self._shown.generation, "", self._broken)
        await self.repository.write([event], broken=self._broken)
        self._streams.send_last_to_all(Shutdown(Ending.FAILED, self._broken))
        for worker in self._shown.workers:
            self._background.run(Kill(worker.worker))

    def _answer_broken(self, event: Event) -> None:
        """Workers that come are sent home, or to wait where another version may serve them; requests are refused."""
        if isinstance(event, Connected | SeatAsked) and self._unserved:
            self._streams.send_last(event.connection, Refusal(self._unserved, final=False))
        elif isinstance(event, Connected | SeatAsked):
            self._streams.send_last(event.connection, Shutdown(Ending.FAILED, self._broken))
        elif isinstance(event, OperatorRequest) and not (self._broken and isinstance(event, Cancel)):
            raise Conflict(self._broken or self._unserved).coded(ErrorCode.JOB_UNSERVED)


def _recorded(effects: Sequence[Effect], job: Job, now: float) -> list[JobEvent]:
    """What the history, and the log, say of these effects of a step to `job`."""
    world = job.durable.current
    generation = world.generation if world is not None else 0
    notes = [effect for effect in effects if isinstance(effect, Note)]
    for note in notes:
        log.info(note.message, job=job.spec.job, kind=str(note.kind), generation=generation, worker=note.worker or None)
    return [JobEvent(now, str(note.kind), generation, note.worker, note.message, dict(note.data)) for note in notes]


async def _write_last(job: Job, repository: JobRepository, events: Sequence[JobEvent]) -> None:
    """With the steps that were shown since the last write: the next life goes on from there."""
    durable, before = as_of_now(job), repository.durable
    waited = durable == replace(before, figures=durable.figures) and not durable.roster
    if not events and (durable == before or (waited and durable.figures.steps == before.figures.steps)):
        return  # what a job without workers waited is counted by the next life
    try:
        async with asyncio.timeout(LAST_WRITE_SECONDS):
            await repository.write(events, durable)
    except (TimeoutError, StoreError) as error:
        log.warning("the last steps could not be written", job=job.spec.job, error=str(error))


class _NotNow(StoreError):
    """Nothing is decided at present: a request has come to nothing."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(f"job {runner.spec.job} cannot be changed now: {runner.trouble}. Try again later")


def _cut_off(spec: JobSpec) -> UnknownOutcome:
    return UnknownOutcome(
        f"the controller stopped before job {spec.job} had answered; it may have been done: look before you try again"
    )


def _blank_view(spec: JobSpec) -> JobView:
    """What is known of a job before its machine has spoken."""
    return JobView(
        job=spec.job, phase=Phase.WAITING, generation=0, wanted=spec.wanted, active=0, min_workers=spec.least_workers,
        max_workers=spec.max_workers, lanes=spec.lanes, step=0, max_steps=None, loss=None, last_checkpoint_step=None,
        reason="", run=spec.run,
    )  # fmt: skip
