"""Which samples a micro-batch reads: a fresh seeded shuffle per epoch, the same for every world.

Pure. A shuffle is never laid out: the samples at some places of the epoch are computed from the places by a keyed
permutation, so a dataset of any length costs no memory, a joiner starts in the middle of an epoch at once, and the
order depends on integer arithmetic alone (no version of Python, numpy or torch can change it).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy
from numpy.typing import NDArray
from shoal_protos.errors import UserError

ROUNDS = 8
MASK = (1 << 64) - 1
MANY = 32
"""From so many places on, numpy computes all at once; fewer are faster one by one."""

Numbers = NDArray[numpy.uint64]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The data order of a job. Steps count from 0 over all epochs; lanes and micro-batches from 0 within a step."""

    samples: int
    """Length of the dataset."""
    lanes: int
    micro_batch_size: int
    micro_batches_per_lane: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < self.samples_per_step:
            raise UserError(
                f"the dataset has {self.samples} samples, one step takes {self.samples_per_step} "
                f"(micro-batch {self.micro_batch_size} × {self.lanes} lanes × {self.micro_batches_per_lane} "
                "micro-batches per lane). Use fewer lanes, smaller micro-batches or more data."
            )

    @property
    def samples_per_step(self) -> int:
        return self.micro_batch_size * self.lanes * self.micro_batches_per_lane

    @property
    def steps_per_epoch(self) -> int:
        """Full steps; the rest of an epoch, less than a step, is dropped."""
        return self.samples // self.samples_per_step

    def last_step(self, max_steps: int | None, epochs: int | None) -> int:
        """How many steps the job has: `max_steps` or `epochs`, whichever ends first; 0 where neither says it."""
        ends = [max_steps] if max_steps is not None else []
        if epochs is not None:
            ends.append(epochs * self.steps_per_epoch)
        return min(ends, default=0)

    def indices(self, step: int, lane: int, micro: int) -> list[int]:
        """The samples of one micro-batch."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        batch = (step_in_epoch * self.lanes + lane) * self.micro_batches_per_lane + micro
        first = batch * self.micro_batch_size
        keys = _round_keys(self.seed, epoch)
        places = range(first, first + self.micro_batch_size)
        if len(places) < MANY:
            return [shuffled(place, self.samples, keys) for place in places]
        return [int(n) for n in all_shuffled(numpy.array(places, dtype=numpy.uint64), self.samples, keys)]


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS, person=b"shoal.sampler").digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


def shuffled(place: int, count: int, keys: tuple[int, ...]) -> int:
    """The number at `place` of a keyed permutation of `range(count)`.

    A Feistel network on pairs of numbers below the root of `count`; a result of `count` or more is fed in again until
    it falls below, which keeps it a permutation (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    side = isqrt(count - 1) + 1
    while True:
        left, right = divmod(place, side)
        for key in keys:
            left, right = right, (left + _mixed(right ^ key)) % side
        place = left * side + right
        if place < count:
            return place


def _mixed(word: int) -> int:
    """A well mixed 64-bit word: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def all_shuffled(places: Numbers, count: int, keys: tuple[int, ...]) -> Numbers:
    """`shuffled` of many places, in their order."""
    side, words = numpy.uint64(isqrt(count - 1) + 1), [numpy.uint64(key) for key in keys]
    found, outside = places.copy(), numpy.ones(len(places), dtype=bool)
    while outside.any():
        left, right = numpy.divmod(found[outside], side)
        for word in words:
            left, right = right, (left + _all_mixed(right ^ word) % side) % side  # the sum alone would wrap around
        found[outside] = left * side + right
        outside = found >= count
    return found


def _all_mixed(words: Numbers) -> Numbers:
    words = (words ^ (words >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return words ^ (words >> numpy.uint64(31))
