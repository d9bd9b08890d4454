"""`python -m tests.simulation.run`: many seeds, larger worlds, or one seed again with its event log."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from site import addsitedir

from shoal_protos.plan import Reason

from .seeds import rage_and_calm, run
from .simulation import Simulation
from .watch import Violation

ROOT = str(Path(__file__).resolve().parents[2])
"""Where fresh processes find this package."""

Task = tuple[int, dict[str, object]]
Outcome = tuple[int, str, Counter[str]]


def attempt(task: Task) -> Outcome:
    """One seed: its number, the violation (empty: none), and what happened."""
    seed, shape = task
    try:
        simulation = run(seed, **shape)
    except Violation as violation:
        return seed, violation.sentence, Counter(seeds=1)
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", Counter(seeds=1)
    durable = simulation.host.job.durable
    happened: Counter[str] = Counter(seeds=1, steps=simulation.watch.commits, worlds=len(simulation.watch.began_at))
    happened[f"ended {durable.phase.value}" if durable.phase.is_over else "still training"] += 1
    happened[f"of stage {simulation.stage}"] += 1
    happened[f"of cells of {simulation.cell}"] += 1
    happened["ended by its scripts"] += durable.ends_at > 0
    happened["bad scripts"] += bool(simulation.script.kind)
    happened["with spares"] += simulation.spec.spares > 0
    happened["of several speeds"] += simulation.speeds.are_known
    happened["lanes shared anew"] += simulation.speeds.changes
    happened["without lanes for their speed"] += simulation.speeds.idle
    happened["faults"] += getattr(simulation, "faults", 0)
    happened["disasters"] += getattr(simulation, "disasters", 0)
    happened["put back"] += simulation.put_back
    happened["faults of pods"] += getattr(simulation, "pod_faults", 0)
    happened["started anew"] += durable.first_valid_generation > 0
    happened["checkpoints"] += simulation.checkpoints.made
    happened["from a checkpoint"] += sum(
        bool(plan.recovery and plan.recovery.checkpoint) for plan in simulation.watch.opened.values()
    )
    happened["all went back"] += sum(plan.reason is Reason.RESTORE for plan in simulation.watch.opened.values())
    happened["damaged"] += len(durable.unreadable_checkpoints)
    happened["believed at once"] += simulation.watch.believed_beside
    happened["links down"] += simulation.links.cuts
    happened["separated"] += simulation.links.separated
    happened["stuck code ended"] += simulation.links.ended
    happened["planner answers"] += simulation.planner.answered
    happened["planner deaths"] += simulation.planner.deaths
    happened["planner answers lost"] += simulation.planner.dropped
    happened["planner answers wrong"] += simulation.planner.wrong
    happened["failed saves"] += simulation.checkpoints.failed
    happened["final drains"] += simulation.checkpoints.final_drains
    return seed, "", happened


@contextmanager
def children(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes that run seeds. Whoever waits for one that has died gets `BrokenProcessPool` at once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=addsitedir, initargs=(ROOT,)) as pool:
        list(pool.map(abs, range(processes)))  # all are there when it is handed out
        yield pool


def many(
    pool: ProcessPoolExecutor, first: int, count: int, shape: dict[str, object]
) -> tuple[list[tuple[int, str]], Counter[str]]:
    """The violations of `count` seeds, and what happened in all of them."""
    return gather(pool.map(attempt, tasks(first, count, shape), chunksize=8))


def tasks(first: int, count: int, shape: dict[str, object]) -> list[Task]:
    return [(seed, shape) for seed in range(first, first + count)]


def gather(outcomes: Iterable[Outcome]) -> tuple[list[tuple[int, str]], Counter[str]]:
    bad: list[tuple[int, str]] = []
    total: Counter[str] = Counter()
    for seed, violation, happened in outcomes:
        total.update(happened)
        if violation:
            bad.append((seed, violation))
    return bad, total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, help="at most so many workers (default 6)")
    parser.add_argument("--blocks", type=int, help="so many blocks (default: up to 64, drawn)")
    parser.add_argument(
        "--launcher", choices=["local", "none", "kubernetes"], help="of all seeds (default: drawn of two)"
    )
    parser.add_argument(
        "--cell", choices=["2", "2x2", "2x2 tight", "drawn"], help="so many processes train a lane (default: one)"
    )
    parser.add_argument("--together", type=int, help="so many processes are started together, as those of a pod")
    parser.add_argument("--processes", type=int, default=2, help="how many seeds at a time")
    parser.add_argument("--replay", type=int, help="run this one seed and print its event log")
    given = parser.parse_args()
    shape = {
        name: value
        for name in ("workers", "blocks", "launcher", "cell", "together")
        if (value := getattr(given, name)) is not None
    }
    if given.replay is not None:
        return replay(given.replay, shape)
    began = time.perf_counter()
    with children(given.processes) as pool:
        bad, total = many(pool, given.first, given.seeds, shape)
    for seed, violation in sorted(bad)[:20]:
        print(f"seed {seed}: {violation[:300]}")
    print(f"{len(bad)} of {given.seeds} seeds broke an invariant; {time.perf_counter() - began:.0f} s; {dict(total)}")
    return 1 if bad else 0


def replay(seed: int, shape: dict[str, object]) -> int:
    log = replay_log(seed, **shape)
    print(log)
    return 1 if "VIOLATION" in log else 0


def replay_log(seed: int, **shape: object) -> str:
    """The event log of a seed."""
    simulation = Simulation(seed, **shape)
    try:
        rage_and_calm(simulation)
    except Violation:
        pass  # it is in the log
    except Exception:
        simulation.say("VIOLATION", traceback.format_exc())
    return "\n".join(simulation.log)


if __name__ == "__main__":
    sys.exit(main())
