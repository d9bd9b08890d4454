"""A step's time against DDP: `python benchmarks/step_time.py [--size 10M]`.

Four workers under a real controller; in the same processes rounds of DDP with bucket views, of DDP with PyTorch's
ZeroRedundancyOptimizer and of Shoal take turns (interleaved.py). Targets: 1.05 of DDP with mirrors off, 1.15 with
mirrors on. The ratios are of medians and, beside them, medians of the ratios of neighbouring rounds; CPU seconds do
not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
from statistics import median

import model
from cluster import Cluster, Job
from tables import show, spread, verdict

WORKERS = 4
TARGETS = {0: 1.05, 1: 1.15}
PATIENCE_SECONDS = 900.0

Rounds = dict[str, list[tuple[float, float]]]
"""By way: (wall, CPU) seconds per step of each round."""


def measure(size: str, mirrors: int) -> Rounds:
    """One cluster's rounds."""
    with Cluster(Job(size=size, workers=WORKERS, lanes=WORKERS, mirrors=mirrors, script="interleaved.py")) as cluster:
        return dict(*cluster.results(".json", patience=PATIENCE_SECONDS))


def row(mirrors: int, rounds: Rounds, way: str) -> list[str]:
    """One way's figures beside DDP's."""
    wall, processor = ([one[i] for one in rounds[way]] for i in (0, 1))
    beside, beside_processor = ([one[i] for one in rounds["ddp"]] for i in (0, 1))
    ratio = median(wall) / median(beside)
    neighbours = median(mine / theirs for mine, theirs in zip(wall, beside, strict=True))
    judged = verdict(ratio, TARGETS[mirrors]) if way == "shoal" else ""
    work = f"{median(processor) / median(beside_processor):.3f}"
    return [f"{way}, mirrors {mirrors}", spread(wall), f"{ratio:.3f}", f"{neighbours:.3f}", work, judged]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    size = parser.parse_args().size
    rows = []
    for mirrors in TARGETS:
        rounds = measure(size, mirrors)
        rows += [row(mirrors, rounds, way) for way in rounds]
    head = ["", "step, s", "of DDP", "neighbours", "CPU of DDP", "target"]
    show(f"Step time, {size} parameters, {WORKERS} workers", head, rows)


if __name__ == "__main__":
    main()
