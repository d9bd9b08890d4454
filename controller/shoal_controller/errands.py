"""Errands of one job: starting and ending processes, and probes; slow work that must not hold up the job's loop.

Processes are started and ended in the order of the effects, by one task; probes run beside each other, one per
process. What comes of an errand goes back as an event. Made by `runner.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog
from shoal_protos.errors import StoreError

from shoal_controller.core.effects import Kill, Probe, Spawn
from shoal_controller.core.events import Event, Exited, Probed
from shoal_controller.core.spec import JobSpec
from shoal_controller.seams import Launcher, Outside
from shoal_controller.tasks import end_task, guarded

LAUNCHES = 4096
"""Processes that may wait to be started or ended; more is a defect."""

LAUNCH_SECONDS = 60.0
"""How long a launcher may take for one process."""

log = structlog.get_logger("shoal.errands")

Submit = Callable[[Event], Awaitable[None]]
Alarm = Callable[[BaseException], None]


class Errands:
    """What one job has others do."""

    def __init__(self, spec: JobSpec, outside: Outside, submit: Submit) -> None:
        self._spec = spec
        self._outside = outside
        self._submit = submit
        self._launches: asyncio.Queue[Spawn | Kill] = asyncio.Queue(LAUNCHES)
        self._probes: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._launching: asyncio.Task[None] | None = None
        self._alarm: Alarm | None = None

    def start(self, alarm: Alarm) -> None:
        """Adopt what an earlier life has started, then launch as told. `alarm` hears when that ends unexpectedly."""
        self._alarm = alarm
        self._launching = guarded(f"launches of {self._spec.job}", self._launch(), alarm)

    async def stop(self) -> None:
        """End them all; processes live on."""
        tasks = [*self._probes.values(), *([self._launching] if self._launching else [])]
        await asyncio.gather(*(end_task(task) for task in tasks))

    def run(self, errand: Probe | Spawn | Kill) -> None:
        """Have it done; never waits."""
        if not isinstance(errand, Probe):
            self._launches.put_nowait(errand)
            return
        who = (errand.worker, errand.incarnation)
        if who not in self._probes and self._alarm is not None:
            probe = guarded(f"probe of {errand.worker} of {self._spec.job}", self._probe(errand), self._alarm)
            self._probes[who] = probe
            probe.add_done_callback(lambda _: self._probes.pop(who, None))

    async def _probe(self, probe: Probe) -> None:
        refused = await self._outside.prober(probe.address)
        await self._report(Probed(probe.worker, probe.incarnation, refused))

    async def _launch(self) -> None:
        launcher = self._outside.launchers.get(self._spec.launcher)
        if launcher is not None:
            for event in await self._adopted(launcher):
                await self._report(event)
        while True:
            errand = await self._launches.get()
            if isinstance(errand, Spawn):
                await self._report(await self._spawned(launcher, errand))
            elif launcher is not None:
                await self._kill(launcher, errand)

    async def _adopted(self, launcher: Launcher) -> Sequence[Event]:
        """What became of an earlier life's processes; where that cannot be told, their streams will."""
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                return await launcher.adopt(self._spec)
        except Exception as error:
            log.error("workers could not be adopted", job=self._spec.job, error=str(error), exc_info=error)
            return ()

    async def _spawned(self, launcher: Launcher | None, errand: Spawn) -> Event:
        """The process, or why there is none."""
        if launcher is None:
            return Exited(errand.worker, None, f"this controller has no launcher {self._spec.launcher!r}")
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                return await launcher.spawn(errand.worker, self._spec)
        except TimeoutError:
            return Exited(errand.worker, None, f"its launcher had not started it after {LAUNCH_SECONDS:g} s")
        except Exception as error:
            log.error("a worker could not be started", job=self._spec.job, worker=errand.worker, exc_info=error)
            return Exited(errand.worker, None, f"it could not be started: {error}")

    async def _kill(self, launcher: Launcher, errand: Kill) -> None:
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                await launcher.kill(errand.worker, self._spec)
        except Exception as error:
            log.error("a worker could not be ended", job=self._spec.job, worker=errand.worker, exc_info=error)

    async def _report(self, event: Event) -> None:
        """A job that is ending or too busy hears of it when it asks again."""
        try:
            await self._submit(event)
        except StoreError as error:
            log.warning("a job did not hear of an errand", job=self._spec.job, errand=str(event), error=str(error))
