"""A step with Muon: `python benchmarks/muon.py [--size 10M] [--workers 2 4]`.

Muon trains the matrices of the layers, AdamW the rest. Two clusters take turns (turns.py), one with Muon and one with
AdamW alone; in the processes of the first, rounds of DDP with torch's Muon, which computes every direction on every
worker, take turns with Shoal's (interleaved.py). In those of the second, each worker computes its part of one
Newton-Schulz pass over all matrices in its turn, at the same time as the others: where processors share a matrix unit,
two at once take up to twice the CPU seconds of one alone. CPU seconds are those of all workers together.

Targets: 1.15 of a step with AdamW and such a pass, and less than DDP with Muon.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import model
from cluster import Cluster, Job, end_cleanly
from ddp import NEWTON_SCHULZ
from tables import show, spread, verdict
from turns import Turns

PATIENCE_SECONDS = 1200.0
TARGET, TARGET_OF_DDP = 1.15, 1.0
BESIDE = {"adamw": NEWTON_SCHULZ, "muon": "ddp muon"}

Rounds = dict[str, list[tuple[float, float, float]]]
"""By way: (wall seconds, CPU seconds, bytes) per step of each round."""


def measure(size: str, workers: int, rounds: int) -> dict[str, Rounds]:
    """By optimizer."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        clusters = {}
        for number, (name, beside) in enumerate(BESIDE.items()):
            given = ("--workers", str(workers), "--optimizer", name, "--beside", beside, "--rounds", str(rounds))
            arguments = (*given, "--turns", str(Turns(folder, number, len(BESIDE))))
            job = Job(size=size, workers=workers, lanes=workers, script="interleaved.py", arguments=arguments)
            clusters[name] = stack.enter_context(Cluster(job))
        return {name: dict(*one.results(".json", patience=PATIENCE_SECONDS)) for name, one in clusters.items()}


def rows(size: str, workers: int, rounds: int) -> list[list[str]]:
    """One world's."""
    found = measure(size, workers, rounds)

    def figures(optimizer: str, way: str) -> tuple[list[float], list[float]]:
        of = found[optimizer][way]
        return [one[0] for one in of], [one[1] for one in of]

    muon, adamw, ddp = figures("muon", "shoal"), figures("adamw", "shoal"), figures("muon", "ddp muon")
    a_pass = figures("adamw", NEWTON_SCHULZ)
    of_adamw = median(muon[1]) / (median(adamw[1]) + median(a_pass[1]))
    of_ddp = [median(mine) / median(theirs) for mine, theirs in zip(muon, ddp, strict=True)]
    return [
        [f"AdamW, {workers} workers", spread(adamw[0]), spread(adamw[1]), ""],
        [f"a pass of Newton-Schulz, {workers} workers", spread(a_pass[0]), spread(a_pass[1]), ""],
        [f"DDP with Muon, {workers} workers", spread(ddp[0]), spread(ddp[1]), ""],
        [
            f"Muon and AdamW, {workers} workers", spread(muon[0]), spread(muon[1]),
            f"CPU of AdamW's and a pass: {of_adamw:.3f}, {verdict(of_adamw, TARGET)}; "
            f"of DDP with Muon: step {of_ddp[0]:.3f}, CPU {of_ddp[1]:.3f}, {verdict(of_ddp[1], TARGET_OF_DDP)}",
        ],
    ]  # fmt: skip


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="Steps with Muon.")
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    found = [row for workers in given.workers for row in rows(given.size, workers, given.rounds)]
    show(f"A step with Muon, {given.size}", ["", "step, s", "CPU of all, s", "target"], found)


if __name__ == "__main__":
    main()
