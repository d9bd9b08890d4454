"""The layout: parameters → buckets → blocks. The same in every stage, in every world, on every worker.

A bucket holds parameters of one optimizer group and one dtype: groups in the optimizer's order, parameters in reverse
registration order (the order in which backward finishes them), each at a 64-byte multiple; it is padded with zeros to
whole blocks. Block numbers run through all buckets. Pure: shapes and dtypes only, no tensor is touched.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from shoal_protos.runs import Runs, Span

SMALLEST_BLOCK = 4_096
MOST_BLOCKS = 65_536
BUCKET_BYTES = 8 << 20
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Trainable:
    """A parameter that gets gradients, as the layout needs it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies: elements `[start, start + parameter.elements)` of its bucket."""

    parameter: Trainable
    start: int


@dataclass(frozen=True, slots=True)
class Bucket:
    index: int
    group: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    first_block: int
    blocks: int
    elements: int
    """Elements with padding: blocks × block elements."""

    @property
    def gaps(self) -> list[Span]:
        """The element ranges that belong to no parameter; they are zero."""
        found, at = [], 0
        for slot in self.slots:
            if slot.start > at:
                found.append((at, slot.start))
            at = slot.start + slot.parameter.elements
        if at < self.elements:
            found.append((at, self.elements))
        return found


@dataclass(frozen=True)
class Layout:
    block_elements: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def blocks(self) -> int:
        return sum(bucket.blocks for bucket in self.buckets)

    def bucket_of(self, block: int) -> Bucket:
        """The bucket that a block lies in."""
        return self.buckets[bisect_right(self.buckets, block, key=lambda bucket: bucket.first_block) - 1]

    def cut(self, runs: Runs) -> tuple[tuple[Span, ...], ...]:
        """Element ranges of a set of blocks, by bucket."""
        size = self.block_elements
        return tuple(
            tuple(
                ((start - bucket.first_block) * size, (stop - bucket.first_block) * size)
                for start, stop in runs.within(bucket.first_block, bucket.first_block + bucket.blocks).spans
            )
            for bucket in self.buckets
        )

    def text(self) -> str:
        """The layout as it enters the fingerprint: one line a bucket and one a parameter."""
        lines = [f"block_elements {self.block_elements}"]
        for bucket in self.buckets:
            lines.append(f"bucket {bucket.index} group {bucket.group} {bucket.dtype} blocks {bucket.blocks}")
            lines += [f"{slot.start} {slot.parameter.name} {slot.parameter.shape}" for slot in bucket.slots]
        return "\n".join(lines)

    def digest(self) -> bytes:
        """SHA-256 of `text()`."""
        return hashlib.sha256(self.text().encode()).digest()


def lay_out(parameters: Sequence[Trainable], bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """The layout of parameters given in registration order; a bucket is closed once it holds `bucket_bytes`."""
    drafts = list(_drafts(parameters, bucket_bytes))
    block = SMALLEST_BLOCK
    while sum(-(-elements // block) for _, elements in drafts) > MOST_BLOCKS:
        block *= 2
    buckets, first = [], 0
    for index, (slots, elements) in enumerate(drafts):
        blocks = -(-elements // block)
        head = slots[0].parameter
        buckets.append(Bucket(index, head.group, head.dtype, tuple(slots), first, blocks, blocks * block))
        first += blocks
    return Layout(block, tuple(buckets))


def _drafts(parameters: Sequence[Trainable], bucket_bytes: int) -> list[tuple[list[Slot], int]]:
    drafts: list[tuple[list[Slot], int]] = []
    backwards = parameters[::-1]
    for parameter in sorted(backwards, key=lambda p: p.group):
        align = max(1, ALIGNMENT_BYTES // parameter.dtype.itemsize)
        of_kind = [d for d in drafts if (d[0][0].parameter.group, d[0][0].parameter.dtype) == _kind(parameter)]
        slots, elements = of_kind[-1] if of_kind else ([], bucket_bytes)
        start = -(-elements // align) * align
        if (start + parameter.elements) * parameter.dtype.itemsize > bucket_bytes:
            slots, start = [], 0
            drafts.append((slots, 0))
        slots.append(Slot(parameter, start))
        place = next(i for i, draft in enumerate(drafts) if draft[0] is slots)
        drafts[place] = (slots, start + parameter.elements)
    return drafts


def _kind(parameter: Trainable) -> tuple[int, torch.dtype]:
    return parameter.group, parameter.dtype
