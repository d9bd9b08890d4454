"""Comparing the copies of blocks: what one member brings into a vote, and what all conclude from everybody's.

A column per block, a row per member: the checksum of its copy, or 0 where it has none. Who holds what need not be known
here, so a vote's row has the size of the sample and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shoal_protos.corruption import CorruptBlock
from torch import Tensor

MOST_REPORTED = 8
"""Blocks that one record names; what differs beyond is reported when it is compared again."""
NO_COPY = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Blocks that one vote compares. The same on all members but for `checksums`."""

    blocks: Tensor  # (blocks compared,) int64: their numbers
    checksums: Tensor  # (blocks compared,) int64: of this member's copies; NO_COPY where it has none
    first_step: int
    """At which each of them was compared before, or the job's first."""
    step: int
    """The step as of which the copies are compared."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a comparison came to."""

    corrupt: tuple[CorruptBlock, ...] = ()
    single: int = 0
    """Blocks with fewer than two copies: nothing can be said of them."""


def compare(
    comparison: Comparison,
    rows: Tensor,  # (members, blocks compared) int64: everybody's checksums, by rank
    workers: Sequence[str],
) -> Findings:
    """What everybody's checksums come to."""
    held = rows != NO_COPY
    least = torch.where(held, rows, torch.iinfo(torch.int64).max).amin(0)
    most = torch.where(held, rows, torch.iinfo(torch.int64).min).amax(0)
    copies = held.sum(0)
    differ = ((least != most) & (copies > 1)).nonzero().flatten().tolist()
    return Findings(
        tuple(
            CorruptBlock(
                int(comparison.blocks[column]),
                comparison.first_step,
                comparison.step,
                _whose({workers[rank]: value for rank, value in enumerate(rows[:, column].tolist()) if value}),
            )
            for column in differ[:MOST_REPORTED]
        ),
        int((copies < 2).sum()),
    )


def _whose(values: dict[str, int]) -> tuple[str, ...]:
    """Where more than half of the copies agree it is the others', else nobody can tell."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    agree = value if 2 * count > len(values) else None
    return tuple(worker for worker, own in values.items() if own != agree)
