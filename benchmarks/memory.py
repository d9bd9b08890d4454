"""Bytes of tensors per worker against what the design allows: `python benchmarks/memory.py --sizes 1M 10M`.

Four workers under a real controller, one lane or two each, with 0, 1 and 2 mirrors, ZeRO stages 1 and 2, AdamW in
float32. Allowed: what `shoal estimate` says (docs/memory.md), and 5% of that. Within a step the buffers of the exchange
come on top: at most what may be in flight, and one piece. `most` has such activations as a line of Python holds in it
too; its excess is shown in MiB and judged by nobody.
"""

from __future__ import annotations

import argparse
import os
from itertools import product
from typing import Any

import model
from cluster import Cluster, Job, end_cleanly
from shoal.exchange.pieces import IN_FLIGHT_BYTES, piece_bytes
from shoal_protos.memory_estimate import MemorySetup, estimate
from tables import show, verdict

WORKERS = 4
MOST = 1.05
FLOAT32_BYTES = 4
MIB = 1 << 20
PATIENCE_SECONDS = 300.0


def measure(size: str, lanes: int, mirrors: int, stage: int) -> list[dict[str, Any]]:
    """What every worker said."""
    os.environ["BENCH_WORKERS"] = str(WORKERS)
    arguments = ("--stage", str(stage))
    job = Job(size=size, workers=WORKERS, lanes=lanes, mirrors=mirrors, script="storages.py", arguments=arguments)
    with Cluster(job) as cluster:
        return cluster.results(*(f".{rank}.json" for rank in range(WORKERS)), patience=PATIENCE_SECONDS)


def allowed(parameters: int, lanes: int, mirrors: int, stage: int) -> int:
    """Bytes by the design's formula. `parameters`: their bytes. `lanes`: of the job."""
    setup = MemorySetup(parameters // FLOAT32_BYTES, WORKERS, stage=stage, lanes=lanes, mirrors=mirrors)
    return estimate(setup).at_rest("device")


def row(size: str, lanes: int, mirrors: int, stage: int) -> list[str]:
    found = measure(size, lanes, mirrors, stage)
    worst = max(found, key=lambda one: one["rest"])
    formula = allowed(worst["parameters"], lanes, mirrors, stage)
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
