"""The baseline: steps of DDP, in Shoal's own processes (interleaved.py) or in processes that know no Shoal.

    python benchmarks/ddp.py --size 10M --workers 4        what a step takes without Shoal's threads, as JSON

The same model, micro-batch, samples and fused AdamW. Several lanes are accumulated under `no_sync`.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TypeVar, cast

import model
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
"""Of one round."""
ROUNDS = 9
NEWTON_SCHULZ = "newton schulz"
WAYS = ("ddp", "ddp default", "zero", "fsdp2", "fsdp2 reshard", "ddp muon", NEWTON_SCHULZ)
"""DDP whose gradients are views of what it sends, DDP as it comes, which copies them, the first with
ZeroRedundancyOptimizer, FSDP2 that keeps parameters from forward to backward or frees them, the first with Muon, and no
more of that than the directions of all matrices, each by one process.
"""
PATIENCE_SECONDS = 60.0

Way = TypeVar("Way")


def fully_sharded(size: str, reshard: bool) -> nn.Module:
    """FSDP2, a unit for each layer. `reshard`: parameters are freed between forward and backward."""
    gpt, mesh = model.build(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in gpt.blocks:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(gpt, mesh=mesh, reshard_after_forward=reshard)
    return gpt


def baseline(rank: int, world: int, size: str, lanes: int, way: str) -> Callable[[], None]:
    """One step of so many lanes in all. `way`: one of `WAYS`."""
    if way == NEWTON_SCHULZ:
        return newton_schulz(rank, world, size)
    if way.startswith("fsdp2"):
        module = fully_sharded(size, way == "fsdp2 reshard")
    else:
        module = DistributedDataParallel(model.build(size), gradient_as_bucket_view=way != "ddp default")
    accumulating = module.no_sync if isinstance(module, DistributedDataParallel) else nullcontext
    optimizers: list[torch.optim.Optimizer]
    if way == "zero":
        optimizers = [ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)]
    elif way == "ddp muon":
        optimizers = model.muon(cast(model.GPT, module.module))
    else:
        optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)]
    windows, at, each = model.Windows(), rank * lanes // world, lanes // world

    def step() -> None:
        nonlocal at
        module.zero_grad()
        for lane in range(at, at + each):
            numbers = [(lane * model.MICRO_BATCH + i) % len(windows) for i in range(model.MICRO_BATCH)]
            batch = torch.utils.data.default_collate([windows[number] for number in numbers])
            with accumulating() if lane < at + each - 1 else nullcontext():
                module(**batch).backward()
        at += lanes
        for optimizer in optimizers:
            optimizer.step()

    return step


def newton_schulz(rank: int, world: int, size: str) -> Callable[[], None]:
    """The directions of this process's part of the matrices: those of every so many-th layer."""
    from shoal.optim.muon import TORCH  # main's processes know no Shoal

    gpt = model.build(size)
    (group,) = model.muon(gpt)[0].param_groups
    mine = {id(parameter) for layer in gpt.blocks[rank::world] for parameter in layer.parameters()}
    matrices = [torch.randn_like(one, dtype=torch.bfloat16) for one in group["params"] if id(one) in mine]

    def share() -> None:
        for matrix in matrices:
            TORCH.whole(matrix, group)

    return share


def in_turn(ways: Iterable[Way], number: int) -> list[Way]:
    """In which order they take part in the round of this number: every second time in reverse, so that none always has
    the same one before it.
    """
    return list(ways) if number % 2 == 0 else list(ways)[::-1]


def measured(
    step: Callable[[], None], end: Callable[[], None] = lambda: None, steps: int = STEPS
) -> tuple[float, float]:
    """Wall seconds per step, from all to all, and the CPU seconds of all processes. `end`: what the last step leaves to
    be done.
    """
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    end()
    dist.barrier()  # until then a process may still send what others wait for
    wall = time.perf_counter() - wall
    used = torch.tensor([time.process_time() - processor])
    dist.all_reduce(used)
    return wall / steps, used.item() / steps


def _member(rank: int, place: str, given: argparse.Namespace, all_done: Barrier) -> None:
    workers, steps = given.workers, given.steps
    dist.init_process_group("gloo", init_method=f"file://{place}/group", rank=rank, world_size=workers)
    step = baseline(rank, workers, given.size, given.lanes or workers, "ddp")
    measured(step, steps=steps)
    took = [measured(step, steps=steps) for _ in range(ROUNDS)]
    if rank == 0:
        (Path(place) / "took.json").write_text(json.dumps(took))
    all_done.wait(PATIENCE_SECONDS)  # gloo forgets who is within an operation when a peer goes: two of four hung
    del step
    gc.collect()  # a reducer that outlives the group ends it with Python's lock held, which gloo's thread waits for
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of DDP without Shoal.")
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        all_done = torch.multiprocessing.get_context("spawn").Barrier(given.workers)
        torch.multiprocessing.spawn(_member, (place, given, all_done), given.workers)
        print((Path(place) / "took.json").read_text())


if __name__ == "__main__":
    main()
