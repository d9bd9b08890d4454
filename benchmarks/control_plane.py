"""What a controller costs: `python benchmarks/control_plane.py`. Simulated workers over real gRPC; `--store etcd` for a
real etcd of three servers in place of the embedded store.

The controller is a process of its own; its CPU seconds count (with those of its children), not the wall, for the
workers are another busy process beside it. Rows: many jobs at a heartbeat a second (CPU, memory, time to a welcome, a
kill of 5%), one large job (CPU of a recovery's stages), a scrape of many jobs' metrics, and the planner alone, with
what the event loop has to do for it (pickling both ways and checking the answer); each for several sizes, so that
growth shows. "held" is the longest that a callback has kept the event loop, in CPU ms.
Writes at rest are counted once the jobs have trained for a minute: before that they write more often what they count.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from controller_process import STORES, Controller, controller
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_change, plan_recovery, plan_start
from shoal_controller.core.planning.question import Question, RecoveryQuestion, check_answer
from shoal_controller.jobs.planner_main import Reply, frame
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import every
from simulated_workers import JobWorkers, start_job
from tables import Figure, note, show, verdict

RACK = 100
KILLED = 0.05
SETTLE_SECONDS = 11.0
"""After a start, until what it brings is done."""
REST_SECONDS = 60.0
"""After a start: what is written from then on is written at rest."""
STEADY_CPU = {"embedded": 0.5, "etcd": 0.7}
STEADY_MB, WELCOME_SECONDS, COMMITTED_SECONDS, FIRST_COMMITS_SECONDS = 500, 0.1, 2.0, 1.0
WRITES_A_MINUTE = 1.0
WELCOMES_SECONDS = 10.0
SCRAPES, SCRAPE_SECONDS, SERIES = 5, 0.5, 42_000

MANY = (
    "workers", "jobs", "start, CPU s", "steady, cores", "held, CPU ms", "MB", "writes a minute and job",
    "welcome p50, s", "p99, s", "5% killed, CPU s", "wall, s", "other core", "held, CPU ms",
)  # fmt: skip
ONE = (
    "workers", "blocks", "start, CPU s", "held, CPU ms", "to a built world, CPU s", "wall, s", "first commits, CPU s",
    "held, CPU ms", "MB",
)  # fmt: skip


async def start_jobs(there: Controller, jobs: int, each: int, blocks: int) -> list[JobWorkers]:
    """One after the other: a job whose workers have not all come in time begins without some, and simulated workers
    carry out no planned change.
    """
    started = []
    for number in range(jobs):
        await there.submit(f"job{number}", each)
        started.append(await start_job(there.grpc, f"job{number}", each, blocks))
    return started


# ---- many jobs


async def many_jobs(workers: int, given: argparse.Namespace) -> list[str]:
    """One row: `workers` in `given.jobs`."""
    jobs = given.jobs
    with controller(given.store) as there:
        began = there.cpu_seconds()
        every_job = await start_jobs(there, jobs, workers // jobs, given.blocks)
        started = there.cpu_seconds() - began
        await asyncio.sleep(given.rest)
        there.held()
        share, writes = await _steady(there, given.seconds)
        steady_held = there.held()
        welcomes = await _welcomes(every_job, WELCOMES_SECONDS)
        there.held()
        killing, took, other = await _kill_some(there, every_job)
        late, memory = welcomes[int(0.99 * len(welcomes))], there.memory_mb()
        await asyncio.gather(*(job.end() for job in every_job))
        where = f"{workers:,} workers in {jobs} jobs, {given.store} store"
        note(
            Figure("a controller at a heartbeat a second, cores", where, [share], STEADY_CPU[given.store]),
            Figure("a controller, MB", where, [memory], STEADY_MB, digits=0),
            Figure("a controller, writes a minute and job", where, [60 * writes / jobs], WRITES_A_MINUTE, digits=2),
            Figure("a controller, a welcome: p99, s", where, [late], WELCOME_SECONDS),
            Figure("a controller, 5% killed: CPU s", where, [killing], COMMITTED_SECONDS, digits=2),
        )
        return [
            str(workers), str(jobs), f"{started:.1f}", f"{share:.3f} ({verdict(share, STEADY_CPU[given.store])})",
            steady_held, f"{memory:.0f} ({verdict(memory, STEADY_MB)})",
            f"{60 * writes / jobs:.2f} ({verdict(60 * writes / jobs, WRITES_A_MINUTE)})",
            f"{welcomes[len(welcomes) // 2]:.3f}", f"{late:.3f} ({verdict(late, WELCOME_SECONDS)})",
            f"{killing:.2f} ({verdict(killing, COMMITTED_SECONDS)})", f"{took:.2f}", f"{other:.2f}", there.held(),
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


async def _kill_some(there: Controller, jobs: list[JobWorkers]) -> tuple[float, float, float]:
    """Kill some workers of every job at once, and wait until all jobs have committed a step without them: the
    controller's CPU seconds, the wall's, and the share of another core that the simulated workers took meanwhile.
    """
    since, before, own = time.monotonic(), there.cpu_seconds(), time.process_time()
    await asyncio.gather(*(job.kill(max(1, round(KILLED * len(job.workers)))) for job in jobs))
    took = max(await asyncio.gather(*(job.until_after(since, job.committed_at) for job in jobs))) - since
    return there.cpu_seconds() - before, took, (time.process_time() - own) / took


# ---- one large job


async def one_job(workers: int, blocks: int, store: str) -> list[str]:
    """One row: CPU seconds of the controller in the stages of a recovery."""
    with controller(store) as there:
        there.held()
        began = there.cpu_seconds()
        (job,) = await start_jobs(there, 1, workers, blocks)
        started, held = there.cpu_seconds() - began, there.held()
        await asyncio.sleep(SETTLE_SECONDS)
        job.holding = True
        before, since = there.cpu_seconds(), time.monotonic()
        await job.kill(1)
        opened = await job.until_after(since, job.opened_at)
        await _until_handled(job)
        built = there.cpu_seconds()
        job.commit(max(job.opened_at))
        await _until_handled(job)
        committed = there.cpu_seconds() - built
        measured, where = "first commits after a recovery, CPU s", f"a job of {workers:,} workers"
        note(Figure(measured, where, [committed], FIRST_COMMITS_SECONDS, digits=2))
        row = [
            str(workers), str(blocks), f"{started:.1f}", held, f"{built - before:.2f}", f"{opened - since:.2f}",
            f"{committed:.2f} ({verdict(committed, FIRST_COMMITS_SECONDS)})", there.held(), f"{there.memory_mb():.0f}",
        ]  # fmt: skip
        await job.end()
        return row


async def _until_handled(job: JobWorkers) -> None:
    """Returns when what the workers have said is handled: a new hello comes after it in the inbox."""
    await next(iter(job.workers.values())).connect()


# ---- a scrape


async def scrape(jobs: int, each: int, blocks: int, store: str) -> list[str]:
    """One row: what Prometheus is given of many jobs that train."""
    with controller(store) as there:
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


PLANNER = [
    "workers", "blocks", "lost", "CPU s of the loss", "of the event loop for it", "of the change after its fills",
    "of a join",
]  # fmt: skip
PLANNER_SIZES = ((100, 65_536), (300, 65_536), (1_000, 4_096), (1_000, 16_384), (1_000, 65_536), (3_000, 65_536),
                 (10_000, 65_536))  # fmt: skip
PLANNER_SECONDS = {(1_000, 65_536): 0.3, (10_000, 65_536): 2.0}


def planner(workers: int, blocks: int) -> list[str]:
    """One row: CPU seconds of the plans after the loss of a rack (a tenth of all, at most 100), and of a join."""
    lost, terms = min(RACK, workers // 10), Terms(workers, blocks, 1, 4, fill_blocks_per_step=4)
    begun = [_candidate(n, lost) for n in range(workers)]
    world = plan_start(PlanRequest(terms, 1, Reason.START), begun)
    held = filled(world, begun)
    left = [replace(one, current=every(blocks)) for one in (*held[:lost], *held[2 * lost :])]
    asked = RecoveryQuestion(PlanRequest(terms, 2, Reason.KILL), tuple(left), world, 7, b"")
    loss, after = _seconds(lambda: plan_recovery(asked.request, asked.candidates, world, 7, b""))
    beside = _loop_seconds(asked, after)
    ready, joining = filled(after, left), [*held, _candidate(workers, lost)]
    change, _ = _seconds(lambda: plan_change(PlanRequest(terms, 3, Reason.BALANCE), ready, after))
    join, _ = _seconds(lambda: plan_change(PlanRequest(terms, 2, Reason.JOIN), joining, world))
    target = PLANNER_SECONDS.get((workers, blocks))
    if target:
        note(Figure("the planner after a loss, CPU s", f"{workers:,} workers, {blocks:,} blocks", [loss], target))
    judged = f"{loss:.3f} ({verdict(loss, target)})" if target else f"{loss:.3f}"
    return [f"{workers:,}", f"{blocks:,}", str(lost), judged, f"{beside:.3f}", f"{change:.3f}", f"{join:.3f}"]


def _candidate(n: int, rack: int) -> Candidate:
    return Candidate(Member(f"w{n}", f"i{n:013}", f"10.0.{n >> 8}.{n & 255}:{30000 + n % 9999}"), f"rack{n // rack}", n)


def filled(world: Plan, members: Sequence[Candidate]) -> list[Candidate]:
    """Those of the world, with all that it keeps for them and fills."""
    known = {one.member: one for one in members}
    holds = [*map(world.kept_by, world.ranks)]
    for fill in world.fills:
        holds[fill.target] |= fill.blocks
    return [replace(known[member], holds=blocks) for member, blocks in zip(world.members, holds, strict=True)]


def _loop_seconds(question: Question, plan: Plan) -> float:
    """CPU seconds that a question and its answer take of the event loop, where another process answers."""
    data = pickle.dumps(Reply(plan), protocol=5)
    before = time.process_time()
    frame(question)
    check_answer(question, pickle.loads(data).answer)
    return time.process_time() - before


def _seconds(plan: Callable[[], Plan]) -> tuple[float, Plan]:
    """CPU seconds, without the garbage collector, as in the planner's process."""
    gc.disable()
    before = time.process_time()
    made = plan()
    seconds = time.process_time() - before
    gc.enable()
    return seconds, made


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU, memory and latency of a controller with many workers.")
    parser.add_argument("--workers", nargs="+", type=int, default=[250, 500, 1_000])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=4_096)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the steady state is watched")
    parser.add_argument("--rest", type=float, default=REST_SECONDS, help="how long jobs train before that")
    parser.add_argument("--store", choices=STORES, default=STORES[0])
    parts = ("many", "one", "scrape", "planner")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    os.environ["OMP_NUM_THREADS"] = "1"
    asyncio.run(measure(parser.parse_args()))  # gRPC's poller knows one event loop


async def measure(given: argparse.Namespace) -> None:
    if "many" in given.parts:
        rows = [await many_jobs(n, given) for n in given.workers]
        show(f"Many jobs at a heartbeat a second, {given.store} store", MANY, rows)
    if "one" in given.parts:
        show("One job, a worker killed", ONE, [await one_job(n, given.blocks, given.store) for n in given.workers])
    if "scrape" in given.parts:
        head = ["jobs", "workers", "series", "MB", "wall, s", "CPU s", "held, CPU ms"]
        show("A scrape of /metrics", head, [await scrape(100, 10, given.blocks, given.store)])
    if "planner" in given.parts:
        show("The planner alone", PLANNER, [planner(workers, blocks) for workers, blocks in PLANNER_SIZES])


if __name__ == "__main__":
    main()
