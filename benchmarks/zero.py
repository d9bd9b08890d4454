"""Steps of every ZeRO stage against PyTorch's: `python benchmarks/zero.py [--sizes 10M] [--workers 4] [--mirrors 0 1]`.

Workers under a real controller, one lane each; in the same processes rounds of DDP, of DDP with
ZeroRedundancyOptimizer, of FSDP2 (parameters kept between forward and backward, or freed) and of Shoal take turns
(interleaved.py), so a busy machine is busy for all alike. Targets: stage 3 at most 0.80 of FSDP2 that frees with four
workers and 0.85 with two, at most 1.20 of DDP at 10M and 1.00 at 85M. Ratios are medians of the ratios of neighbouring
rounds, and of CPU seconds, which hardly depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import median

import model
from cluster import Cluster, Job, end_cleanly
from ddp import WAYS
from tables import show, spread, verdict

PATIENCE_SECONDS = 1200.0
OF_FSDP2 = {2: 0.85, 4: 0.80}
"""By workers, the most that a step of stage 3 may take of one of FSDP2."""
OF_DDP = {"10M": 1.20, "85M": 1.00}

Rounds = dict[str, list[tuple[float, float]]]
"""By way: (wall, CPU) seconds per step of each round."""


def measure(size: str, workers: int, stage: int, mirrors: int) -> Rounds:
    """One cluster's rounds."""
    arguments = ("--workers", str(workers), "--stage", str(stage), "--beside", *WAYS)
    job = Job(size, workers, workers, mirrors, script="interleaved.py", arguments=arguments)
    with Cluster(job) as cluster:
        (rounds,) = cluster.results(".json", patience=PATIENCE_SECONDS)
    return dict(rounds)


def ratio(rounds: Rounds, way: str, index: int = 0) -> float:
    """Of Shoal's rounds to another way's, each with its neighbour. `index`: 0 for wall time, 1 for CPU time."""
    return median(mine[index] / theirs[index] for mine, theirs in zip(rounds["shoal"], rounds[way], strict=True))


def row(size: str, workers: int, stage: int, mirrors: int) -> list[str]:
    rounds = measure(size, workers, stage, mirrors)
    of_fsdp2, of_ddp = ratio(rounds, "fsdp2 reshard"), ratio(rounds, "ddp")
    targets = [
        verdict(of_fsdp2, OF_FSDP2[workers]) if stage == 3 and workers in OF_FSDP2 else "",
        verdict(of_ddp, OF_DDP[size]) if stage == 3 and size in OF_DDP else "",
    ]
    return [
        size, str(workers), str(stage), str(mirrors), spread([wall for wall, _ in rounds["shoal"]]),
        f"{of_fsdp2:.3f}", targets[0], f"{of_ddp:.3f}", targets[1], f"{ratio(rounds, 'fsdp2'):.3f}",
        f"{ratio(rounds, 'zero'):.3f}", f"{ratio(rounds, 'ddp', 1):.3f}", f"{ratio(rounds, 'fsdp2 reshard', 1):.3f}",
    ]  # fmt: skip


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="Steps of every ZeRO stage.")
    parser.add_argument("--sizes", nargs="+", choices=list(model.SIZES), default=["10M"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stages", nargs="+", type=int, choices=[1, 2, 3], default=[1, 2, 3])
    parser.add_argument("--mirrors", nargs="+", type=int, default=[0, 1])
    given = parser.parse_args()
    head = ["model", "workers", "stage", "mirrors", "step, s", "of FSDP2 that frees", "target", "of DDP", "target"]
    head += ["of FSDP2 that keeps", "of ZeroRedundancyOptimizer", "CPU of DDP", "CPU of FSDP2 that frees"]
    for case in product(given.sizes, given.workers, given.stages, given.mirrors):
        show("Steps by stage", head, [row(*case)])


if __name__ == "__main__":
    main()
