"""The batch of DeepSpeed's `elasticity`: from a cap and the micro-batches that fit, one that many worker counts divide.

Version 0.1 compares a few candidate batches by how many counts divide them; 0.2 does the same with whole nodes, and
looks at how many workers there are. `as_lanes` says by what lanes Shoal trains a batch. The figures are those of
DeepSpeed 0.19.7 (tests/elastic_batches.jsonl.gz). Used by a training config, `shoal estimate` and the module
`shoal.deepspeed.elasticity`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shoal_protos.elastic_section import Elasticity
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MOST_LANES

HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
"""Numbers with more divisors than any smaller one."""
UNEVEN = 1 / 16
"""How much more than its even share the busiest worker may train where that saves lanes."""


class ElasticityError(UserError):
    """A batch that cannot be computed."""


class ElasticityConfigError(ElasticityError):
    """A section that says what cannot be."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A count of workers that does not divide the batch."""


class ElasticityUnknownVersion(ElasticityConfigError, NotImplementedError):
    """A version that DeepSpeed never had."""


class MicroBatchAboveCap(ElasticityError, ValueError):
    """A micro-batch that is larger than the largest batch."""


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """A batch, and by how many workers it is divided."""

    batch: int
    counts: tuple[int, ...]
    """Rising. Of workers; where each model takes several (`model_parallel_size`), of models."""
    micro_batch: int | None = None
    """That of a given world; None: nothing was given, or none divides its share."""


@dataclass(frozen=True, slots=True)
class ElasticLanes:
    """How Shoal makes a batch: `lanes` × `micro_batches_per_lane` × `micro_batch`."""

    lanes: int
    micro_batch: int
    micro_batches_per_lane: int

    def uneven(self, workers: int) -> float:
        """How much more than its even share the busiest of so many workers trains."""
        return uneven(self.lanes, workers)


def elastic_batch(section: Elasticity, world: int) -> ElasticBatch:
    """`world`: how many workers there are, at which only version 0.2 looks. Raises `ElasticityError`."""
    micros, cap, larger = section.micro_batch_sizes, section.max_train_batch_size, section.prefer_larger_batch
    if section.version == "0.1":
        return _most_divided(micros, cap, range(section.min_gpus, section.max_gpus + 1), larger)
    return _of_whole_nodes(section, world)


def micro_batch_of(found: ElasticBatch, world: int, micros: Iterable[int]) -> int | None:
    """The largest that divides the share of one of `world` workers."""
    return max((micro for micro in micros if found.batch // world % micro == 0), default=None)


def as_lanes(found: ElasticBatch, micros: Iterable[int], shards_gradients: bool) -> ElasticLanes:
    """The largest micro-batch that leaves a lane for every worker of the highest count, and a lane for each micro-batch
    of a step. Where gradients are sharded, every lane costs a reduction: as few lanes as keep every count even, within
    `UNEVEN`. Raises `ElasticityError` where there is no such number of lanes.
    """
    if not found.counts:
        raise ElasticityError(
            "no number of workers from `elasticity.min_gpus` to `elasticity.max_gpus` divides a batch of "
            "`elasticity.micro_batch_sizes` within `elasticity.max_train_batch_size`; raise the last or lower the first"
        )
    most = max(found.counts)
    micro = max((one for one in micros if found.batch % one == 0 and found.batch // one >= most), default=0)
    shares = found.batch // micro if micro else 0
    possible = [shares // each for each in _divisors(shares) if most <= shares // each <= MOST_LANES]
    if not possible:
        raise ElasticityError(
            f"the elastic batch {found.batch} does not divide into {most} to {MOST_LANES} lanes of equal size; lower "
            "`elasticity.max_train_batch_size` or `elasticity.max_gpus`"
        )
    lanes = max(possible)
    if shards_gradients:
        worst = {one: max(uneven(one, count) for count in found.counts) for one in possible}
        lanes = min(one for one in possible if worst[one] <= max(UNEVEN, worst[lanes]))
    return ElasticLanes(lanes, micro, shares // lanes)


def batch_and_lanes(section: Elasticity, stage: int, workers: int | None) -> tuple[ElasticBatch, ElasticLanes]:
    """What a section comes to in a stage of ZeRO. `workers`: with how many the job is submitted; None: that is not
    known, or there is one. Raises `UserError`, a whole sentence.
    """
    try:
        found = elastic_batch(section, workers or 1)
        return found, as_lanes(found, section.micro_batch_sizes, stage >= 2)
    except ElasticityError as error:
        raise UserError(f"{error}.") from None


def uneven(lanes: int, workers: int) -> float:
    """How much more than its even share the busiest worker trains: 0.5 is half as much again."""
    return math.ceil(lanes / workers) * workers / lanes - 1


def _most_divided(micros: Sequence[int], cap: int, allowed: range, larger: bool) -> ElasticBatch:
    """The candidate that most counts divide; of equals the largest, or the smallest."""
    if max(micros) > cap:
        raise MicroBatchAboveCap(
            f"the largest of `elasticity.micro_batch_sizes`, {max(micros)}, is above the largest batch, {cap}; raise "
            "`elasticity.max_train_batch_size` or leave it out"
        )
    best = ElasticBatch(min(micros), ())
    for batch in _candidates({*micros, math.lcm(*micros)}, cap):
        counts = _counts(batch, micros, allowed)
        wins_a_tie = batch > best.batch if larger else batch < best.batch
        if len(counts) > len(best.counts) or (len(counts) == len(best.counts) and wins_a_tie):
            best = ElasticBatch(batch, counts)
    return best


def _candidates(bases: Iterable[int], cap: int) -> list[int]:
    """Each base times the highest of the highly composite numbers that keep it within the cap."""
    within = sorted(base for base in bases if base <= cap)
    return [base * max(number for number in HIGHLY_COMPOSITE if number <= cap // base) for base in within]


def _counts(batch: int, micros: Sequence[int], allowed: range) -> tuple[int, ...]:
    shares = {batch // micro for micro in micros if batch % micro == 0}
    return tuple(sorted({count for one in shares for count in _divisors(one) if count in allowed}))


def _of_whole_nodes(section: Elasticity, world: int) -> ElasticBatch:
    """Nodes in the place of workers; a world that is not among the counts gets the largest multiple of its own."""
    micros, cap, larger = section.micro_batch_sizes, section.max_train_batch_size, section.prefer_larger_batch
    per_node, parallel = section.num_gpus_per_node, section.model_parallel_size
    if per_node % parallel:
        raise ElasticityError(
            f"`elasticity.num_gpus_per_node` is {per_node}, and `elasticity.model_parallel_size` {parallel}; the "
            "second must divide the first"
        )
    models = per_node // parallel
    least, most = section.min_gpus // per_node, section.max_gpus // per_node
    allowed = range(least or 1, (most or cap // models // min(micros)) + 1)
    nodes = _most_divided(micros, cap // models, allowed, larger)
    found = ElasticBatch(nodes.batch * models, tuple(count * models for count in nodes.counts))
    if world // parallel not in found.counts:
        here = Fraction(world, per_node) * models
        batches = [cap // (micro * here) * micro * here for micro in micros]
        found = ElasticBatch(int((max if larger else min)(batches)), (int(here),))
    fitting = [micro for micro in micros if found.batch // world % micro == 0]
    chosen = max(fitting) if larger and fitting else next(iter(fitting), None)
    return ElasticBatch(found.batch, found.counts, chosen)


def _divisors(number: int) -> list[int]:
    """Rising."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0] if number else []
    return sorted({*small, *(number // one for one in small)})
