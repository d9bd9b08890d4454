"""Checksums by which the copies of a block are compared: one 64-bit number over parameters and optimizer state.

Cheap, because they are made beside steps: sums of machine words at the speed of memory, where any changed bit changes
the number. They stand for nothing but "equal or not" between copies of one step; checkpoints have XXH3,
fingerprints SHA-256. Knows no group.
"""

from __future__ import annotations

import torch
from shoal_protos.runs import Runs
from torch import Tensor

from shoal.blocks.flat import in_order
from shoal.core.layout import Stretch
from shoal.fingerprint import contents
from shoal.training.state import TrainingState

ROWS = 64
"""Parts of a block that are weighted apart, so that words which change places are seen too."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size."""


def block_checksums(state: TrainingState, blocks: Runs) -> Tensor:  # (len(blocks),) int64 on the CPU
    """Checksums in the order of the numbers, never 0. All of `blocks` are held here."""
    found: list[Tensor] = []
    stretches: list[Stretch] = []
    for stretch, parts in contents(state, blocks):
        stretches.append(stretch)
        total = torch.zeros(stretch.blocks, dtype=torch.int64, device=parts[0].device)
        for number, part in enumerate(parts):
            total += _sums(part.detach(), stretch.blocks).to(total.device) * (2 * number + 1)
        found.append(total)
    if not found:
        return torch.zeros(0, dtype=torch.int64)
    sums = torch.cat(found).cpu()[in_order(state.held_layout, stretches)]
    return torch.where(sums == 0, 1, sums)


def _sums(
    part: Tensor,  # (count × block elements,) of any dtype, or () for a number that all blocks share
    count: int,
) -> Tensor:  # (count,) int64, or ()
    """Sums of machine words, which wrap round."""
    if part.dim() == 0:
        return part.reshape(1).view(WORDS[part.element_size()]).to(torch.int64)[0]
    rows = part.view(torch.int64).view(count, ROWS, -1).sum(2)
    weights = torch.arange(1, 2 * ROWS, 2, dtype=torch.int64, device=part.device)
    return (rows * weights).sum(1)
