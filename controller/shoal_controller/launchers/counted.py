"""A launcher whose calls are counted, with what became of each. `server.py` puts it around every launcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.launcher import Launcher

CALLS = ("spawn", "kill", "adopt", "forget")
OUTCOMES = ("done", "failed", "late")
"""`late`: whoever called it waited no longer."""

Counted = Callable[[str, str], None]
"""Called with the call and its outcome."""


class CountedLauncher:
    """A `Launcher` around another one."""

    def __init__(self, launcher: Launcher, counted: Counted) -> None:
        self._launcher, self._counted = launcher, counted

    async def spawn(self, worker: WorkerId, spec: JobSpec) -> Place:
        with self._call("spawn"):
            return await self._launcher.spawn(worker, spec)

    async def kill(self, worker: WorkerId, spec: JobSpec) -> None:
        with self._call("kill"):
            await self._launcher.kill(worker, spec)

    async def adopt(self, workers: Sequence[WorkerId], spec: JobSpec) -> Mapping[WorkerId, Place | None]:
        with self._call("adopt"):
            return await self._launcher.adopt(workers, spec)

    def world_began(self, world: Plan, spec: JobSpec) -> None:
        self._launcher.world_began(world, spec)

    async def forget(self, job: str) -> None:
        with self._call("forget"):
            await self._launcher.forget(job)

    async def release(self) -> None:
        await self._launcher.release()

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "late"
            raise
        finally:
            self._counted(name, outcome)
