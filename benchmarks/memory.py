"""Bytes of tensors per worker against what the design allows: `python benchmarks/memory.py --sizes 1M 10M`.

Four workers under a real controller, one lane or two each, with 0, 1 and 2 mirrors, ZeRO stages 1 and 2, AdamW in
float32. Allowed: parameters + gradients + subtree stack + optimizer state × (1 + mirrors) / world, and 5% of that; in
stage 2 reduced gradients × (1 + mirrors) / world in place of gradients and stack. The stack of
an aligned run of k lanes is log2(k) gradient copies more. Within a step the buffers of the exchange come on top: at
most what may be in flight, and one piece. `most` has such activations as a line of Python holds in it too; its excess
is shown in MiB and judged by nobody.
"""

from __future__ import annotations

import argparse
import math
import os
from itertools import product
from typing import Any

import model
from cluster import Cluster, Job, end_cleanly
from shoal.exchange.pieces import IN_FLIGHT_BYTES, piece_bytes
from tables import show, verdict

WORKERS = 4
MOST = 1.05
STATE_PER_PARAMETER = 2
"""AdamW's two moments; the parameters are float32, so there are no master weights."""
MIB = 1 << 20
PATIENCE_SECONDS = 300.0


def measure(size: str, lanes: int, mirrors: int, stage: int) -> list[dict[str, Any]]:
    """What every worker said."""
    os.environ["BENCH_WORKERS"] = str(WORKERS)
    arguments = ("--stage", str(stage))
    job = Job(size=size, workers=WORKERS, lanes=lanes, mirrors=mirrors, script="storages.py", arguments=arguments)
    with Cluster(job) as cluster:
        return cluster.results(*(f".{rank}.json" for rank in range(WORKERS)), patience=PATIENCE_SECONDS)


def allowed(parameters: int, lanes: int, mirrors: int, stage: int) -> float:
    """Bytes by the design's formula. In stage 2 reduced gradients are with the state, and with two lanes a worker one
    copy of its shard waits within a step.
    """
    copies = 1 + math.log2(lanes) if stage < 2 else (1 + mirrors) / WORKERS
    return parameters * (1 + copies + STATE_PER_PARAMETER * (1 + mirrors) / WORKERS)


def row(size: str, lanes: int, mirrors: int, stage: int) -> list[str]:
    found = measure(size, lanes, mirrors, stage)
    worst = max(found, key=lambda one: one["rest"])
    formula = allowed(worst["parameters"], worst["lanes"], mirrors, stage)
    ratio = worst["rest"] / formula
    excess = (max(one["most"] for one in found) - formula) / MIB
    peak = (max(one["most_in_step"] for one in found) - MOST * formula) / MIB
    buffers = (IN_FLIGHT_BYTES + piece_bytes(WORKERS)) / MIB
    return [
        size, str(stage), str(worst["lanes"]), str(mirrors), f"{formula / MIB:.1f}", f"{worst['rest'] / MIB:.1f}",
        f"{ratio:.3f}", verdict(ratio, MOST), f"{peak:.1f}", verdict(peak, buffers), f"{excess:.1f}",
    ]  # fmt: skip


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="Bytes of tensors per worker.")
    parser.add_argument("--sizes", nargs="+", choices=list(model.SIZES), default=["1M", "10M"])
    parser.add_argument("--stages", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    given = parser.parse_args()
    cases = product(given.sizes, given.stages, (WORKERS, 2 * WORKERS), (0, 1, 2))
    rows = [row(size, lanes, mirrors, stage) for size, stage, lanes, mirrors in cases]
    head = ["model", "stage", "lanes each", "mirrors", "formula, MiB", "at rest, MiB", "ratio", "target"]
    head += ["peak of a step − 1.05 × formula, MiB", "target", "most − formula, MiB"]
    show(f"Tensor bytes of the worker that holds most, {WORKERS} workers", head, rows)


if __name__ == "__main__":
    main()
