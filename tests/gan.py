"""A GAN in one module, and a loop whose body trains one of its networks at each step."""

from __future__ import annotations

from typing import Any

import torch
from shoal.training.engine import Engine
from torch import Tensor, nn

WIDTH = 64


class Gan(nn.Module):
    """A generator of rows from half of a row, and a discriminator that tells them from sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def of_discriminator(self, real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.generator(real[:, :8])
        judged = self.discriminator(torch.cat([real, fake]))
        expected = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(fake[:, :1])])
        return nn.functional.binary_cross_entropy_with_logits(judged, expected)

    def of_generator(self, like: Tensor) -> Tensor:
        judged = self.discriminator(self.generator(like[:, :8]))
        return nn.functional.binary_cross_entropy_with_logits(judged, torch.ones_like(like[:, :1]))


def whose(engine: Engine) -> str:
    """Two steps of the discriminator for one of the generator."""
    return "generator" if engine.global_step % 3 == 2 else "discriminator"


def body(engine: Engine, batch: Any) -> None:
    turn, real = whose(engine), (batch["tokens"].float() / 255).to(engine.module.generator[0].weight.dtype)
    engine.turn(turn)
    assert isinstance(engine.module, Gan)
    engine.backward(engine.module.of_generator(real) if turn == "generator" else engine.module.of_discriminator(real))
    engine.step()
