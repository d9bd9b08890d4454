"""The layout: parameters → buckets → blocks. The same in every stage, in every world, on every worker.

A bucket holds parameters of one unit, one optimizer group and one dtype: groups in the optimizer's order, parameters in
reverse registration order (the order in which backward finishes them), each at a 64-byte multiple; it is padded with
zeros to whole blocks. Pure: shapes and dtypes only, no tensor is touched.
Parameters that need no gradient (frozen) may be in buckets of their own, behind all others: such blocks have no state,
and are in no fingerprint. `Layout.trained` is the layout without them, which is the same wherever they are kept.
Block numbers are striped: blocks are numbered across the buckets, by their relative place in their bucket. So a run of
numbers is one slice of every bucket, and any owner of long runs has its share of every bucket's traffic.

Where several processes train a lane together (a cell), some parameters are a process's own part of the model, and the
others are common to its cell. A layout has the buckets of one coordinate, own ones first, and block numbers are the
job's: the own blocks of coordinate 0, those of coordinate 1, and so on, then the common ones, each part striped by
itself. Every common block has a home coordinate. All coordinates lay out alike. Where a cell divides a sequence,
coordinates of several contexts have the same own part, which lies at home at all of them as the common blocks do.
Each stage of a pipeline has parameters of its own, and so buckets of its own: its blocks, numbered as above, follow
those of the stages before. A layout knows all stages' buckets, and has those of its own coordinate.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from shoal_protos.runs import Runs, Span

from shoal.core.cuts import Cut
from shoal.core.ties import Tie

VERSION: Literal[2] = 2
"""Of the rules on this page: other ones put the same parameters into other blocks."""
SMALLEST_BLOCK = 4_096
MOST_BLOCKS = 65_536
MOST_FROZEN_BLOCKS = 16_384
BUCKET_BYTES = 8 << 20
ALIGNMENT_BYTES = 64
FROZEN = -1
"""The group of parameters that no optimizer changes."""


@dataclass(frozen=True, slots=True)
class CellPart:
    """What of the model a process has: all of it where a cell is one process."""

    coordinates: int = 1
    """How many processes a cell has."""
    coordinate: int = 0
    """Its own place in a cell."""
    own: frozenset[str] = frozenset()
    """Names of the parameters that no other coordinate has; all others are common to a cell."""
    summed: frozenset[str] = frozenset()
    """Names of the common ones of whose gradient each coordinate may have a part; of others all have the whole."""
    contexts: int = 1
    """How many coordinates have the same parameters, each with other tokens: all contribute to a gradient."""
    stages: int = 1
    """How many stages a pipeline has: as many coordinates that follow each other have each."""
    cuts: Mapping[str, Cut] = field(default_factory=dict, compare=False)
    """By name, as far as it is known: of the own ones, and of those that would be with more places of `tensor`."""
    adding: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of those that are marked as `summed`, which they are with several places of `tensor`."""
    numbered: int = field(default=0, compare=False)
    """How many stages its model is made of, with whose numbers names begin; 0: it is not made of stages."""
    ties: Mapping[str, Tie] = field(default_factory=dict, compare=False)
    """Of those of which several stages have a copy, by name."""

    @property
    def place(self) -> int:
        """Its own of the pipeline: the number of its stage."""
        return self.coordinate // self.of_stage

    @property
    def of_stage(self) -> int:
        """How many coordinates have a stage."""
        return self.coordinates // self.stages

    @property
    def parts(self) -> int:
        """How many own parts a stage has."""
        return self.of_stage // self.contexts

    @property
    def mates(self) -> range:
        """The coordinates that have the same stage, itself among them."""
        return range(self.place * self.of_stage, (self.place + 1) * self.of_stage)

    @property
    def contributors(self) -> range:
        """The coordinates with the parameters of this one, itself among them, in their order."""
        return self.mates[self.coordinate % self.parts :: self.parts]

    def summed_of(self, placed: Iterable[str]) -> frozenset[str]:
        """Names of those that are `summed` in such a cell. `placed`: of the DTensors."""
        marked = self.adding if self.parts > 1 else frozenset()
        return (marked | frozenset(placed if self.coordinates > 1 else ())) - self.own


WHOLE = CellPart()


@dataclass(frozen=True, slots=True)
class Trainable:
    """A parameter as the layout needs it: one that gets gradients, or a frozen one that is kept in blocks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    unit: int = 0
    """The wrapped module that it belongs to (units.py)."""
    own: bool = False
    """Whether it is a part of the model that no other coordinate of a cell has."""
    summed: bool = False
    """Whether its gradient may have to be added up over a cell before it is a lane's."""
    wrapped: bool = False
    """Whether its values lie in another tensor than itself, as a DTensor's do."""
    cut: Cut | None = field(default=None, compare=False)
    """Which part of the whole an own one is, or would be in cells of another shape; None: that is not known."""
    adds: bool = field(default=False, compare=False)
    """Whether it is marked as `summed`."""
    order: int = field(default=-1, compare=False)
    """Its number among the parameters of its stage, in registration order; -1: not known."""
    tie: Tie | None = field(default=None, compare=False)
    """Of a copy: what it has to do with those of other stages."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def whole_shape(self, parts: int) -> tuple[int, ...]:
        """With those of all other coordinates, as far as it is known how they are cut."""
        return self.cut.whole_shape(self.shape, parts) if self.own and self.cut is not None else self.shape

    def joined(
        self,
        parts: Sequence[torch.Tensor],  # each of its shape
    ) -> torch.Tensor:  # of the whole's shape
        """The whole of the parts that coordinates have, or of one."""
        return self.cut.join(parts) if self.own and self.cut is not None else parts[0]


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
    blocks: int
    elements: int
    """Elements with padding: blocks × block elements."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of sums, reduced gradients, optimizer state, and of the master weights where it is not the parameters' own:
        rounding to half precision happens once, at the end of an update. A frozen parameter has its own.
        """
        if self.is_frozen:
            return self.dtype
        return torch.float32 if self.dtype.itemsize < torch.float32.itemsize else self.dtype

    @property
    def leaf_dtype(self) -> torch.dtype:
        """Of a lane's gradient, where a lane is one micro-batch: that of the parameters, unless it is a sum."""
        return self.wide_dtype if self.is_summed else self.dtype

    @property
    def has_masters(self) -> bool:
        """Whether an owner keeps the parameters in more precision than they are computed with."""
        return self.dtype != self.wide_dtype

    @property
    def is_frozen(self) -> bool:
        """Whether no optimizer changes it."""
        return self.group == FROZEN

    @property
    def is_own(self) -> bool:
        """Whether no other coordinate has it."""
        return bool(self.slots) and self.slots[0].parameter.own

    @property
    def is_summed(self) -> bool:
        """Whether its gradients are complete only when a lane's backward is over."""
        return bool(self.slots) and self.slots[0].parameter.summed

    @property
    def block_elements(self) -> int:
        return self.elements // self.blocks

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


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Blocks that follow each other in one bucket, by their positions there: `[start, stop)`."""

    bucket: int
    start: int
    stop: int

    @property
    def blocks(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    block_elements: int
    """Of all buckets but frozen ones, whose blocks may be larger."""
    buckets: tuple[Bucket, ...]
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    """Where this worker's tensors of it lie: no part of what all workers share."""
    part: CellPart = WHOLE
    stages: tuple[tuple[Bucket, ...], ...] = ()
    """The buckets of all stages of a pipeline; empty where there is none."""

    def at(self, coordinate: int) -> Layout:
        """The same as another coordinate of a cell has it."""
        if coordinate == self.part.coordinate:
            return self
        part = replace(self.part, coordinate=coordinate)
        return replace(self, part=part, buckets=self.stages[part.place] if self.stages else self.buckets)

    @cached_property
    def trained(self) -> Layout:
        """Without frozen buckets, which come last; the blocks of the others follow each other as here."""
        kept = tuple(bucket for bucket in self.buckets if not bucket.is_frozen)
        return self if len(kept) == len(self.buckets) else replace(self, buckets=kept)

    @cached_property
    def _frozen_blocks(self) -> array[int]:
        """The numbers of all in the job, ascending: each is common to all coordinates."""
        places = zip(self.all_blocks, self.places, strict=True)
        return array("q", (number for number, (bucket, _) in places if self.buckets[bucket].is_frozen))

    def trained_runs(self, runs: Runs) -> Runs:
        """Those of a set of blocks that are not frozen, by their numbers in `trained`."""
        if self.trained is self:
            return runs
        numbers, spans = self._frozen_blocks, list[Span]()
        for start, stop in runs.spans:
            _append(spans, start - bisect_left(numbers, start), stop - bisect_left(numbers, stop))
        return Runs(spans)

    @property
    def is_in_parts(self) -> bool:
        """Whether gradients of some parameters are parts of a sum over a cell, or lie in DTensors."""
        return any(slot.parameter.summed or slot.parameter.wrapped for bucket in self.buckets for slot in bucket.slots)

    @property
    def by_stage(self) -> tuple[tuple[Bucket, ...], ...]:
        """The buckets of all stages; of one, where there is no pipeline."""
        return self.stages or (self.buckets,)

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """By name, of all parameters, with the parts of other coordinates."""
        slots = (slot.parameter for bucket in self.buckets for slot in bucket.slots)
        return {one.name: one.whole_shape(self.part.parts) for one in slots}

    @cached_property
    def parameters(self) -> int:
        """How many parameters the job's layout has, those of all stages, numbered in their order."""
        return sum(len(bucket.slots) for buckets in self.by_stage for bucket in buckets)

    @cached_property
    def first_parameter(self) -> int:
        """The number of the first one here."""
        return sum(len(bucket.slots) for buckets in self.stages[: self.part.place] for bucket in buckets)

    @cached_property
    def blocks(self) -> int:
        """How many blocks the job has: those here, and those of all other parts of the model."""
        return sum(self.part.parts * own + common for own, common in self._counts)

    @cached_property
    def _counts(self) -> tuple[tuple[int, int], ...]:
        """Of each stage: the blocks that each part of it has of its own, and those in common."""
        own = [sum(bucket.blocks for bucket in buckets if bucket.is_own) for buckets in self.by_stage]
        return tuple(
            (mine, sum(b.blocks for b in buckets) - mine) for mine, buckets in zip(own, self.by_stage, strict=True)
        )

    def _first_of(self, stage: int) -> int:
        """The first block of a stage."""
        return sum(self.part.parts * own + common for own, common in self._counts[:stage])

    @cached_property
    def all_blocks(self) -> Runs:
        """Those of the model of this coordinate."""
        return self.model_at(self.part.coordinate)

    def model_at(self, coordinate: int) -> Runs:
        """The blocks whose parameters the model of a coordinate has."""
        part = replace(self.part, coordinate=coordinate)
        _, common = self._counts[part.place]
        return self._own(part, 0, 1) | self._common(part, 0, common)

    def home_of(self, coordinate: int) -> Runs:
        """The blocks that only members at this coordinate own and mirror: of its own ones as many as each contributor
        to them has, and a run of the common ones.
        """
        part = replace(self.part, coordinate=coordinate)
        within, (_, common) = coordinate - part.mates[0], self._counts[part.place]
        share = _share(common, within, part.of_stage)
        return self._own(part, within // part.parts, part.contexts) | self._common(part, *share)

    def _own(self, part: CellPart, index: int, of: int) -> Runs:
        """One of several equal shares of what a coordinate shares with its contributors alone."""
        own, _ = self._counts[part.place]
        first, (start, stop) = self._first_of(part.place) + part.coordinate % part.parts * own, _share(own, index, of)
        return Runs(((first + start, first + stop),))

    def _common(self, part: CellPart, start: int, stop: int) -> Runs:
        first = self._first_of(part.place) + part.parts * self._counts[part.place][0]
        return Runs(((first + start, first + stop),))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(bucket, position in it) of every block of `all_blocks`, in their order."""
        order = sorted(
            (not bucket.is_own, (position + 0.5) / bucket.blocks, bucket.index, position)  # equal fractions are equal
            for bucket in self.buckets
            for position in range(bucket.blocks)
        )
        return [(bucket, position) for _, _, bucket, position in order]

    @cached_property
    def numbers(self) -> tuple[array[int], ...]:
        """Block numbers by bucket and position; within a bucket they ascend."""
        found = tuple(array("q") for _ in self.buckets)
        for number, (bucket, _) in zip(self.all_blocks, self.places, strict=True):
            found[bucket].append(number)
        return found

    def without_frozen(self, runs: Runs) -> Runs:
        """Those of a set of blocks that are not frozen, by their numbers here."""
        if self.trained is self:
            return runs
        return runs - Runs.of(self._frozen_blocks)

    def stretches(self, runs: Runs) -> list[Stretch]:
        """A set of blocks, as far as they are here, as the longest stretches, in order."""
        found: list[list[Span]] = [[] for _ in self.buckets]
        for start, stop in runs.spans:
            if stop - start < len(self.buckets) and self.part.coordinates == 1:
                for bucket, position in self.places[start:stop]:
                    _append(found[bucket], position, position + 1)
                continue
            for bucket, numbers in enumerate(self.numbers):
                _append(found[bucket], bisect_left(numbers, start), bisect_left(numbers, stop))
        return [Stretch(bucket, start, stop) for bucket, spans in enumerate(found) for start, stop in spans]

    def numbers_of(self, stretch: Stretch) -> array[int]:
        """The blocks of a stretch, in its order."""
        return self.numbers[stretch.bucket][stretch.start : stretch.stop]

    def runs(self, stretches: Iterable[Stretch]) -> Runs:
        """The inverse of `stretches`."""
        return Runs.of(number for stretch in stretches for number in self.numbers_of(stretch))

    def whole(self, bucket: Bucket) -> Stretch:
        """All blocks of a bucket."""
        return Stretch(bucket.index, 0, bucket.blocks)

    def elements(self, stretch: Stretch) -> Span:
        """Where a stretch lies in its bucket."""
        bucket = self.buckets[stretch.bucket]
        size = bucket.elements // bucket.blocks
        return stretch.start * size, stretch.stop * size

    def cut(self, runs: Runs) -> tuple[tuple[Span, ...], ...]:
        """Element ranges of a set of blocks, by bucket."""
        found: list[list[Span]] = [[] for _ in self.buckets]
        for stretch in self.stretches(runs):
            found[stretch.bucket].append(self.elements(stretch))
        return tuple(map(tuple, found))

    def text(self) -> str:
        """The layout as it enters the fingerprint: one line a bucket and one a parameter. Equal at all coordinates."""
        lines = [f"layout {VERSION}", f"block_elements {self.block_elements}"]
        if self.part.coordinates > 1:
            contexts = f" in {self.part.contexts} contexts" if self.part.contexts > 1 else ""
            lines.append(f"cells of {self.part.coordinates}{contexts}")
        for stage, buckets in enumerate(self.by_stage):
            lines += [f"stage {stage} of {len(self.stages)}"] if self.stages else []
            for bucket in buckets:
                own = " own" if bucket.is_own else ""
                lines.append(f"bucket {bucket.index} group {bucket.group} {bucket.dtype} blocks {bucket.blocks}{own}")
                lines += [f"{slot.start} {slot.parameter.name} {slot.parameter.shape}" for slot in bucket.slots]
        return "\n".join(lines)

    def digest(self) -> bytes:
        """SHA-256 of `text()`."""
        return hashlib.sha256(self.text().encode()).digest()


def _share(blocks: int, index: int, of: int) -> Span:
    """One of several equal shares."""
    return blocks * index // of, blocks * (index + 1) // of


def overlaps(stretches: Sequence[Stretch], held: Stretch) -> list[Stretch]:
    """What of one stretch is in a set of them, which ascend."""
    found = []
    for other in stretches[max(0, bisect_right(stretches, held) - 1) :]:
        if (other.bucket, other.start) >= (held.bucket, held.stop):
            break
        start, stop = max(held.start, other.start), min(held.stop, other.stop)
        if other.bucket == held.bucket and start < stop:
            found.append(Stretch(held.bucket, start, stop))
    return found


def _append(spans: list[Span], start: int, stop: int) -> None:
    """To spans that ascend; one that touches the last makes it longer."""
    if start == stop:
        return
    if spans and spans[-1][1] == start:
        start, _ = spans.pop()
    spans.append((start, stop))


def lay_out(
    parameters: Sequence[Trainable],
    bucket_bytes: int = BUCKET_BYTES,
    part: CellPart = WHOLE,
    stages: Sequence[Sequence[Trainable]] = (),
) -> Layout:
    """The layout of parameters given in registration order; a bucket is closed once it holds `bucket_bytes`. `stages`:
    of a pipeline the parameters of all stages, those of this one among them.
    """
    drafts = [list(_drafts(one, bucket_bytes)) for one in stages or (parameters,)]
    everywhere = [draft for of_stage in drafts for draft in of_stage]
    others = [draft for draft in everywhere if draft[0][0].parameter.own] * (part.parts - 1)
    trained = [elements for slots, elements in (*everywhere, *others) if slots[0].parameter.group != FROZEN]
    frozen = [elements for slots, elements in everywhere if slots[0].parameter.group == FROZEN]
    block = _block_elements(trained, SMALLEST_BLOCK, MOST_BLOCKS)
    size_of_frozen = _block_elements(frozen, block, MOST_FROZEN_BLOCKS)
    found = tuple(tuple(_buckets(of_stage, block, size_of_frozen)) for of_stage in drafts)
    return Layout(block, found[part.place if stages else 0], part=part, stages=found if stages else ())


def _buckets(drafts: Sequence[tuple[list[Slot], int]], block: int, block_of_frozen: int) -> Iterator[Bucket]:
    """Of the elements that a block has."""
    for index, (slots, elements) in enumerate(drafts):
        head = slots[0].parameter
        size = block_of_frozen if head.group == FROZEN else block
        blocks = max(1, -(-elements // size))
        yield Bucket(index, head.group, head.dtype, tuple(slots), blocks, blocks * size)


def _block_elements(buckets: Sequence[int], smallest: int, most: int) -> int:
    """So many elements that there are not too many blocks. `buckets`: the elements of each."""
    size = smallest
    while sum(-(-elements // size) for elements in buckets) > most and size < max(buckets):
        size *= 2
    return size


def _drafts(parameters: Sequence[Trainable], bucket_bytes: int) -> list[tuple[list[Slot], int]]:
    """Slots and elements of every bucket."""
    drafts: list[tuple[list[Slot], int]] = []
    latest: dict[tuple[object, ...], int] = {}
    backwards = parameters[::-1]
    for parameter in sorted(backwards, key=lambda p: (p.group == FROZEN, not p.own, p.summed, p.group)):
        kind = (parameter.own, parameter.summed, parameter.tie, parameter.group, parameter.dtype, parameter.unit)
        align = max(1, ALIGNMENT_BYTES // parameter.dtype.itemsize)
        slots, elements = drafts[latest[kind]] if kind in latest else ([], 0)
        start = -(-elements // align) * align
        if not slots or (start + parameter.elements) * parameter.dtype.itemsize > bucket_bytes:
            slots, start = [], 0
            latest[kind] = len(drafts)
            drafts.append((slots, 0))
        slots.append(Slot(parameter, start))
        drafts[latest[kind]] = (slots, start + parameter.elements)
    return drafts
