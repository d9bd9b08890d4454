"""Background work of one job: finding, starting and ending processes, probes, and plans; too slow for its loop.

Processes are found and started in the order of the effects, by one task. Ends are not behind starts: each has a task of
its own, which waits for what is being found and for the start of the very worker that it ends, and for nothing else.
Probes run beside each other, one per process. Questions to the planner are answered by one task, the newest first. What
comes of it goes back as an event. Made by `runner.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from shoal_protos.errors import PeerError, ShoalError, StoreError
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.effects import Adopt, AskPlanner, Kill, Probe, Spawn
from shoal_controller.core.machine.events import (
    Event,
    Exited,
    NeverStarted,
    PlannerAnswered,
    PlannerBegan,
    PlannerFailed,
    Probed,
    Spawned,
)
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.jobs.ports import Outside
from shoal_controller.launchers.launcher import Launcher
from shoal_controller.process.tasks import end_task, guarded

LAUNCHES = 4096
"""Processes that may wait to be started; more is a bug."""

LAUNCH_SECONDS = 60.0
"""How long a launcher may take for one process."""

ADOPT_TIMES = 3
"""How often the launcher is asked what became of an earlier life's processes before starts and ends go on without
that; it is asked on.
"""

ADOPT_PAUSE_SECONDS, LONGEST_ADOPT_PAUSE_SECONDS = 2.0, 60.0
"""Between two such questions; the longest once starts do not wait for it."""

log = structlog.get_logger("shoal.background")

Submit = Callable[[Event], Awaitable[None]]
Alarm = Callable[[BaseException], None]
Tasks = dict[object, asyncio.Task[None]]


class BackgroundWork:
    """What one job has others do."""

    def __init__(self, spec: JobSpec, outside: Outside, submit: Submit, hear: Callable[[Event], object]) -> None:
        self._spec = spec
        self._outside = outside
        self._submit = submit
        self._hear = hear
        """For what is no news to wait for."""
        self._launches: asyncio.Queue[Adopt | Spawn] = asyncio.Queue(LAUNCHES)
        self._starting: dict[WorkerId, asyncio.Event] = {}
        """Workers whose start is asked for and not over."""
        self._unwanted: set[WorkerId] = set()
        """Workers that are to be ended before their start has begun."""
        self._adopted = asyncio.Event()
        """Not set while starts and ends wait for what the launcher finds."""
        self._adopted.set()
        self._adoptions: Tasks = {}
        """Those that starts and ends no longer wait for."""
        self._kills: Tasks = {}
        self._probes: Tasks = {}
        self._question: AskPlanner | None = None
        """The newest one that nobody has begun to answer."""
        self._question_came = asyncio.Event()
        self._shown_generation = 0
        """The last one that the launcher was told."""
        self._always: list[asyncio.Task[None]] = []
        """Tasks that run for as long as the job does."""
        self._alarm: Alarm | None = None

    def start(self, alarm: Alarm) -> None:
        """Launch and plan as requested. `alarm` is called when that ends unexpectedly."""
        self._alarm = alarm
        self._always = [
            guarded(f"launches of {self._spec.job}", self._launch(), alarm),
            guarded(f"plans of {self._spec.job}", self._plan(), alarm),
        ]

    async def stop(self) -> None:
        """End them all; processes live on."""
        tasks = [*self._probes.values(), *self._kills.values(), *self._adoptions.values(), *self._always]
        await asyncio.gather(*(end_task(task) for task in tasks))

    def run(self, effect: Probe | Adopt | Spawn | Kill | AskPlanner) -> None:
        """Have it done; never waits."""
        match effect:
            case Probe(worker, incarnation):
                self._beside(self._probes, (worker, incarnation), f"probe of {worker}", partial(self._probe, effect))
            case Kill(worker):
                if worker in self._starting:
                    self._unwanted.add(worker)
                self._beside(self._kills, worker, f"end of {worker}", partial(self._kill, worker))
            case Spawn(worker):
                self._starting[worker] = asyncio.Event()
                self._launches.put_nowait(effect)
            case Adopt():
                self._adopted.clear()
                self._launches.put_nowait(effect)
            case AskPlanner():
                self._question = effect
                self._question_came.set()

    def show(self, world: Plan | None) -> None:
        """Tell the launcher which world trains, once for each; nobody waits for what it makes of that."""
        if world is None or world.generation == self._shown_generation:
            return
        self._shown_generation = world.generation
        if self._launcher is not None:
            self._launcher.world_began(world, self._spec)

    def _beside(self, tasks: Tasks, who: object, purpose: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run in a task of its own, unless the same is under way."""
        if who not in tasks and self._alarm is not None:
            tasks[who] = guarded(f"{purpose} of {self._spec.job}", work(), self._alarm)
            tasks[who].add_done_callback(lambda _: tasks.pop(who, None))

    async def _probe(self, probe: Probe) -> None:
        met = await self._outside.probe(probe.address, probe.incarnation, probe.watched)
        await self._report(Probed(probe.worker, probe.incarnation, met.refused, met.reached))

    async def _plan(self) -> None:
        """Answer the newest question; an older one that still waits has been given up."""
        while True:
            await self._question_came.wait()
            self._question_came.clear()
            if (asked := self._question) is not None:
                self._question = None
                await self._report(await self._answered(asked))

    async def _answered(self, asked: AskPlanner) -> Event:
        try:
            begun = partial(self._hear, PlannerBegan(asked.number))
            return PlannerAnswered(asked, await self._outside.planner(asked.question, begun))
        except PeerError as error:
            log.warning("a question to the planner has no answer", job=self._spec.job, error=str(error))
            return PlannerFailed(asked.number, str(error))
        except Exception as error:
            log.error("the planner failed", job=self._spec.job, error=str(error), exc_info=error)
            return PlannerFailed(asked.number, f"{type(error).__name__}: {error}")

    async def _launch(self) -> None:
        while True:
            effect = await self._launches.get()
            if isinstance(effect, Spawn):
                await self._start(effect.worker)
            else:
                await self._adopt(effect)

    @property
    def _launcher(self) -> Launcher | None:
        return self._outside.launchers.get(self._spec.launcher)

    async def _adopt(self, adopt: Adopt) -> None:
        """● A launcher that does not answer is asked until it does: a worker that it does not follow is not drained
        when its machine is to go, and its death is noticed late. Starts and ends wait only for the first few times.
        """
        if self._launcher is not None:
            for _ in range(ADOPT_TIMES):
                if await self._try_to_adopt(self._launcher, adopt):
                    break
                await asyncio.sleep(ADOPT_PAUSE_SECONDS)
            else:
                self._beside(self._adoptions, adopt, "adoption", partial(self._adopt_late, self._launcher, adopt))
        self._adopted.set()

    async def _adopt_late(self, launcher: Launcher, adopt: Adopt) -> None:
        pause = ADOPT_PAUSE_SECONDS
        while not await self._try_to_adopt(launcher, adopt):
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_ADOPT_PAUSE_SECONDS)

    async def _try_to_adopt(self, launcher: Launcher, adopt: Adopt) -> bool:
        """Returns whether the launcher has said where an earlier life's workers are; the job is told."""
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                places = await launcher.adopt(adopt.workers, self._spec)
        except Exception as error:
            known = isinstance(error, PeerError | TimeoutError)
            log.error("workers are not adopted yet", job=self._spec.job, error=str(error), exc_info=not known)
            return False
        for worker, place in places.items():
            await self._report(Spawned(worker, place) if place is not None else NeverStarted(worker))
        return True

    async def _start(self, worker: WorkerId) -> None:
        if worker in self._unwanted:
            await self._report(NeverStarted(worker))
        else:
            await self._report(await self._spawned(self._launcher, worker))
        self._unwanted.discard(worker)
        self._starting.pop(worker).set()

    async def _spawned(self, launcher: Launcher | None, worker: WorkerId) -> Event:
        """The process, or why there is none."""
        if launcher is None:
            return Exited(worker, None, f"this controller has no launcher {self._spec.launcher!r}")
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                return Spawned(worker, await launcher.spawn(worker, self._spec))
        except TimeoutError:
            return Exited(worker, None, f"its launcher had not started it after {LAUNCH_SECONDS:g} s")
        except Exception as error:
            trace = None if isinstance(error, ShoalError) else error  # the former says all in its sentence
            fields = {"job": self._spec.job, "worker": worker, "error": str(error)}
            log.error("a worker could not be started", **fields, exc_info=trace)
            return Exited(worker, None, f"it could not be started: {error}")

    async def _kill(self, worker: WorkerId) -> None:
        """End its process. One whose start is asked for is not started, or ended as soon as it was."""
        if self._launcher is None:
            return
        await self._adopted.wait()
        if worker in self._starting:
            await self._starting[worker].wait()
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                await self._launcher.kill(worker, self._spec)
        except Exception as error:
            log.error("a worker could not be ended", job=self._spec.job, worker=worker, exc_info=error)

    async def _report(self, event: Event) -> None:
        """A job that is ending or too busy hears of it when it asks again."""
        try:
            await self._submit(event)
        except StoreError as error:
            log.warning(
                "the result of background work was lost",
                job=self._spec.job,
                work=str(event),
                error=str(error),
            )
