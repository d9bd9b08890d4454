"""Bytes of tensors per worker against what the design allows: `python benchmarks/memory.py --sizes 10M --workers 2 4`.

Workers under a real controller, AdamW in float32, beside FSDP2 that frees parameters, in processes of its own. One
counter for both: the allocator's (tensor_bytes.py), so every tensor counts from its first moment to its last.
Allowed: what `shoal estimate` says (docs/memory.md), and 5 % of that; at the peak of a step the activations come on
top, as a plain model has them. The formula adds up what need not be there at one time, so a peak may be far below it.
In stage 3 without mirrors the peak is at most that of FSDP2. Noted for README.md: what a mirror costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import model
from cluster import Cluster, Job, end_cleanly
from shoal_protos.memory_estimate import MemoryEstimate, MemorySetup, estimate
from tables import Cell, Figure, note, show, verdict
from tensor_bytes import preloaded

MOST = 1.05
FLOAT32_BYTES = 4
MIB = 1 << 20
PATIENCE_SECONDS = 300.0
HERE = Path(__file__).resolve().parent
FSDP2 = "fsdp2 reshard"
PEERS = {"ddp": "DDP", FSDP2: "FSDP2"}
"""Ways of ddp.py that the price of a copy is told beside, and their names there."""


def measure(size: str, workers: int, stage: int, lanes: int, mirrors: int) -> list[dict[str, Any]]:
    """What every worker said. `lanes`: of the job."""
    arguments = ("--stage", str(stage), "--workers", str(workers))
    job = Job(size=size, workers=workers, lanes=lanes, mirrors=mirrors, script="storages.py", arguments=arguments)
    with Cluster(job) as cluster:
        return cluster.results(*(f".{rank}.json" for rank in range(workers)), patience=PATIENCE_SECONDS)


@cache
def peer(way: str, size: str, workers: int, lanes: int) -> dict[str, int]:
    """What the worker that holds most of one of PyTorch's ways said."""
    command = [sys.executable, str(HERE / "peer_bytes.py"), "--way", way, "--size", size, "--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--lanes", str(lanes)], env=environment, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_SECONDS
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True)
class Found:
    """Bytes of the worker that holds most, and what they are compared with."""

    size: str
    workers: int
    stage: int
    lanes_each: int
    mirrors: int
    worst: dict[str, int]

    @property
    def formula(self) -> MemoryEstimate:
        """By the design."""
        parameters, lanes = self.worst["parameters"] // FLOAT32_BYTES, self.workers * self.lanes_each
        return estimate(MemorySetup(parameters, self.workers, self.stage, lanes, self.mirrors, unit=self.worst["unit"]))

    @property
    def fsdp2(self) -> dict[str, int]:
        return peer(FSDP2, self.size, self.workers, self.workers * self.lanes_each)

    @property
    def rest(self) -> float:
        """At rest, of the formula."""
        return self.worst["rest"] / self.formula.at_rest("device")

    @property
    def peak(self) -> float:
        """Of a step without its activations, of the formula."""
        return (self.worst["most"] - self.worst["activations"]) / self.formula.at_most("device")

    @property
    def of_fsdp2(self) -> float:
        """The peak of a step, of FSDP2's."""
        return self.worst["most"] / self.fsdp2["most"]

    @property
    def most_of_fsdp2(self) -> float | None:
        return 1.0 if self.stage == 3 and not self.mirrors else None


def found(size: str, workers: int, stage: int, lanes_each: int, mirrors: int) -> Found:
    of_workers = measure(size, workers, stage, workers * lanes_each, mirrors)
    worst = {key: max(one[key] for one in of_workers) for key in of_workers[0]}
    return Found(size, workers, stage, lanes_each, mirrors, worst)


def row(one: Found) -> list[str]:
    case = (one.size, one.workers, one.stage, one.lanes_each, one.mirrors)
    worst, theirs = one.worst, one.fsdp2
    in_mib = [one.formula.at_rest("device"), worst["rest"], theirs["rest"], worst["most"], theirs["most"]]
    return [
        *map(str, case), *(f"{each / MIB:.1f}" for each in in_mib),
        f"{one.rest:.3f}", verdict(one.rest, MOST), f"{one.peak:.3f}", verdict(one.peak, MOST),
        f"{one.of_fsdp2:.3f}", verdict(one.of_fsdp2, one.most_of_fsdp2) if one.most_of_fsdp2 else "",
    ]  # fmt: skip


def note_targets(every: list[Found]) -> None:
    """What README.md judges."""
    settings = f"{len(every)} settings of workers, stages and mirrors"
    note(
        Figure("tensor bytes at rest, of the estimate: the most", settings, [max(one.rest for one in every)], MOST),
        Figure("the same at the peak, without activations", settings, [max(one.peak for one in every)], MOST),
    )
    for one in every:
        if one.stage == 3 and one.mirrors <= 1:
            where = f"{one.size}, {one.workers} workers"
            measured = "the peak of a step of stage 3, of FSDP2's"
            note(Figure(measured, where, [one.of_fsdp2], one.most_of_fsdp2, one.mirrors))


def note_price(every: list[Found]) -> None:
    """What a copy costs, of the largest world."""
    mine = [one for one in every if one.workers == max(each.workers for each in every)]
    lanes = mine[0].workers * mine[0].lanes_each
    for way, name in PEERS.items():
        theirs = peer(way, mine[0].size, mine[0].workers, lanes)
        note_bytes(name, None, theirs["rest"], theirs["most"])
    for one in mine:
        name = f"stage {one.stage}"
        note_bytes(name, one.mirrors, one.worst["rest"], one.worst["most"])
        note(Cell(name, one.mirrors, "peak of FSDP2's", [one.of_fsdp2], one.most_of_fsdp2))


def note_bytes(way: str, mirrors: int | None, rest: int, most: int) -> None:
    note(
        Cell(way, mirrors, "at rest, MiB", [rest / MIB], digits=1),
        Cell(way, mirrors, "peak, MiB", [most / MIB], digits=1),
    )


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
    every = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(preloaded(Path(folder)))
        for case in product(given.sizes, given.workers, given.stages, given.lanes_each, given.mirrors):
            every.append(found(*case))
            print(row(every[-1]), flush=True)
        note_targets(every)
        note_price(every)
        show("Tensor bytes of the worker that holds most", head, [row(one) for one in every])


if __name__ == "__main__":
    main()
