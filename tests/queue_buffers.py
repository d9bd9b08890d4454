"""MoCo's queue of keys in buffers, with labels and two counts, for models whose lanes write it."""

from __future__ import annotations

import torch
from integration.scripts import WIDTH
from shoal.training.engine import Engine
from torch import Tensor, nn

LENGTH = 22
"""Rows, which the 8 keys of a step do not fill evenly."""


class Queue(nn.Module):
    """MoCo's, as it is written there: the queue is turned; with labels, which are often those that were there."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.register_buffer("queue", nn.functional.normalize(torch.randn(WIDTH, LENGTH), dim=0))
        self.register_buffer("labels", torch.zeros(LENGTH, dtype=torch.long))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    @torch.no_grad()
    def put(self, keys: Tensor, labels: Tensor) -> None:
        places = (int(self.at) + torch.arange(len(keys))) % LENGTH
        self.queue[:, places] = keys.T
        self.labels[places] = labels
        self.at[0] = (self.at[0] + len(keys)) % LENGTH
        self.seen += len(keys)


def declare(engine: Engine, prefix: str = "") -> None:
    """The queue that is called `memory` in the model, or in what `prefix` names."""
    name = f"{prefix}memory"
    engine.buffer(f"{name}.at", join="sum", modulo=LENGTH)
    engine.buffer(f"{name}.queue", join="writes", dim=1)
    engine.buffer(f"{name}.labels", join="writes", pointer=f"{name}.at")
    engine.buffer(f"{name}.seen", join="sum")
