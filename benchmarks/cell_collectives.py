"""What an all-reduce and a message of a cell cost, compared with gloo's own, by turns in the same processes.

    python benchmarks/cell_collectives.py [--rounds 9] [--members 2]

All are called by `torch.distributed`. A round times each way at each size; CPU seconds are of all members together,
with all their threads, so that a wait costs nothing and a thread that spins does. The ratio of each round counts.
Messages go as in a ring: each member sends to the next one, and receives from the one before. They have no targets.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shoal.cells.hub import CellHub
from shoal.cells.process_group import CellGroup
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import build_gloo
from shoal.group.rendezvous import RendezvousServer
from shoal_protos.shape import Shape
from tables import Figure, note, show, spread

SIZES = {"1 KiB": (256, 300, 1.25), "256 KiB": (1 << 16, 80, 1.4), "16 MiB": (1 << 22, 6, 1.2)}
"""Elements of float32, calls of a round, and the most that the ratio may be."""
WAYS = ("gloo", "cell")
KINDS = ("an all-reduce", "a message")
PATIENCE = timedelta(seconds=60)


def gloos_own(store: dist.Store, rank: int, members: int) -> Any:
    """A process group as `init_process_group("gloo")` makes it."""
    group = dist.ProcessGroup(store, rank, members)
    gloo = dist.ProcessGroupGloo(store, rank, members, PATIENCE)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def cells(store: dist.Store, rank: int, members: int) -> Any:
    """A cell's process group, over a group as the engine builds it, after the step in which calls are compared."""
    server = RendezvousServer("127.0.0.1")
    store.set(f"server {rank}", server.address)
    addresses = tuple(store.get(f"server {one}").decode() for one in range(members))
    hub = CellHub(Shape(tensor=members), rank)
    hub.begin(build_gloo(GroupSpec(1, rank, addresses, builder=0), Cancellation()), tuple(range(members)))
    hub.on_commit()
    return CellGroup(hub, range(members), "cell")


def member(rank: int, place: str, members: int, rounds: int) -> None:
    """Writes CPU and wall seconds of a call, by size, way and round."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{place}/store", members)
    groups = {"gloo": gloos_own(store, rank, members), "cell": cells(store, rank, members)}
    took: dict[str, dict[str, list[tuple[float, float]]]] = {
        f"{kind} of {size}": {way: [] for way in WAYS} for kind in KINDS for size in SIZES
    }
    for number in range(rounds + 1):
        for size, (elements, calls, _) in SIZES.items():
            values, coming = torch.zeros(elements), torch.zeros(elements)
            for kind in KINDS:
                for way in WAYS if number % 2 else reversed(WAYS):
                    group = groups[way]
                    dist.barrier(group=group)
                    processor, wall = _processor_seconds(), time.perf_counter()
                    for _ in range(calls):
                        if kind == "a message":
                            works = [group.recv([coming], (rank - 1) % members, 0)]
                            works.append(group.send([values], (rank + 1) % members, 0))
                            for work in works:
                                work.wait()
                        else:
                            dist.all_reduce(values, group=group)
                    took[f"{kind} of {size}"][way].append(
                        ((_processor_seconds() - processor) / calls, (time.perf_counter() - wall) / calls)
                    )
    Path(place, f"{rank}.json").write_text(json.dumps(took))
    dist.barrier(group=groups["gloo"])  # a process that ends closes what others are in


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls of a cell, compared with gloo's own.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--members", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(member, (place, given.members, given.rounds), given.members)
        found = [json.loads(Path(place, f"{rank}.json").read_text()) for rank in range(given.members)]
    rows, figures = [], []
    for kind, (size, (_, _, target)) in product(KINDS, SIZES.items()):
        call = f"{kind} of {size}"
        # the first round, in which connections are made, counts for nothing
        processor = {way: [sum(one) for one in zip(*_of(found, call, way, 0), strict=True)][1:] for way in WAYS}
        wall = {way: [max(one) for one in zip(*_of(found, call, way, 1), strict=True)][1:] for way in WAYS}
        ratios = [cell / gloo for gloo, cell in zip(processor["gloo"], processor["cell"], strict=True)]
        shown = [spread([1e6 * one for one in values[way]], 0) for values in (processor, wall) for way in WAYS]
        if kind == "a message":
            rows.append([call, *shown, spread(ratios), ""])
            continue
        figures.append(Figure(f"{kind} of a cell, CPU, of gloo's", f"{size}, {given.members} members", ratios, target))
        rows.append([call, *shown, figures[-1].text, figures[-1].verdict])
    show("Calls of a cell, µs", ("", "CPU, gloo's", "CPU", "wall, gloo's", "wall", "ratio of CPU", ""), rows)
    note(*figures)


def _of(found: list[Any], call: str, way: str, column: int) -> list[list[float]]:
    """By member, its rounds."""
    return [[one[column] for one in of[call][way]] for of in found]


if __name__ == "__main__":
    main()
