"""The layout: parameters → buckets → blocks. The same in every stage, in every world, on every worker.

A bucket holds parameters of one unit, one optimizer group and one dtype: groups in the optimizer's order, parameters in
reverse registration order (the order in which backward finishes them), each at a 64-byte multiple; it is padded with
zeros to whole blocks. Pure: shapes and dtypes only, no tensor is touched.

Parameters that need no gradient (frozen) may be in buckets of their own, behind all others: such blocks have no state,
and are in no fingerprint. `Layout.trained` is the layout without them, which is the same wherever they are kept.

Block numbers are striped: blocks are numbered across the buckets, by their relative place in their bucket. So a run of
numbers is one slice of every bucket, and any owner of long runs has its share of every bucket's traffic.

Where several processes train a lane together (a cell), some parameters are divided among its places, and the others are
common to it (cell_part.py). A layout has the buckets of one coordinate, divided ones first, and block numbers are the
job's: by division the blocks of its first part, of its second one, and so on, then the common ones, each part striped
by itself. Coordinates of a stage that have a part alike are home to equal shares of its blocks. All lay out alike.

Each stage of a pipeline has parameters of its own, and so buckets of its own: its blocks, numbered as above, follow
those of the stages before. A layout knows all stages' buckets, and has those of its own coordinate.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from shoal_protos.runs import Runs, Span

from shoal.core.cell_part import COMMON, DIVISIONS, WHOLE, CellPart, Division
from shoal.core.cuts import Cut, Dealt
from shoal.core.ties import Copy, Tie

VERSION: Literal[2] = 2
"""Of the rules on this page: other ones put the same parameters into other blocks."""
SMALLEST_BLOCK = 4_096
MOST_BLOCKS = 65_536
FROZEN = -1
"""The group of parameters that no optimizer changes."""
MemoryFor = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # of that shape and dtype
"""Memory for a tensor, without values."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """A parameter as the layout needs it: one that gets gradients, or a frozen one that is kept in blocks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    unit: int = 0
    """The wrapped module that it belongs to (units.py)."""
    division: Division = COMMON
    """Among which places of a cell it is divided."""
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
    copies: tuple[Copy, ...] = field(default=(), compare=False)
    """Of one that further stages at its place have, too: what they have."""
    dealt: Dealt | None = field(default=None, compare=False)
    """Of an expert's, or one that would be with more places of `expert`: where its number is; None: not known."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def own(self) -> bool:
        """Whether no other place of the tensor dimension has it."""
        return self.division.by_tensor

    @property
    def is_one_of_several(self) -> bool:
        """Whether each place of the experts has one of this name, which is another tensor of the model."""
        return self.division.by_expert and self.dealt is not None and self.dealt.is_named

    @property
    def is_part(self) -> bool:
        """Whether other places of a cell have other parts of the same tensor of the model."""
        return self.own or (self.division.by_expert and self.dealt is not None and not self.dealt.is_named)

    def whole_shape(self, parts: int, experts: int) -> tuple[int, ...]:
        """With those of all other places of `tensor` and `expert`, as far as it is known how they are divided."""
        shape = self.cut.whole_shape(self.shape, parts) if self.own and self.cut is not None else self.shape
        if not self.division.by_expert or self.dealt is None or self.dealt.is_named:
            return shape
        return Cut(self.dealt.dim).whole_shape(shape, experts)

    def in_one_process(self, part: CellPart) -> Trainable:
        """The same where it is not divided, under its name here."""
        return replace(self, shape=self.whole_shape(part.parts, part.experts), division=COMMON)

    def whole_names(self, experts: int) -> list[str]:
        """Of the model's tensors that places of the experts have under its name."""
        if not self.is_one_of_several or self.dealt is None:
            return [self.name]
        return [self.dealt.whole_name(self.name, place) for place in range(experts)]

    def joined(
        self,
        parts: Sequence[torch.Tensor],  # by piece (cell_part.py), each of its shape
        experts: int,
        memory: MemoryFor = lambda shape, dtype: torch.empty(shape, dtype=dtype),
    ) -> Iterator[torch.Tensor]:  # each of the whole's shape
        """The model's tensors of these parts, in the order of `whole_names`. `memory`: for one of several parts; where
        it is the same again, a tensor is there until the next is asked for.
        """
        count = len(parts) // (experts if self.division.by_expert else 1)
        rows = [parts[first : first + count] for first in range(0, len(parts), count)]
        are_apart = self.is_one_of_several or self.dealt is None or not self.division.by_expert
        for of_one in [[row] for row in rows] if are_apart else [rows]:
            if len(of_one) == 1 and (self.cut is None or not self.own):
                yield of_one[0][0]
                continue
            whole = memory(self.whole_shape(count, experts), of_one[0][0].dtype)
            of_places = whole.chunk(len(of_one), self.dealt.dim) if self.dealt and len(of_one) > 1 else [whole]
            for of_place, row in zip(of_places, of_one, strict=True):
                if self.cut is not None and self.own:
                    self.cut.join(row, of_place)
                else:
                    of_place.copy_(row[0])
            yield whole


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
    def division(self) -> Division:
        """Among which places of a cell it is divided."""
        return self.slots[0].parameter.division if self.slots else COMMON

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

    def of_stages(self) -> Iterator[tuple[int, Bucket]]:
        """The buckets of all stages, each with the number of its stage."""
        return ((stage, bucket) for stage, buckets in enumerate(self.by_stage) for bucket in buckets)

    def wholes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """The parameters of the model in one process, those of all stages: name, shape and dtype."""
        for one in (slot.parameter for slot in slots_of_all_stages(self)):
            shape = one.whole_shape(self.part.parts, self.part.experts)
            yield from ((name, shape, one.dtype) for name in one.whole_names(self.part.experts))

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """By number, the optimizer's group of each of the job's parameters."""
        return tuple(bucket.group for bucket, *_ in numbered(self))

    @cached_property
    def parameter_numbers(self) -> tuple[tuple[range, ...], ...]:
        """By coordinate, and by bucket that it has, the numbers of its parameters."""
        parts = [replace(self.part, coordinate=one) for one in range(self.part.coordinates)]
        found, first = [list[range]() for _ in parts], 0
        for stage, bucket in self.of_stages():
            count, division = len(bucket.slots), bucket.division.of_experts
            for part, its in zip(parts, found, strict=True):
                if stage == part.place:
                    start = first + count * part.piece(division)
                    its.append(range(start, start + count))
            first += count * self.part.pieces(division)
        return tuple(map(tuple, found))

    @cached_property
    def blocks(self) -> int:
        """How many blocks the job has: those here, and those of all other parts of the model."""
        return self._first_of(len(self.by_stage))

    @cached_property
    def _counts(self) -> tuple[dict[Division, int], ...]:
        """By stage and division, the blocks that each part has."""
        return tuple(
            {one: sum(bucket.blocks for bucket in buckets if bucket.division == one) for one in DIVISIONS}
            for buckets in self.by_stage
        )

    def _first_of(self, stage: int) -> int:
        """The first block of a stage."""
        return sum(self.part.pieces(one) * count for of in self._counts[:stage] for one, count in of.items())

    @cached_property
    def all_blocks(self) -> Runs:
        """Those of the model of this coordinate."""
        return self.model_at(self.part.coordinate)

    def model_at(self, coordinate: int) -> Runs:
        """The blocks whose parameters the model of a coordinate has."""
        part = replace(self.part, coordinate=coordinate)
        return Runs(self._blocks_of(part, one, 0, 1) for one in DIVISIONS)

    def home_of(self, coordinate: int) -> Runs:
        """The blocks that only members at this coordinate own and mirror: of all that it has, an equal share with each
        coordinate that has them, too.
        """
        part = replace(self.part, coordinate=coordinate)
        return Runs(self._blocks_of(part, one, *part.share(one)) for one in DIVISIONS)

    def _blocks_of(self, part: CellPart, division: Division, index: int, of: int) -> Span:
        """One of several equal shares of what a coordinate has of a division."""
        first, counts = self._first_of(part.place), self._counts[part.place]
        first += sum(part.pieces(one) * counts[one] for one in DIVISIONS[: DIVISIONS.index(division)])
        first += part.piece(division) * counts[division]
        start, stop = _share(counts[division], index, of)
        return first + start, first + stop

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(bucket, position in it) of every block of `all_blocks`, in their order."""
        order = sorted(
            # equal fractions are equal
            (DIVISIONS.index(bucket.division), (position + 0.5) / bucket.blocks, bucket.index, position)
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
            experts = f" with {self.part.experts} places of experts" if self.part.experts > 1 else ""
            lines.append(f"cells of {self.part.coordinates}{contexts}{experts}")
        for stage, buckets in enumerate(self.by_stage):
            lines += [f"stage {stage} of {len(self.stages)}"] if self.stages else []
            for bucket in buckets:
                own = " of experts" * bucket.division.by_expert + " own" * bucket.division.by_tensor
                lines.append(f"bucket {bucket.index} group {bucket.group} {bucket.dtype} blocks {bucket.blocks}{own}")
                lines += [f"{slot.start} {slot.parameter.name} {slot.parameter.shape}" for slot in bucket.slots]
        return "\n".join(lines)

    def digest(self) -> bytes:
        """SHA-256 of `text()`."""
        return hashlib.sha256(self.text().encode()).digest()


def _share(blocks: int, index: int, of: int) -> Span:
    """One of several equal shares."""
    return blocks * index // of, blocks * (index + 1) // of


def slots_of_all_stages(layout: Layout) -> Iterator[Slot]:
    """In the order of stages and buckets."""
    return (slot for buckets in layout.by_stage for bucket in buckets for slot in bucket.slots)


def numbered(layout: Layout) -> Iterator[tuple[Bucket, int, Slot]]:
    """The job's parameters in the order of their numbers: by stage and bucket, those of experts by place. With a place
    of the experts that has each.
    """
    for _, bucket in layout.of_stages():
        for place in range(layout.part.pieces(bucket.division.of_experts)):
            yield from ((bucket, place, slot) for slot in bucket.slots)


class ListsOfExperts:
    """Modules in lists that are experts, as the marks of their parameters say: what else they have, as buffers, is
    numbered and dealt with them. Of a layout.
    """

    def __init__(self, layout: Layout) -> None:
        every = ((slot.parameter.name, slot.parameter.dealt) for slot in slots_of_all_stages(layout))
        self._counts = {
            dealt.list_of(name): dealt.of_place for name, dealt in every if dealt is not None and dealt.is_named
        }
        self._part = layout.part

    def whole_name(self, name: str, coordinate: int) -> str:
        """In one process, of what a coordinate has under this name."""
        dealt = self._dealt(name)
        return name if dealt is None else dealt.whole_name(name, self._place(coordinate))

    def name_at(self, whole: str, coordinate: int) -> str | None:
        """Where a coordinate has what has this name in one process; None: another place of the experts has it."""
        dealt = self._dealt(whole)
        if dealt is None:
            return whole
        place, name = dealt.found(whole, dealt.of_place)
        return name if place == self._place(coordinate) else None

    def _dealt(self, name: str) -> Dealt | None:
        for start, count in self._counts.items():
            number, *rest = name.removeprefix(start).split(".")
            if name.startswith(start) and number.isdecimal():
                return Dealt(level=len(rest), of_place=count)
        return None

    def _place(self, coordinate: int) -> int:
        return replace(self._part, coordinate=coordinate).piece(Division(by_expert=True))


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
