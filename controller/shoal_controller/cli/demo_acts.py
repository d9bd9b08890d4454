"""What the demo does to its job, from outside: a SIGKILL and three requests to the REST API.

Each act waits until it shows in what `GET /v1/jobs/…` answers; a job that ends before is `OutOfSteps`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

from shoal_protos.errors import Conflict, JobFailed
from shoal_protos.rest import OVER, Json

from shoal_controller.cli.client import Client

LOOK_SECONDS = 0.02
PATIENCE_SECONDS = 60.0
"""No act takes longer, the start of a worker included."""

Tell = Callable[[str], None]
Seen = Callable[[Json, dict[str, Json]], bool]
"""Whether an act shows: the job, its workers by id."""


class OutOfSteps(JobFailed):
    """The job was over before all acts were played."""


class DisturbedJob:
    """A job that is acted upon."""

    def __init__(self, client: Client, job: str, tell: Tell) -> None:
        self.client = client
        self.job = job
        self.tell = tell

    async def until(self, goal: str, seen: Seen) -> tuple[Json, dict[str, Json]]:
        """Look at the job until `seen`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            job = await self.client.job(self.job)
            workers = {worker["worker"]: worker for worker in await self.client.workers(self.job)}
            if seen(job, workers):
                return job, workers
            if job["phase"] in OVER:
                ended = f"job {self.job} {job['phase']} at step {job['step']} before {goal}: {job['reason']}"
                raise OutOfSteps(f"{ended} (more steps: --steps)")
            await asyncio.sleep(LOOK_SECONDS)
        raise JobFailed(
            f"waited {PATIENCE_SECONDS:.0f} s for {goal}; job {self.job} is {job['phase']}: {job['reason']}"
        )

    async def ask(self, goal: str, request: Awaitable[object]) -> None:
        """Send the request of an act. Raises `OutOfSteps` where the job has ended since it was looked at."""
        try:
            await request
        except Conflict:
            await self.until(goal, lambda job, _: job["phase"] not in OVER)
            raise

    async def members(self, count: int) -> tuple[Json, dict[str, Json]]:
        return await self.until(f"{count} workers train", lambda job, _: _training(job, count))


def _training(job: Json, members: int) -> bool:
    return bool(job["phase"] == "running" and job["workers"]["active"] == members)


def _ranked(workers: dict[str, Json], rank: int) -> Json:
    """The member of that rank; empty when there is none (any more)."""
    members = (worker for worker in workers.values() if worker["rank"] == rank and worker["state"] == "active")
    return next(members, {})


async def play(disturbed: DisturbedJob) -> None:
    """All acts, one after the other."""
    await kill_in_mid_step(disturbed)
    await scale(disturbed, 4)
    await drain(disturbed)
    await scale(disturbed, 3)


async def kill_in_mid_step(disturbed: DisturbedJob) -> None:
    """kill -9 of one of three workers, half a step after a step was seen."""
    before, _ = await disturbed.members(3)
    first = max(before["step"], 1)
    job, workers = await disturbed.until(
        "its first steps", lambda job, workers: job["step"] > first and bool(_ranked(workers, 1))
    )
    victim = _ranked(workers, 1)
    await asyncio.sleep(victim["step_seconds"] / 2)
    os.kill(victim["pid"], signal.SIGKILL)
    disturbed.tell(
        f"▶ kill -9 {victim['pid']} ({victim['worker']}), "
        f"{victim['step_seconds'] / 2:.2f} s after step {job['step']} was seen"
    )
    await disturbed.until(
        f"{victim['worker']} is evicted",
        lambda now, workers: workers[victim["worker"]]["state"] == "lost" and now["generation"] > job["generation"],
    )


async def scale(disturbed: DisturbedJob, workers: int) -> None:
    """POST …/scale."""
    disturbed.tell(f'▶ POST /v1/jobs/{disturbed.job}/scale {{"workers": {workers}}}')
    await disturbed.ask(f"it is scaled to {workers}", disturbed.client.scale_job(disturbed.job, workers))
    await disturbed.members(workers)


async def drain(disturbed: DisturbedJob) -> None:
    """POST …/workers/…/drain, for the first of the world; the launcher fills its place."""
    job, workers = await disturbed.until(
        "4 workers train", lambda job, workers: _training(job, 4) and bool(_ranked(workers, 0))
    )
    leaving = _ranked(workers, 0)["worker"]
    disturbed.tell(f"▶ POST /v1/jobs/{disturbed.job}/workers/{leaving}/drain")
    await disturbed.ask(f"{leaving} is drained", disturbed.client.drain_worker(disturbed.job, leaving))
    await disturbed.until(f"{leaving} is let go", lambda _, workers: workers[leaving]["state"] == "left")
    await disturbed.members(job["workers"]["wanted"])
