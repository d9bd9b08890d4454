"""The worker's script of wire.py: rounds of DDP and of Shoal in turn, whose time is the network's.

A chain of square layers with one sample a step: hardly any arithmetic for many bytes. With `--computes` each layer
takes time besides, as on a device of its own: it sleeps. Each member takes part in both; rank 0 writes what every round
took and what the network interface that sends most has sent, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shoal
import torch
import torch.distributed as dist
from ddp import STEPS as STEPS_OF_A_ROUND
from ddp import in_turn, measured
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train import STEPS

WIDTH = 1_000
ROUNDS = 5
SENT = Path("/sys/class/net/wire/statistics/tx_bytes")
"""What this worker's host has sent; on loopback there is none."""


class Computing(torch.autograd.Function):
    """Time that goes by: once in the forward, twice in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Chain(nn.Module):
    """A million parameters a layer. `computes`: seconds of all layers together."""

    def __init__(self, layers: int, computes: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.seconds = computes / layers / 3

    def forward(self, x: Tensor) -> Tensor:  # (B, WIDTH) → the mean of squares
        x = x.requires_grad_()  # the first layer computes in the backward too
        for layer in self.layers:
            x = layer(x)
            if self.seconds:
                x = Computing.apply(x, self.seconds)
        return x.square().mean()


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index % 7))


def chain(layers: int, computes: float) -> tuple[Chain, torch.optim.Optimizer]:
    """The same weights everywhere."""
    torch.manual_seed(0)
    model = Chain(layers, computes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def initialize(given: argparse.Namespace) -> shoal.Engine:
    model, optimizer = chain(given.layers, given.computes)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "shoal": {"lanes": given.lanes, "mirrors": given.mirrors, "max_steps": STEPS},
    }
    return shoal.initialize(model=model, config=config, dataset=Rows(), optimizer=optimizer)


def baseline(layers: int, computes: float) -> Callable[[], None]:
    """One step of DDP with the same model and optimizer."""
    model, optimizer = chain(layers, computes)
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    row = torch.ones(1, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        module(row).backward()
        optimizer.step()

    return step


def sent() -> int:
    return int(SENT.read_text()) if SENT.exists() else 0


def most_sent(before: int) -> float:
    """Bytes since then of the host that has sent most. All ask at once."""
    most = torch.tensor([sent() - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of wire.py.")
    for name in ("--layers", "--lanes", "--mirrors"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--size", help="of other benchmarks: ignored")
    parser.add_argument("--computes", type=float, default=0.0, help="seconds of a step")
    given = parser.parse_args()
    engine = initialize(given)
    batches = iter(engine)

    def train() -> None:
        before = after = 0
        while after == before:
            batch = next(batches)
            before = engine.global_step
            engine.backward(engine.module(batch))
            engine.step()
            after = engine.global_step

    def settle() -> None:
        """What the last step has handed out belongs to its round."""
        with engine.gathered():
            pass

    train()
    while engine.world_size < given.lanes:
        train()
    place = os.environ["BENCH_STEPS"]
    dist.init_process_group("gloo", init_method=f"file://{place}.group", rank=engine.rank, world_size=given.lanes)
    ways = {"ddp": baseline(given.layers, given.computes), "shoal": train}
    took: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, step in in_turn(ways.items(), number):
            before = sent()
            wall, processor = measured(step, settle)
            most = most_sent(before)
            if number:
                took[name].append((wall, processor, most / STEPS_OF_A_ROUND))
    if engine.rank == 0:
        beside = Path(f"{place}.new")
        beside.write_text(json.dumps(took))
        beside.replace(f"{place}.json")
    while True:  # until the benchmark ends the cluster
        train()


if __name__ == "__main__":
    main()
