"""The worker's script of step_time.py: rounds of DDP, of DDP with ZeroRedundancyOptimizer and of Shoal, in turn.

Each member of the world takes part in all three on the same two cores, so that a busy machine is busy for all alike.
Rank 0 writes what every round took, wall and CPU seconds per step (of all processes together), as JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import model
import shoal
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from train import initialize, options

STEPS = 3
"""Of one round."""
ROUNDS = 9


def baseline(engine: shoal.Engine, size: str, sharded: bool) -> Callable[[], None]:
    """One step of DDP: the same model, micro-batch, samples and fused AdamW."""
    module = DistributedDataParallel(model.build(size), gradient_as_bucket_view=True)
    given = {"lr": 1e-4, "fused": True}
    optimizer = (
        ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **given)
        if sharded
        else torch.optim.AdamW(module.parameters(), **given)
    )
    windows, at = model.Windows(), engine.rank

    def step() -> None:
        nonlocal at
        numbers = [(at * model.MICRO_BATCH + i) % len(windows) for i in range(model.MICRO_BATCH)]
        at += engine.world_size
        batch = torch.utils.data.default_collate([windows[number] for number in numbers])
        optimizer.zero_grad()
        module(**batch).backward()
        optimizer.step()

    return step


def elastic(engine: shoal.Engine, batches: Iterator[dict[str, torch.Tensor]]) -> None:
    """One optimizer step of Shoal; the first one after the world has begun, which a batch may wait for."""
    before = after = 0
    while after == before:
        batch = next(batches)
        before = engine.global_step
        engine.backward(engine.module(**batch))
        engine.step()
        after = engine.global_step


def measured(step: Callable[[], None]) -> tuple[float, float]:
    """Wall seconds per step, from all to all, and the CPU seconds of all processes."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step()
    used = torch.tensor([time.process_time() - processor])
    dist.barrier()
    wall = time.perf_counter() - wall
    dist.all_reduce(used)
    return wall / STEPS, used.item() / STEPS


def main() -> None:
    given = options()
    engine = initialize(given.size, given.lanes, given.mirrors)
    batches = iter(engine)
    place = os.environ["BENCH_STEPS"]
    elastic(engine, batches)  # the world has begun
    while engine.world_size < given.lanes:
        elastic(engine, batches)
    dist.init_process_group("gloo", init_method=f"file://{place}.group", rank=engine.rank, world_size=given.lanes)
    ways: dict[str, Callable[[], None]] = {
        "ddp": baseline(engine, given.size, sharded=False),
        "zero": baseline(engine, given.size, sharded=True),
        "shoal": lambda: elastic(engine, batches),
    }
    for step in ways.values():
        measured(step)
    took = {name: [measured(step)] for name, step in ways.items()}
    for _ in range(ROUNDS - 1):
        for name, step in ways.items():
            took[name].append(measured(step))
    if engine.rank == 0:
        beside = Path(f"{place}.new")
        beside.write_text(json.dumps(took))
        beside.replace(f"{place}.json")
    for _ in batches:  # until the benchmark ends the cluster
        engine.backward(engine.module(**_))
        engine.step()


if __name__ == "__main__":
    main()
