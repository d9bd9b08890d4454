"""A launcher of local processes, and what its jobs hear of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path

import psutil
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.core.machine.events import Exited
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.local import LocalLauncher, WorkerEnvironment
from shoal_controller.launchers.ownership import Claim

SECONDS = 100.0
"""No wait of a test takes longer."""

TOKENS = WorkerTokens("secret")
SLEEPER = "echo began; exec sleep 600"


def spec(script: str, **env: str) -> JobSpec:
    return JobSpec("demo", wanted=1, launcher="local", command=("/bin/sh", "-c", script), env=env, run="run-1")


class Controller:
    """A launcher, and what its jobs hear of it."""

    def __init__(self, folder: Path, claim: Claim | None = None, warm_start: bool = False, **environment: str) -> None:
        self.exits: asyncio.Queue[tuple[str, Exited]] = asyncio.Queue()
        self.runs: list[str] = []
        """Of each end that was reported, whose it was."""
        self.refusal: Exception | None = None
        self.hears = asyncio.Event()
        """Not set while they are too busy."""
        self.hears.set()
        shown = {"PATH": os.environ["PATH"], **environment}
        inherited = WorkerEnvironment(lambda: ["127.0.0.1:7071"], TOKENS, shown, warm_start=warm_start)
        self.folder = folder
        self.launcher = LocalLauncher(folder, inherited, self.submit, claim)

    async def submit(self, job: str, run: str, event: Exited) -> None:
        await self.hears.wait()
        self.runs.append(run)
        await self.exits.put((job, event))
        if self.refusal is not None:
            raise self.refusal

    async def end(self) -> Exited:
        async with asyncio.timeout(SECONDS):
            job, event = await self.exits.get()
        assert job == "demo"
        return event

    def records(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "jobs/demo").glob("*.json*"))


def with_controller(
    folder: Path, scene: Callable[[Controller], Coroutine[object, object, None]], warm_start: bool = False
) -> None:
    """Play a scene; afterwards no file is open that was not before. Earlier tests may still be closing theirs."""

    async def play() -> None:
        before = open_files()
        controller = Controller(folder, warm_start=warm_start)
        try:
            await scene(controller)
        finally:
            await controller.launcher.release()
        assert open_files() <= before

    asyncio.run(play())


def open_files() -> set[str]:
    """Descriptors of this process, but for the one that lists them."""
    listed = list(Path("/proc/self/fd").iterdir())
    return {path.name for path in listed if path.is_symlink()}


def written(log: str) -> str:
    return Path(log).read_text(errors="replace")


async def until(holds: Callable[[], object]) -> None:
    """Another process's doing, of which nobody tells this one."""
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def ended(pid: int) -> bool:
    """Whether it is gone, or would be if whoever adopted it had waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
