"""What a lost process of a cell costs: two cells of two, and one process killed at a random instant of a step.

    python benchmarks/cell_recovery.py [--by tensor|context|expert|pipeline] [--size 10M] [--micro-batch 6] [--trials 9]

With a spare beside them, of the coordinate that is killed, there are two cells again in the next step; without one the
cell that is left trains all lanes. As in recovery.py a loss lasts until all that train have committed the first step
of the new world; what is more than a usual step of that world counts, and the ratio is to a step of the old one. Then a
fresh worker joins, and the next trial begins. Target: one step and 0.2 s. A step takes a second of two cores; so it
does by context with `--size 1M --micro-batch 48`, and by pipeline with `--micro-batch 2`.
"""

from __future__ import annotations

import argparse
import random
import signal
from statistics import median
from typing import Any

import model
import train
from cell_step import BY, PROCESSES, initialize
from cluster import Cluster, Job, end_cleanly
from recovery import TARGET_SECONDS, Trial, lose
from tables import Figure, note, show, spread, verdict

CELLS = 2
LANES = 4
"""A config has one at least for each cell that its workers could fill, half ones counted too."""
SPARES = {"with a spare": 1, "without": 0}


def job_of(given: argparse.Namespace, spares: int) -> Job:
    """The workers of the cells and so many besides."""
    return Job(
        size=given.size, workers=CELLS * PROCESSES + spares, processes=PROCESSES, lanes=LANES,
        script="cell_recovery.py", arguments=("--by", given.by, "--micro-batch", str(given.micro_batch)),
    )  # fmt: skip


def trials(given: argparse.Namespace, spares: int) -> list[Trial]:
    """The first loss of the job is among them."""
    instants, found = random.Random(given.size), list[Trial]()
    with Cluster(job_of(given, spares)) as cluster:
        for number in range(given.trials):
            training, workers = cluster.settle(), cluster.workers()
            spare: dict[str, Any] = next((one for one in workers.values() if not one["lanes"]), {})
            victim = next(one for one in training if not spare or workers[one]["coordinate"] == spare["coordinate"])
            left = PROCESSES * (CELLS if spares else CELLS - 1)
            found.append(lose(cluster, victim, signal.SIGKILL, instants.random(), left))
            print(f"{spares} spares, {number + 1}/{given.trials}: {found[-1].sentence}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a lost process of a cell costs.")
    parser.add_argument("--by", choices=BY, default=BY[0])
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--micro-batch", type=int, default=6, help="windows of a lane")
    parser.add_argument("--trials", type=int, default=9, help="losses with a spare, and without")
    parser.add_argument("--spares", nargs="+", type=int, choices=list(SPARES.values()), default=list(SPARES.values()))
    for of_a_worker in ("--lanes", "--mirrors"):
        parser.add_argument(of_a_worker, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lanes:
        train.train(*initialize(given.size, given.lanes, given.mirrors, given.micro_batch, given.by))
        return
    end_cleanly()
    rows = []
    for words, spares in SPARES.items():
        if spares not in given.spares:
            continue
        found = trials(given, spares)
        excess, ratios = [one.excess for one in found], [one.elapsed / one.undisturbed for one in found]
        settings = f"{given.size}, {CELLS} cells of {given.by} {PROCESSES}, {words}"
        measured = "a process of a cell killed: to the next step, beyond a usual one, s"
        note(Figure(measured, settings, excess, TARGET_SECONDS))
        kinds = ([one.undisturbed for one in found], [one.elapsed for one in found], [one.normal for one in found])
        judged = verdict(median(excess), TARGET_SECONDS)
        beyond = spread([one.elapsed - one.undisturbed for one in found])
        rows.append([words, *map(spread, (*kinds, excess)), judged, beyond, spread(ratios, 2)])
    then, before = ["a step then, s", "beyond that, s", ""], ["beyond an undisturbed, s", "of an undisturbed one"]
    head = ["", "undisturbed, s", "to the next step, s", *then, *before]
    show(f"A process of a cell is killed, {given.size}, {CELLS} cells of {given.by} {PROCESSES}", head, rows)


if __name__ == "__main__":
    main()
