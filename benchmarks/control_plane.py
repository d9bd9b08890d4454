"""What a controller costs: `python benchmarks/control_plane.py`. Simulated workers over real gRPC, an embedded store.

The controller is a process of its own; its CPU seconds count (with those of its children), not the wall, for the
workers are another busy process beside it. Rows: many jobs at a heartbeat a second (CPU, memory, time to a welcome, a
kill of 5%), one large job (CPU of a recovery's stages), a scrape of many jobs' metrics, and the planner alone; each for
several sizes, so that growth shows. "held" is the longest that a callback has kept the event loop, in CPU ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
from dataclasses import replace
from statistics import median

from controller_process import Controller, controller
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_recovery, plan_start
from shoal_protos.plan import Member, Reason
from shoal_protos.runs import every
from simulated_workers import JobWorkers, start_job
from tables import show, verdict

RACK = 100
KILLED = 0.05
SETTLE_SECONDS = 11.0
"""After a start: beyond `reconnect_seconds`, within which no refused connection counts as a death."""
STEADY_CPU, STEADY_MB, WELCOME_SECONDS, COMMITTED_SECONDS, FIRST_COMMITS_SECONDS = 0.5, 500, 0.1, 2.0, 1.0
SCRAPES, SCRAPE_SECONDS, SERIES = 5, 0.5, 42_000

MANY = (
    "workers", "jobs", "start, CPU s", "steady, cores", "MB", "writes a second and job", "welcome p50, s", "p99, s",
    "5% killed, s", "held, CPU ms",
)  # fmt: skip
ONE = (
    "workers", "blocks", "start, CPU s", "held, CPU ms", "to a built world, CPU s", "wall, s", "first commits, CPU s",
    "held, CPU ms", "MB",
)  # fmt: skip


async def start_jobs(there: Controller, jobs: int, each: int, blocks: int) -> list[JobWorkers]:
    for number in range(jobs):
        await there.submit(f"job{number}", each)
    return await asyncio.gather(*(start_job(there.grpc, f"job{number}", each, blocks) for number in range(jobs)))


# ---- many jobs


async def many_jobs(workers: int, jobs: int, blocks: int, seconds: float) -> list[str]:
    """One row: `workers` in `jobs`."""
    with controller() as there:
        began = there.cpu_seconds()
        every_job = await start_jobs(there, jobs, workers // jobs, blocks)
        started = there.cpu_seconds() - began
        await asyncio.sleep(SETTLE_SECONDS)
        share, writes = await _steady(there, seconds)
        welcomes = await _welcomes(every_job, seconds)
        there.held()
        took = await _kill_some(every_job)
        late, memory = welcomes[int(0.99 * len(welcomes))], there.memory_mb()
        await asyncio.gather(*(job.end() for job in every_job))
        return [
            str(workers), str(jobs), f"{started:.1f}", f"{share:.3f} ({verdict(share, STEADY_CPU)})",
            f"{memory:.0f} ({verdict(memory, STEADY_MB)})", f"{writes / jobs:.2f}",
            f"{welcomes[len(welcomes) // 2]:.3f}", f"{late:.3f} ({verdict(late, WELCOME_SECONDS)})",
            f"{took:.2f} ({verdict(took, COMMITTED_SECONDS)})", there.held(),
        ]  # fmt: skip


async def _steady(there: Controller, seconds: float) -> tuple[float, float]:
    """Cores, and writes a second, of jobs that train and nothing else."""
    writes = await there.writes()
    before, at = there.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    passed = time.monotonic() - at
    share = (there.cpu_seconds() - before) / passed
    return share, (await there.writes() - writes) / passed


async def _welcomes(jobs: list[JobWorkers], seconds: float) -> list[float]:
    """Seconds from hello to welcome of workers that open a new stream, ten a second, while all others beat."""
    found, chance = [], random.Random(1)
    for _ in range(int(10 * seconds)):
        job = chance.choice(jobs)
        found.append(await job.workers[chance.choice(sorted(job.workers))].connect())
        await asyncio.sleep(0.1)
    return sorted(found)


async def _kill_some(jobs: list[JobWorkers]) -> float:
    """Kill some workers of every job at once; seconds until all jobs have committed a step without them."""
    since = time.monotonic()
    await asyncio.gather(*(_kill(job, max(1, round(KILLED * len(job.workers)))) for job in jobs))
    ends = await asyncio.gather(*(job.until_after(since, job.committed_at) for job in jobs))
    return max(ends) - since


async def _kill(job: JobWorkers, count: int) -> None:
    names = random.Random(2).sample(sorted(job.workers), count)
    await asyncio.gather(*(job.workers.pop(name).kill() for name in names))


# ---- one large job


async def one_job(workers: int, blocks: int) -> list[str]:
    """One row: CPU seconds of the controller in the stages of a recovery."""
    with controller() as there:
        there.held()
        began = there.cpu_seconds()
        (job,) = await start_jobs(there, 1, workers, blocks)
        started, held = there.cpu_seconds() - began, there.held()
        await asyncio.sleep(SETTLE_SECONDS)
        job.holding = True
        before, since = there.cpu_seconds(), time.monotonic()
        await _kill(job, 1)
        opened = await job.until_after(since, job.opened_at)
        await _heard(job)
        built = there.cpu_seconds()
        job.commit(max(job.opened_at))
        await _heard(job)
        committed = there.cpu_seconds() - built
        row = [
            str(workers), str(blocks), f"{started:.1f}", held, f"{built - before:.2f}", f"{opened - since:.2f}",
            f"{committed:.2f} ({verdict(committed, FIRST_COMMITS_SECONDS)})", there.held(), f"{there.memory_mb():.0f}",
        ]  # fmt: skip
        await job.end()
        return row


async def _heard(job: JobWorkers) -> None:
    """Returns when what the workers have said is handled: a new hello comes after it in the inbox."""
    await next(iter(job.workers.values())).connect()


# ---- a scrape


async def scrape(jobs: int, each: int, blocks: int) -> list[str]:
    """One row: what Prometheus is given of many jobs that train."""
    with controller() as there:
        every_job = await start_jobs(there, jobs, each, blocks)
        await asyncio.sleep(SETTLE_SECONDS)
        there.held()
        walls, began, text = [], there.cpu_seconds(), ""
        for _ in range(SCRAPES):
            at = time.monotonic()
            text = await there.metrics()
            walls.append(time.monotonic() - at)
        cpu, wall = (there.cpu_seconds() - began) / SCRAPES, median(walls)
        series = sum(not line.startswith("#") for line in text.splitlines())
        await asyncio.gather(*(job.end() for job in every_job))
        return [
            str(jobs), str(jobs * each), f"{series} ({verdict(series, SERIES)})", f"{len(text) / 1e6:.2f}",
            f"{wall:.3f} ({verdict(wall, SCRAPE_SECONDS)})", f"{cpu:.3f}", there.held(),
        ]  # fmt: skip


# ---- the planner


def planner(workers: int, blocks: int, lost: int, target: float) -> list[str]:
    """One row: CPU seconds of a plan after the loss of a rack."""
    begun = [
        Candidate(Member(f"w{n}", f"i{n:013}", f"10.0.{n >> 8}.{n & 255}:{30000 + n % 9999}"), f"rack{n // RACK}", n)
        for n in range(workers)
    ]
    terms = Terms(workers, blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=4)
    world = plan_start(PlanRequest(terms, 1, Reason.START), begun)
    held = [replace(one, holds=world.shares[rank].keeps, current=every(blocks)) for rank, one in enumerate(begun)]
    left = [one for n, one in enumerate(held) if not 3 * RACK <= n < 3 * RACK + lost]
    gc.disable()  # as in the planner's process
    before = time.process_time()
    plan_recovery(PlanRequest(terms, 2, Reason.KILL), left, world, 7, b"")
    seconds = time.process_time() - before
    gc.enable()
    return [f"{workers:,}", f"{blocks:,}", str(lost), f"{seconds:.3f} ({verdict(seconds, target)})"]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU, memory and latency of a controller with many workers.")
    parser.add_argument("--workers", nargs="+", type=int, default=[250, 500, 1_000])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=4_096)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the steady state is watched")
    parts = ("many", "one", "scrape", "planner")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if "many" in given.parts:
        rows = [asyncio.run(many_jobs(n, given.jobs, given.blocks, given.seconds)) for n in given.workers]
        show("Many jobs at a heartbeat a second", MANY, rows)
    if "one" in given.parts:
        show("One job, a worker killed", ONE, [asyncio.run(one_job(n, given.blocks)) for n in given.workers])
    if "scrape" in given.parts:
        head = ["jobs", "workers", "series", "MB", "wall, s", "CPU s", "held, CPU ms"]
        show("A scrape of /metrics", head, [asyncio.run(scrape(100, 10, given.blocks))])
    if "planner" in given.parts:
        head = ["workers", "blocks", "lost", "CPU s"]
        show("The planner alone", head, [planner(1_000, 65_536, RACK, 0.3), planner(10_000, 65_536, RACK, 2.0)])


if __name__ == "__main__":
    main()
