"""The canonical norm: sums of squares per row of 4,096 elements, then one fixed tree over rows and blocks.

Longer rows give other bits at two threads. On an accelerator rows are added up by halves: the order in which its kernel
for sums adds up a row depends on how many rows there are. An owner computes the sums of the whole subtrees of block
numbers that it owns; the vote carries them and finishes the tree.
"""

from __future__ import annotations

import torch
from shoal_protos.runs import Runs
from torch import Tensor

from shoal.blocks.flat import in_order
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout
from shoal.core.tree import subtrees

ROW = 4_096


def subtree_sums(
    gradients: BlockValues,  # reduced, of the blocks owned
    owned: Runs,
    layout: Layout,
) -> Tensor:  # (subtrees of owned,) float64
    """Sums of squares of the reduced gradient."""
    if not owned:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    stretches = layout.stretches(owned)
    pieces = [  # each (rows,) float64
        _row_sums(gradients.of(stretch).view(-1, ROW).pow(2)).double() for stretch in stretches
    ]
    rows = torch.cat(pieces).view(-1, layout.block_elements // ROW)  # (blocks owned, rows of a block)
    while rows.shape[1] > 1:
        rows = rows[:, 0::2] + rows[:, 1::2]
    blocks, place, at = rows[:, 0].cpu()[in_order(layout, stretches)], dict[int, int](), 0
    for start, stop in owned.spans:
        place[start] = at - start
        at += stop - start
    starts = [start for start, _ in owned.spans]
    sums, run = [], 0
    for first, last in subtrees(owned, layout.blocks):
        while run + 1 < len(starts) and starts[run + 1] <= first:
            run += 1
        offset = place[starts[run]]
        sums.append(_tree_sum(blocks[first + offset : last + offset]))
    return torch.stack(sums)


def _row_sums(
    squares: Tensor,  # (rows, ROW)
) -> Tensor:  # (rows,)
    return squares.sum(1) if squares.device.type == "cpu" else by_halves(squares)


def by_halves(
    rows: Tensor,  # (rows, a power of two)
) -> Tensor:  # (rows,)
    """Their sums, with the same bits whatever kernels there are: element by element."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _tree_sum(
    values: Tensor,  # (values,) float64, at least one
) -> Tensor:  # ()
    """Sum in the shape of the fixed tree: an odd one passes up unchanged."""
    while values.numel() > 1:
        paired = values[0 : values.numel() // 2 * 2 : 2] + values[1::2]
        values = torch.cat([paired, values[-1:]]) if values.numel() % 2 else paired
    return values[0]
