"""A step of several lanes, and the fixed cost of a step: `python benchmarks/step_time.py [--only lanes|tiny]`.

Workers under a real controller; in the same processes rounds of DDP with bucket views, of DDP with PyTorch's
ZeroRedundancyOptimizer and of Shoal take turns (interleaved.py), and DDP alone runs in processes of its own, without
Shoal's threads (ddp.py). `lanes`: four workers, two lanes each, against accumulation under `no_sync`. `tiny`: the
smallest model with 2, 4 and 8 workers; target: 1.5 ms of CPU a worker more than DDP. The ratios are of medians and,
beside them, medians of the ratios of neighbouring rounds. CPU seconds do not depend on how busy the machine is. Steps
of one lane a worker, with mirrors and without, are in zero.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import model
from cluster import Cluster, Job, end_cleanly
from ddp import STEPS
from tables import Figure, note, show, spread, verdict

WORKERS = 4
TINY_TARGET_MS = 1.5
TINY_STEPS = 40
"""Of a round: three would take a fiftieth of a second, in which one interruption counts for half."""
PATIENCE_SECONDS = 900.0

Rounds = dict[str, list[tuple[float, ...]]]
"""By way: (wall, CPU) seconds per step of each round, and what else is measured."""


def measure(size: str, mirrors: int, workers: int = WORKERS, lanes: int = WORKERS, steps: int = STEPS) -> Rounds:
    """One cluster's rounds of so many steps, and those of DDP alone before and after."""
    before = alone(size, workers, lanes, steps)
    job = Job(
        size=size, workers=workers, lanes=lanes, mirrors=mirrors, script="interleaved.py",
        arguments=("--workers", str(workers), "--steps", str(steps)),
    )  # fmt: skip
    with Cluster(job) as cluster:
        rounds: Rounds = dict(*cluster.results(".json", patience=PATIENCE_SECONDS))
    return {**rounds, "ddp alone": before + alone(size, workers, lanes, steps)}


def alone(size: str, workers: int, lanes: int, steps: int) -> list[tuple[float, ...]]:
    """DDP in processes of its own."""
    command = [sys.executable, str(Path(__file__).with_name("ddp.py")), "--size", size]
    command += ["--workers", str(workers), "--lanes", str(lanes), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, check=True, text=True, timeout=PATIENCE_SECONDS
    )
    return [(wall, processor) for wall, processor in json.loads(done.stdout.splitlines()[-1])]


def row(name: str, rounds: Rounds, way: str) -> list[str]:
    """One way's figures beside DDP's."""
    wall, processor = ([one[i] for one in rounds[way]] for i in (0, 1))
    beside, beside_processor = ([one[i] for one in rounds["ddp"]] for i in (0, 1))
    ratio = median(wall) / median(beside)
    pairs = zip(wall, beside, strict=True) if way != "ddp alone" else ()
    neighbours = [mine / theirs for mine, theirs in pairs]
    return [
        f"{way}, {name}", spread(wall), f"{ratio:.3f}", f"{median(neighbours):.3f}" if neighbours else "–",
        f"{median(processor) / median(beside_processor):.3f}",
    ]  # fmt: skip


HEAD = ["", "step, s", "of DDP", "neighbours", "CPU of DDP"]


def show_lanes(size: str) -> None:
    rounds = measure(size, 1, lanes=2 * WORKERS)
    rows = [row("2 lanes a worker, mirrors 1", rounds, way) for way in rounds]
    show(f"Several lanes, {size} parameters, {WORKERS} workers", HEAD, rows)


def show_tiny(worlds: Sequence[int], mirrors: int) -> None:
    rows = []
    for workers in worlds:
        rounds = measure("tiny", mirrors, workers, workers, steps=TINY_STEPS)
        more = {
            way: 1e3 * (median(one[1] for one in rounds[way]) - median(one[1] for one in rounds["ddp"])) / workers
            for way in rounds
        }
        measured, where = "the fixed cost of a step, CPU ms a worker beyond DDP's", f"tiny, {workers} workers"
        note(Figure(measured, where, [more["shoal"]], TINY_TARGET_MS, mirrors))
        rows += [
            [f"{way}, {workers} workers", spread([1e3 * one[0] for one in rounds[way]], 1), f"{extra:.2f}",
             verdict(extra, TINY_TARGET_MS) if way == "shoal" else ""]
            for way, extra in more.items()
        ]  # fmt: skip
    show(f"The fixed cost of a step, mirrors {mirrors}", ["", "step, ms", "CPU ms a worker over DDP", "target"], rows)


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--only", choices=["lanes", "tiny"])
    parser.add_argument("--tiny-workers", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--tiny-mirrors", type=int, default=1)
    given = parser.parse_args()
    if given.only in (None, "lanes"):
        show_lanes(given.size)
    if given.only in (None, "tiny"):
        show_tiny(given.tiny_workers, given.tiny_mirrors)


if __name__ == "__main__":
    main()
