"""A step on real links beside DDP: `python benchmarks/wire.py`. Needs root, `ip`, `tc` and `nft`.

Each host is a network namespace of its own, whose link is shaped in both directions; the model hardly computes
(wire_rounds.py), and rounds of DDP and of Shoal take turns in the same processes. So what is compared is how well the
links are used. Of the ratio of medians and the median of the ratios of neighbouring rounds the larger one is judged.
Targets: 1.10 of DDP with mirrors off, 1.15 with one mirror. A host sends 2 (n − 1) / n of the parameters in each way,
with a worker on each host: DDP's ring, and Shoal's partial sums, mirrored gradients and hand-out. With several on a
host DDP's ring still sends that, over one edge.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from cluster import Cluster, Hosts, Job, end_cleanly
from tables import show, spread, verdict

TARGETS = {0: 1.10, 1: 1.15}
PATIENCE_SECONDS = 600.0
QUEUE = "burst 128kb latency 100ms"
CASES = {"4": (4, 1, 20, 400), "8": (8, 1, 24, 1_000), "2": (2, 1, 20, 400), "2x2": (4, 2, 20, 400)}
"""Workers, workers on a host, million parameters, Mbit/s."""
BYTES_PER_LAYER = 4 * 1_000_000
MB = 1_000_000

Rounds = dict[str, list[tuple[float, float, float]]]
"""By way: (wall seconds, CPU seconds, bytes sent by the host that sends most) per step of each round."""


def traffic_seconds(case: str) -> float:
    """What a host's bytes of a step take on its link, one way."""
    workers, _, layers, megabit = CASES[case]
    return 2 * (workers - 1) / workers * layers * BYTES_PER_LAYER * 8 / (megabit * MB)


def measure(case: str, mirrors: int, shaped: bool, computes: float) -> Rounds:
    """One cluster's rounds. `computes`: of the time of the traffic."""
    workers, on_a_host, layers, megabit = CASES[case]
    with Hosts(workers // on_a_host) as hosts:
        if shaped:
            for host in range(1, workers // on_a_host + 1):
                hosts.shape(host, 1_000 * megabit, QUEUE)
        job = Job(
            workers=workers, lanes=workers, mirrors=mirrors, workers_per_host=on_a_host, script="wire_rounds.py",
            arguments=("--layers", str(layers), "--computes", str(computes * traffic_seconds(case))),
        )  # fmt: skip
        with Cluster(job, hosts) as cluster:
            return dict(*cluster.results(".json", patience=PATIENCE_SECONDS))


def row(case: str, mirrors: int, rounds: Rounds, way: str) -> list[str]:
    workers, on_a_host, layers, megabit = CASES[case]
    wall, processor, sent = ([one[i] for one in rounds[way]] for i in (0, 1, 2))
    beside = [one[0] for one in rounds["ddp"]]
    formula = 2 * (workers - 1) / workers * layers * BYTES_PER_LAYER
    ratios = [median(wall) / median(beside), median(mine / theirs for mine, theirs in zip(wall, beside, strict=True))]
    name = f"{way}, {workers} workers on {workers // on_a_host} hosts, {megabit} Mbit/s, mirrors {mirrors}"
    bytes_of_formula = f"{median(sent) / MB:.0f} ({median(sent) / formula:.3f})"
    judged = verdict(max(ratios), TARGETS[mirrors]) if way == "shoal" else ""
    shown = [f"{ratio:.3f}" for ratio in ratios]
    return [name, spread(wall), *shown, f"{median(processor):.3f}", bytes_of_formula, judged]


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="A step on shaped links beside DDP.")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--mirrors", nargs="+", type=int, choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--unshaped", action="store_true", help="leave the links as fast as they are")
    parser.add_argument("--computes", type=float, default=0.0, metavar="SHARE",
                        help="each layer takes time besides, all of them this share of their traffic's")  # fmt: skip
    given = parser.parse_args()
    if not Hosts.can_be_had():
        sys.exit("wire.py needs network namespaces: root, and the commands ip, tc and nft.")
    rows = []
    for case in given.cases:
        for mirrors in given.mirrors:
            rounds = measure(case, mirrors, not given.unshaped, given.computes)
            rows += [row(case, mirrors, rounds, way) for way in rounds]
    head = ["", "step, s", "of DDP", "neighbours", "CPU, s", "MB sent (of the formula)", "target"]
    show("A step on shaped links", head, rows)


if __name__ == "__main__":
    main()
