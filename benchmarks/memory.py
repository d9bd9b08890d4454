"""Bytes of tensors per worker against what the design allows: `python benchmarks/memory.py --sizes 10M --workers 2 4`.

Workers under a real controller, AdamW in float32, beside FSDP2 that frees parameters, in processes of its own. One
counter for both: the allocator's (tensor_bytes.py), so every tensor counts from its first moment to its last.
Allowed: what `shoal estimate` says (docs/memory.md), and 5 % of that; at the peak of a step the activations come on
top, as a plain model has them. The formula adds up what need not be there at one time, so a peak may be far below it.
In stage 3 without mirrors the peak is at most that of FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import model
from cluster import Cluster, Job, end_cleanly
from shoal_protos.memory_estimate import MemoryEstimate, MemorySetup, estimate
from tables import show, verdict
from tensor_bytes import preloaded

MOST = 1.05
FLOAT32_BYTES = 4
MIB = 1 << 20
PATIENCE_SECONDS = 300.0
HERE = Path(__file__).resolve().parent


def measure(size: str, workers: int, stage: int, lanes: int, mirrors: int) -> list[dict[str, Any]]:
    """What every worker said. `lanes`: of the job."""
    arguments = ("--stage", str(stage), "--workers", str(workers))
    job = Job(size=size, workers=workers, lanes=lanes, mirrors=mirrors, script="storages.py", arguments=arguments)
    with Cluster(job) as cluster:
        return cluster.results(*(f".{rank}.json" for rank in range(workers)), patience=PATIENCE_SECONDS)


@cache
def fsdp2(size: str, workers: int, lanes: int) -> dict[str, int]:
    """What its worker that holds most said."""
    command = [sys.executable, str(HERE / "peer_bytes.py"), "--size", size, "--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--lanes", str(lanes)], env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def allowed(worst: dict[str, int], workers: int, stage: int, lanes: int, mirrors: int) -> MemoryEstimate:
    """By the design's formula."""
    parameters = worst["parameters"] // FLOAT32_BYTES
    return estimate(MemorySetup(parameters, workers, stage, lanes, mirrors, unit=worst["unit"]))


def row(size: str, workers: int, stage: int, lanes_each: int, mirrors: int) -> list[str]:
    lanes = workers * lanes_each
    found = measure(size, workers, stage, lanes, mirrors)
    worst = {key: max(one[key] for one in found) for key in found[0]}
    formula = allowed(worst, workers, stage, lanes, mirrors)
    rest = worst["rest"] / formula.at_rest("device")
    peak = (worst["most"] - worst["activations"]) / formula.at_most("device")
    theirs = fsdp2(size, workers, lanes)
    of_fsdp2 = worst["most"] / theirs["most"]
    in_mib = [formula.at_rest("device"), worst["rest"], theirs["rest"], worst["most"], theirs["most"]]
    return [
        size, str(workers), str(stage), str(lanes_each), str(mirrors), *(f"{one / MIB:.1f}" for one in in_mib),
        f"{rest:.3f}", verdict(rest, MOST), f"{peak:.3f}", verdict(peak, MOST),
        f"{of_fsdp2:.3f}", verdict(of_fsdp2, 1.0) if stage == 3 and not mirrors else "",
    ]  # fmt: skip


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="Bytes of tensors per worker.")
    parser.add_argument("--sizes", nargs="+", choices=list(model.SIZES), default=["10M"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stages", nargs="+", type=int, choices=[1, 2, 3], default=[1, 2, 3])
    parser.add_argument("--lanes-each", nargs="+", type=int, default=[1])
    parser.add_argument("--mirrors", nargs="+", type=int, default=[0, 1])
    given = parser.parse_args()
    head = ["model", "workers", "stage", "lanes each", "mirrors", "formula, MiB", "at rest", "FSDP2 at rest"]
    head += ["peak", "FSDP2's peak", "at rest of formula", "target", "peak − activations of formula", "target"]
    head += ["peak of FSDP2's", "target"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(preloaded(Path(folder)))
        for case in product(given.sizes, given.workers, given.stages, given.lanes_each, given.mirrors):
            rows.append(row(*case))
            print(rows[-1], flush=True)
    show("Tensor bytes of the worker that holds most", head, rows)


if __name__ == "__main__":
    main()
