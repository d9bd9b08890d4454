"""Sums over a step's reduced gradient at a block's owner: whether all is finite, and the canonical norm.

What is not finite is reported in the vote, so that all members stop alike. The gradient is looked at once, by its sum;
only where that is not finite (a sum of large numbers overflows too) by elements, and then the lanes that it came from
are found. The host knows at once; a device keeps the sums of a step until its vote needs them: the host waits once,
never within a backward. Called by the reductions and training/step.py.

The norm adds up squares per row of 4,096 elements, then in one fixed tree over rows and blocks. Longer rows give other
bits at two threads. On an accelerator rows are added up by halves: its kernel's order of additions depends on how many
rows there are. An owner sums up the whole subtrees of block numbers that it owns; the vote carries them and finishes
the tree.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from shoal_protos.errors import JobFailed, UserError
from shoal_protos.runs import Runs, Span
from shoal_protos.text import passes_milestone
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.blocks.flat import in_order
from shoal.blocks.values import BlockValues
from shoal.core.layout import Bucket, Layout
from shoal.core.loss_scale import LossScale, after
from shoal.core.tree import subtrees
from shoal.exchange.vote import Findings, Record

MOST_NAME = 200

log = get_logger("shoal")


def is_finite(
    values: Tensor,  # (elements,) of a range that this worker owns
) -> bool:
    """One pass where all are."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of a step's reduced gradient whose sum is on its way."""

    bucket: Bucket
    start: int
    mean: Tensor  # (elements,): it stays as it is until the step's commit, but for the loss's scale
    total: Tensor  # ()
    lanes: Callable[[], Span]


class FiniteWatch:
    """Of one step. `at_once`: whether the host may ask for every sum when it is made, which costs it nothing then."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self._kept: list[_Range] = []
        self._bad = ""

    def look(
        self,
        bucket: Bucket,
        start: int,
        mean: Tensor,  # (elements,) of a range that this worker owns
        lanes: Callable[[], Span],
    ) -> None:
        """`mean`: the gradient of the bucket's elements from `start`. `lanes`: where it comes from if it is not finite;
        it is asked at once, or in `find_bad_gradient`.
        """
        if not self.at_once:
            self._kept.append(_Range(bucket, start, mean, mean.sum(), lanes))
        elif not self._bad and not is_finite(mean):
            self._bad = describe_gradient(bucket, start, mean, lanes())

    def find_bad_gradient(self) -> str:
        """The first parameter in this worker's blocks whose gradient is not finite; empty where all are. Waits for the
        device, once.
        """
        kept, self._kept = self._kept, []
        totals = torch.stack([one.total for one in kept]).tolist() if kept else []
        for one, total in zip(kept, totals, strict=True):
            if not self._bad and not math.isfinite(total) and not bool(torch.isfinite(one.mean).all()):
                self._bad = describe_gradient(one.bucket, one.start, one.mean, one.lanes())
        return self._bad


def describe_gradient(
    bucket: Bucket,
    start: int,
    mean: Tensor,  # (elements,) of a range
    lanes: Span,
) -> str:
    """Names the first parameter. `mean`: the gradient of the bucket's elements from `start`."""
    at = start + int(torch.isfinite(mean).logical_not().nonzero()[0])
    slot = bucket.slots[max(0, bisect_right(bucket.slots, at, key=lambda slot: slot.start) - 1)]
    which = f"lane {lanes[0]}" if lanes[1] - lanes[0] == 1 else f"lanes {lanes[0]} to {lanes[1] - 1}"
    return f'the gradient of parameter "{slot.parameter.name[:MOST_NAME]}" is not finite in {which}'


def stop_where_not_finite(record: Record, copies: Findings | None = None) -> None:
    """Raises `JobFailed` before the step's update; every member has the same record, and the same `copies`: what a
    comparison of all blocks' has found, None where there was none.
    """
    if not record.not_finite:
        return
    step = record.step
    found = f"at step {step} {record.not_finite}. The step was not made: the model is that of step {step - 1}."
    if copies is not None and copies.corrupt:
        raise JobFailed(
            f"{found} A worker's memory is at fault: {copies.corrupt[0].sentence}. Set `shoal.checkpoint.resume` to "
            'the step of a checkpoint whose manifest says "verified": true, and start the job again.'
        )
    agree = " (all copies of the model and its optimizer state agree)" if copies is not None else ""
    raise JobFailed(
        f"{found} Check the learning rate and the data of this step{agree}; skip a batch with engine.skip(), or "
        "continue regardless with `shoal.stop_on_nan: false`."
    )


def stop_where_nothing_scales(record: Record, scale: LossScale | None) -> None:
    """Raises `JobFailed` after an overflow at the smallest scale; every member has the same record."""
    if scale is None or not record.overflow:
        return
    try:
        after(scale, overflow=True)
    except UserError as error:
        raise JobFailed(
            f"at step {record.step} {record.overflow}: {error} The step was not made: the model is that of step "
            f"{record.step - 1}."
        ) from None


def warn(before: Record | None, record: Record, scale: float) -> None:
    """Logs the 1st, 10th, 100th … step that was not finite, and micro-batch that was skipped; overflows of scaled
    losses each, as they are few. `scale`: of the next step.
    """
    if record.overflow:
        log.warning("overflow", step=record.step, what=record.overflow, means="the step is skipped", next_scale=scale)
    steps, skipped = (before.not_finite_steps, before.skipped_micro_batches) if before is not None else (0, 0)
    if passes_milestone(steps, record.not_finite_steps):
        log.warning("not_finite", step=record.step, what=record.not_finite, steps=record.not_finite_steps)
    if passes_milestone(skipped, record.skipped_micro_batches):
        log.warning("micro_batches_skipped", step=record.step, micro_batches=record.skipped_micro_batches)


ROW = 4_096


def subtree_sums(
    gradients: BlockValues,  # reduced, of the blocks owned
    owned: Runs,
    layout: Layout,
) -> Tensor:  # (subtrees of owned,) float64
    """Sums of squares of the reduced gradient, in which what several stages have copies of counts once."""
    if not owned:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    stretches = layout.stretches(owned)
    pieces = [  # each (rows,) float64
        _row_sums(gradients.of(stretch).view(-1, ROW).pow(2)).double() * _is_counted(layout.buckets[stretch.bucket])
        for stretch in stretches
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


def _is_counted(bucket: Bucket) -> bool:
    """Whether norms count it: a copy of what an earlier stage of a pipeline has is counted there."""
    tie = bucket.slots[0].parameter.tie if bucket.slots else None
    return tie is None or tie.is_first


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
