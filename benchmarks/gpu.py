"""A step on one GPU against plain PyTorch: `python benchmarks/gpu.py [--parameters 1e9] [--samples 8] [--stage 1]`.

The same transformer with fused AdamW. Shoal's world of one computes in bf16 and steps float32 master weights. Plain
PyTorch has two ways: float32 parameters under autocast, which keep as much, and bf16 parameters that are stepped as
they are, which keep half and lose what is smaller than their last bit. Rounds take turns, so that all meet the same
clock. Prints medians and ratios; asserts nothing.
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


def data(samples: int) -> torch.utils.data.DataLoader[dict[str, Tensor]]:
    return torch.utils.data.DataLoader(Tokens(), batch_size=samples, shuffle=True, pin_memory=True)


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


def plain_step(model: nn.Module, samples: int, dtype: torch.dtype) -> Callable[[], None]:
    """`dtype`: of the parameters; what is computed is bf16."""
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = iter(data(samples))

    def step() -> None:
        tokens = next(batches)["tokens"].cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shoal_step(model: nn.Module, samples: int, stage: int, exact: bool) -> Callable[[], None]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "shoal": {"lanes": 1, "max_steps": 1 << 20, "exact": exact},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = shoal.initialize(model=model, config=config, dataset=data(samples), optimizer=optimizer)
    batches = iter(engine)

    def step() -> None:
        engine.backward(engine.module(**next(batches)))
        engine.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="A step on one GPU against plain PyTorch.")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="with deterministic kernels, as Shoal by default")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    width = width_of(given.parameters)

    def model() -> nn.Module:
        with torch.device("cuda"):
            return Transformer(width)

    ways = {
        "plain, float32 parameters under autocast": plain_step(model(), given.samples, torch.float32),
        "plain, bf16 parameters": plain_step(model(), given.samples, torch.bfloat16),
        "shoal": shoal_step(model(), given.samples, given.stage, given.exact),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        timed(step, 3)
    for _ in range(ROUNDS):
        for name, step in ways.items():
            found[name].append(timed(step, given.steps))
    took = {name: statistics.median(each) for name, each in found.items()}
    kernels = "deterministic" if given.exact else "usual"
    print(
        f"{torch.cuda.get_device_name()}, {given.parameters:.2g} parameters, {given.samples} × {LENGTH} tokens, "
        f"stage {given.stage}, {kernels} kernels"
    )
    for name, seconds in took.items():
        print(f"  {name}: {seconds * 1e3:.1f} ms a step, shoal is {took['shoal'] / seconds:.3f} of it")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
