"""A step on one GPU against plain PyTorch: `python benchmarks/gpu.py [--parameters 1e9] [--steps 10] [--stage 1]`.

The same transformer in bf16 with fused AdamW: the plain loop steps bf16 parameters, Shoal's world of one float32 master
weights. Rounds take turns, so that both meet the same clock. Prints medians and their ratio; asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import shoal
import torch
from torch import Tensor, nn

WIDTH_OF_HEAD, LENGTH, VOCABULARY, LAYERS, ROUNDS = 64, 512, 32_000, 16, 5


class Transformer(nn.Module):
    """Tokens to the mean cross entropy of the next ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // WIDTH_OF_HEAD, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random ones."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": torch.randint(0, VOCABULARY, (LENGTH,))}


def width_of(parameters: float) -> int:
    """The width with which a model has about so many."""
    width = WIDTH_OF_HEAD
    while 12 * LAYERS * width * width + 2 * VOCABULARY * width < parameters:
        width += WIDTH_OF_HEAD
    return width


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds a step."""
    torch.accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.accelerator.synchronize()
    return (time.perf_counter() - began) / steps


def plain_step(model: nn.Module) -> Callable[[], None]:
    model = model.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = model(torch.randint(0, VOCABULARY, (1, LENGTH)).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shoal_step(model: nn.Module, stage: int) -> Callable[[], None]:
    model = model.to("cuda")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "shoal": {"lanes": 1, "max_steps": 1 << 20, "exact": False},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = shoal.initialize(model=model, config=config, dataset=Tokens(), optimizer=optimizer)
    batches = iter(engine)

    def step() -> None:
        engine.backward(engine.module(**next(batches)))
        engine.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="A step on one GPU against plain PyTorch.")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stage", type=int, default=1)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    width = width_of(given.parameters)
    ways = {"plain": plain_step(Transformer(width)), "shoal": shoal_step(Transformer(width), given.stage)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        timed(step, 3)
    for _ in range(ROUNDS):
        for name, step in ways.items():
            found[name].append(timed(step, given.steps))
    plain, ours = (statistics.median(found[name]) for name in ("plain", "shoal"))
    print(f"{torch.cuda.get_device_name()}, {given.parameters:.2g} parameters, stage {given.stage}")
    print(f"plain {plain * 1e3:.1f} ms, shoal {ours * 1e3:.1f} ms a step: {ours / plain:.3f}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
