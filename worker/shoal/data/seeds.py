"""Random numbers of a micro-batch: the same whoever trains the lane, and whatever ran before in the process.

Every generator that a dataset or a model may use (torch on the CPU and on accelerators, `random`, numpy's own) is
seeded from (seed, step, lane, micro-batch) by a hash, so that neighbours have nothing in common.
"""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from shoal.device import accelerators_random_state, restore_accelerators_random_state, seed_accelerators

WORDS = struct.Struct("<3QI4x")
"""For torch, accelerators and `random`, and a short one for numpy, which takes six times as long with a longer one."""


def seed_everything(seed: int, step: int, lane: int, micro: int, *, purpose: str = "") -> None:
    """Seed all generators for one micro-batch, or for one purpose in it."""
    seed_from(f"{seed} {step} {lane} {micro} {purpose}".rstrip())


def seed_from(place: str) -> None:
    """Seed all generators by a text that names what they are for."""
    digest = hashlib.blake2b(place.encode(), digest_size=32, person=b"shoal.seeds").digest()
    *words, short = WORDS.unpack(digest)
    torch.default_generator.manual_seed(words[0])
    seed_accelerators(words[1])
    random.seed(words[2])
    numpy.random.seed(short)


@dataclass(frozen=True, slots=True)
class RandomState:
    """Where all generators of this process stand."""

    cpu: torch.Tensor
    accelerators: tuple[torch.Tensor, ...]
    """One a device; empty where none is in use."""
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def save(cls) -> RandomState:
        return cls(torch.get_rng_state(), accelerators_random_state(), random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerators:
            restore_accelerators_random_state(self.accelerators)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def is_here(self) -> bool:
        """Whether all generators stand there still."""
        now = RandomState.save()
        tensors = zip((self.cpu, *self.accelerators), (now.cpu, *now.accelerators), strict=True)
        is_numpys = all(map(numpy.array_equal, self.numpy, now.numpy))
        return all(torch.equal(*pair) for pair in tensors) and self.python == now.python and is_numpys
