"""A machine small enough to see through, an outside that writes down what reaches it, and a shell between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shoal_controller.core.machine.durable import Place, WorkerRecord
from shoal_controller.core.machine.effects import Effect, Note, Persist
from shoal_controller.core.machine.events import Event, Tick
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.job_size import JobSize, resized
from shoal_controller.core.machine.spec import JobSpec, JobView, Phase
from shoal_controller.core.planning.question import Answer, Question, answer
from shoal_controller.jobs.ports import Outside
from shoal_controller.jobs.probes import ProbeResult
from shoal_controller.jobs.shell import Shell
from shoal_controller.process import logs
from shoal_controller.store.open import open_store
from shoal_protos.acts import Cancel, Scale
from shoal_protos.errors import Conflict, PeerError
from shoal_protos.messages import ToWorker
from shoal_protos.plan import Plan

SPEC = JobSpec("train", wanted=3, launcher="local", command=("python", "train.py"), env={"A": "1"})


@dataclass
class SmallMachine:
    """Knows Scale and Cancel. What else is to happen is put into `answers`: event type → effects, or a function."""

    answers: dict[type, Callable[[Job, Event], Sequence[Effect]] | Sequence[Effect]] = field(default_factory=dict)
    shown: dict[str, object] = field(default_factory=dict)
    """Fields of every view."""
    roster: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """The job's workers from its next event on."""
    times: list[float] = field(default_factory=list)
    events: dict[str, list[str]] = field(default_factory=dict)
    """By job: the events by name, ticks left out."""
    batches: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    """By job: what it was asked at a time."""
    filler: ClassVar[dict[str, str]] = {}
    """What makes the state large."""

    def step(self, job: Job, events: Sequence[Event], now: float) -> tuple[Job, Sequence[Effect]]:
        self.times.append(now)
        self.batches.setdefault(job.spec.job, []).append(tuple(type(event).__name__ for event in events))
        effects: list[Effect] = []
        job = replace(job, durable=replace(job.durable, roster=self.roster)) if self.roster else job
        for event in events:
            job, more = self._one(job, event)
            effects += more
        return job, effects

    def _one(self, job: Job, event: Event) -> tuple[Job, Sequence[Effect]]:
        if not isinstance(event, Tick):
            self.events.setdefault(job.spec.job, []).append(type(event).__name__)
        if isinstance(event, Scale):
            return self._scaled(job, event)
        if isinstance(event, Cancel):
            return _kept(job, phase=Phase.CANCELLED), [Persist(), Note("cancelled", "cancelled by an operator")]
        answer = self.answers.get(type(event), ())
        return job, answer(job, event) if callable(answer) else answer

    def _scaled(self, job: Job, event: Scale) -> tuple[Job, Sequence[Effect]]:
        wanted = event.workers or job.durable.wanted
        if wanted > 8:
            raise Conflict(f"workers is {wanted}; expected 1 to 8")
        size = resized(
            JobSize(job.spec.job, wanted, job.durable.bounds, job.spec.lanes, spares=job.durable.spares), event
        )
        filler = self.filler.get("filler", "")
        job = _kept(job, wanted=wanted, changed_bounds=size.bounds, spares=size.spares, paused_because=filler)
        return job, [Persist(), Note("scale", f"scaled to {wanted}", data={"workers": wanted})]

    def view(self, job: Job, now: float) -> JobView:
        bounds = job.durable.bounds
        view = JobView(
            job=job.spec.job, phase=job.durable.phase, generation=1, wanted=job.durable.wanted, active=0,
            min_workers=bounds.least, max_workers=bounds.most, lanes=job.spec.lanes, step=0,
            max_steps=None, loss=None, last_checkpoint_step=None, reason="as it should be", run=job.spec.run,
            owner=job.spec.owner, spares=job.durable.spares,
            version=job.durable.version, created_at=job.durable.figures.created,
        )  # fmt: skip
        return replace(view, **self.shown)


def _kept(job: Job, **fields: object) -> Job:
    return replace(job, durable=replace(job.durable, **fields, version=job.durable.version + 1))


class Written:
    """Streams, probe and launcher in one: `log` has what they were asked, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.met: dict[str, ProbeResult] = {}
        """By address: what a probe meets there."""
        self.adopted: dict[str, Place | None] = {}
        self.adopt_failures = 0
        """How often it does not answer what it finds."""
        self.spawns: Callable[[str], Place] = lambda worker: Place.of_process(100, f"/logs/{worker}")
        self.slow: asyncio.Event | None = None
        """What every start waits for."""
        self._news = asyncio.Event()

    def outside(self) -> Outside:
        return Outside(self, {"local": self}, self.plan, self.probe)

    def _write(self, *entry: object) -> None:
        self.log.append(entry)
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, *entry: object) -> None:
        """Returns when exactly this has been asked."""
        async with asyncio.timeout(100):
            while entry not in self.log:
                await self._news.wait()

    def send(self, connection: int, message: ToWorker) -> None:
        self._write("send", connection, message)

    def close(self, connection: int | None = None) -> None:
        self._write("close", connection)

    async def probe(self, address: str, incarnation: str, watched: bool = True) -> ProbeResult:
        self._write("probe", address, incarnation)
        return self.met.get(address, ProbeResult())

    async def plan(self, question: Question) -> Answer:
        self._write("plan", question.request.generation)
        return answer(question)

    async def spawn(self, worker: str, spec: JobSpec) -> Place:
        self._write("spawn", worker, spec.job)
        if self.slow is not None:
            await self.slow.wait()
        return self.spawns(worker)

    async def kill(self, worker: str, spec: JobSpec) -> None:
        self._write("kill", worker, spec.job)

    def world_began(self, world: Plan, spec: JobSpec) -> None:
        self._write("world", world.generation, spec.job)

    async def forget(self, job: str) -> None:
        self._write("forget", job)

    async def adopt(self, workers: Sequence[str], spec: JobSpec) -> Mapping[str, Place | None]:
        self._write("adopt", *workers)
        if self.adopt_failures:
            self.adopt_failures -= 1
            raise PeerError("it is away")
        return self.adopted


class World:
    """A shell with everything around it."""

    def __init__(self, store, machine=None, clock=None, lapsed=str) -> None:
        self.store = store
        self.machine = machine or SmallMachine()
        self.written = Written()
        self.shell = Shell(store, clock, step=self.machine.step, view=self.machine.view, lapsed=lapsed)
        self.shell.connect(self.written.outside())

    def events(self, job="train"):
        return tuple(self.machine.events.get(job, ()))


@asynccontextmanager
async def running(directory, machine=None, clock=None):
    logs.configure("warning")
    store = await open_store(f"embedded:{directory}")
    world = World(store, machine, clock)
    try:
        await world.shell.start()
        yield world
    finally:
        await world.shell.stop()
        await store.close()
