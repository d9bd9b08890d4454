"""The optimizer state of the blocks that this worker holds, and the update of just these blocks.

The user's own optimizer class runs on flat runs of blocks (segments): a shallow twin of the user's object has one flat
"parameter" per segment: a view of the parameters, or, where these are in half precision, the segment's master weights,
which are a part of its state. Its hyper-parameters are read from the user's object each step.
Right for every optimizer that works element by element; segments are cut at block boundaries only, because fused
kernels give the bits of the whole tensor on no other slices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from shoal_protos.runs import NO_BLOCKS, Runs, Span
from torch import Tensor

from shoal.blocks.fill_memory import FillMemory, FindMemory
from shoal.blocks.loaded_state import GivenStates, LoadedState, State, probe_state_bytes
from shoal.blocks.optimizer_step import OptimizerStep, Segment
from shoal.blocks.shared_weights import SharedWeights
from shoal.blocks.state_home import WEIGHTS, BesideParameters, OnTheHost
from shoal.blocks.values import BlockValues, StretchValues
from shoal.core.layout import Layout, Stretch, overlaps
from shoal.optim.hyper import has_turn
from shoal.optim.step_effects import effects_of_steps
from shoal.optim.twin import (
    carried,
    give_back_own_values,
    given_back,
    may_step_in_parts,
    take_over_hyper_parameters,
    twin_of,
)
from shoal.process.host_memory import memory_on

PART_BYTES = 16 << 20
"""Of parameters that are updated by one step of the optimizer: far more than the step costs besides."""

MASTER = "master"
"""The key of master weights."""

SEGMENTS_PER_BUCKET = 4
"""More make an update slower than it need be; fewer are not worth the copy that joins them."""


OnUpdated = Callable[[int], None]
"""Called with a bucket's number."""


MayBeOne = Callable[[State, State], bool]  # each (elements,), or ()
"""Whether two states that follow each other are worth being one."""


def unheard(_: int) -> None:
    """The `OnUpdated` of an update that nobody waits for."""


def stretch_of(segment: Segment) -> Stretch:
    """What segments are sorted by."""
    return segment.stretch


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """Segments that are updated in one go."""

    segments: list[Segment]
    first_bucket: int
    """All that is held of it and of those after it is updated then."""


class HeldBlocks:
    """Which blocks this worker holds with valid bits, their state, and `apply`, the update."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        keeps_weights: bool = False,
    ) -> None:
        """`tensors`: the user's parameter objects by name, under which a state that exists already is found.

        `keeps_weights`: parameters are with the state; `parameters` are their first values.
        """
        self.keeps_weights = keeps_weights
        self.lock = threading.Lock()
        """Held by whoever changes which segments there are, or reads them on another thread."""
        self.revision = 0
        """Of the segments: it grows whenever they are others."""
        self.layout = layout
        self._user = optimizer
        self._twin, self.effects = twin_of(optimizer), effects_of_steps(optimizer, layout)
        self.loaded = LoadedState(layout, optimizer, tensors, self.effects.only_counts)
        self.optimizer_step = OptimizerStep(self._twin, layout, stands_in=bool(self.effects.moved))
        self._parameters = parameters
        self._segments: list[Segment] = []
        self.runs = NO_BLOCKS
        """The blocks that are held."""
        self.bytes_per_second = 0.0
        """At which the last update's state came from a file and went back; 0: none did."""
        self._find_weights: FindMemory | None = None
        """Where parameters are received; None: beside those that forwards compute with."""
        self._expected = FillMemory(layout, NO_BLOCKS)
        self._home: BesideParameters | OnTheHost = BesideParameters(layout, optimizer)
        self.shared: SharedWeights | None = None
        """Where parameters lie that are with the state; set before anything is held. None: in memory of their own."""

    def state_bytes(self) -> int:
        """Bytes of all state held, counted over tensors."""
        states = (self._state(segment) for segment in self._segments)
        return sum(value.nbytes for state in states for key, value in state.items() if key != WEIGHTS)

    def bytes_by_place(self) -> dict[str, int]:
        """What it takes between two steps: `state` is memory, `state_files` are bytes of files."""
        return {"state": self.state_bytes()}

    def state_bytes_of_a_block(self) -> int:
        """What one block's state takes, also before there is any."""
        return probe_state_bytes(self.layout, self._twin)

    @property
    def segments(self) -> list[Segment]:
        """In the order of their stretches. To be read only; another list is put in its place, under `lock`."""
        return self._segments

    def _state(self, segment: Segment) -> State:  # each (elements of the segment,), or ()
        found: State = carried(self._twin.state[segment.parameter])
        if segment.has_master:
            found[MASTER] = segment.parameter
        if segment.weights is not None:
            found[WEIGHTS] = segment.weights
        return found

    def hold(self, runs: Runs, first: StretchValues | None = None) -> None:
        """Begins to hold blocks in the state of step 0. `first`: the parameters' first values, in wide dtypes."""
        segments, kept = list(self._segments), self._parameters if self.keeps_weights else None
        for stretch in self.layout.stretches(runs):
            state = {**self.loaded.of(stretch), **first_weights(self.layout, stretch, first, kept)}
            segments.append(self._segment(stretch, state))
        self._regroup(sorted(segments, key=stretch_of), self.runs | runs)

    def begin_with(self, given: GivenStates) -> None:
        """What `hold` begins with comes from there; see `LoadedState.take`."""
        self.loaded.take(given)

    def expect(self, runs: Runs) -> None:
        """The blocks that a world fills, at its beginning: `memory_for` is asked for these."""
        if self.shared is not None:
            self.shared.give_back(self.layout.stretches(self._expected.runs - self.runs - runs))
        self._expected = FillMemory(self.layout, runs, self._find_weights)

    def memory_for(self, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        """Where a state of expected blocks is received, for `take`: whatever is taken of one stretch is one segment."""
        if key == WEIGHTS and self.shared is not None and not self.layout.runs([stretch]) & self.runs:
            return self.shared.part(stretch)
        return self._expected.part(stretch, key, dtype)

    def take(
        self,
        states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
    ) -> None:
        """Begins to hold blocks in the state that another holder had.

        What is held already is replaced: a plan may fill again what the one before had filled and it releases.
        """
        taken = self.layout.runs(states)
        self._keep_only(self.runs - taken)
        segments = [*self._segments, *(self._segment(stretch, state) for stretch, state in states.items())]
        self._regroup(sorted(segments, key=stretch_of), self.runs | taken)
        self._join_where(lie_together)

    def _segment(
        self,
        stretch: Stretch,
        state: State,  # each (elements of the stretch,), or () for what all its blocks share
    ) -> Segment:
        bucket = self.layout.buckets[stretch.bucket]
        state = self._home.bring(bucket, state)
        has_master = MASTER in state and bucket.has_masters
        weights = self._weights(stretch, state, has_master) if self.keeps_weights else None
        parameter = state[MASTER] if has_master else self._parameters.of(stretch) if weights is None else weights
        apart = {MASTER} if has_master else set()
        own = {key: value for key, value in state.items() if key not in apart and key != WEIGHTS}
        if own:
            numbers = self.effects.numbers.get((bucket.group, bucket.wide_dtype), {})
            self._twin.state[parameter].update(given_back(own, numbers))
        return Segment(stretch, parameter, has_master, weights)

    def _weights(
        self,
        stretch: Stretch,
        state: State,  # each (elements of the stretch,), or () for what all its blocks share
        has_master: bool,
    ) -> Tensor:  # (elements of the stretch,) of the bucket's dtype
        """Those given, else the masters rounded, else memory that a reader fills."""
        dtype = self.layout.buckets[stretch.bucket].dtype
        given = state[WEIGHTS] if WEIGHTS in state else state[MASTER].to(dtype) if has_master else None
        if self.shared is not None:
            return self.shared.put(stretch, given)
        if given is not None:
            return given
        elements = stretch.blocks * self.layout.buckets[stretch.bucket].block_elements
        return memory_on(self.layout.device, elements, dtype)

    def keep_only(self, runs: Runs) -> None:
        """Frees every other block; pieces that stay of a cut segment are copied, so that the memory is given back:
        segment by segment, so that no more than one is there twice.
        """
        if not self.runs <= runs:
            self._begin_change()
            self._keep_only(runs)

    def _keep_only(self, runs: Runs) -> None:
        """What nobody reads here goes."""
        if self.runs <= runs:
            return
        index, wanted = 0, self.layout.stretches(runs)
        while index < len(self._segments):
            segment = self._segments[index]
            stays = overlaps(wanted, segment.stretch)
            if stays != [segment.stretch]:
                parts = [self._split_off(segment, stretch) for stretch in stays]
                self._twin.state.pop(segment.parameter, None)  # nothing there before the first step
                self._regroup(self._segments[:index] + parts + self._segments[index + 1 :], self.runs)
            index += len(stays)
        if self.shared is not None:
            self.shared.give_back(self.layout.stretches(self.runs - runs))
        self.runs &= runs

    def _begin_change(self) -> None:
        """Of parameters that others may see."""
        if self.shared is not None:
            self.shared.begin_change()

    def _split_off(self, segment: Segment, stretch: Stretch) -> Segment:
        first, last = _within(segment, stretch, self.layout)
        state = {key: _cut(value, first, last) for key, value in self._state(segment).items()}
        stays = {WEIGHTS} if self.shared is not None else set()
        return self._segment(stretch, {key: one if key in stays else one.clone() for key, one in state.items()})

    def join(self) -> None:
        """What was expected has come. Makes neighbours of one bucket one segment, if there are so many that it is worth
        a copy: else a job would get slower with every change.
        """
        self._expected = FillMemory(self.layout, NO_BLOCKS)
        if len(self._segments) > SEGMENTS_PER_BUCKET * len(self.layout.buckets):
            self._join_where(_anyhow)

    def _join_where(self, may_be_one: MayBeOne) -> None:
        """Run by run, so that no more than one is there twice."""
        first = 0
        while first < len(self._segments):
            stop = first + 1
            segments = self._segments
            while stop < len(segments) and self._is_continued(segments[stop - 1], segments[stop], may_be_one):
                stop += 1
            if stop > first + 1:
                whole = self._join_run(segments[first:stop])
                self._regroup([*segments[:first], whole, *segments[stop:]], self.runs)
            first += 1

    def _is_continued(self, segment: Segment, other: Segment, may_be_one: MayBeOne) -> bool:
        """Whether `other` is the next stretch of the bucket, and the numbers that all its blocks share are equal."""
        if (segment.stretch.bucket, segment.stretch.stop) != (other.stretch.bucket, other.stretch.start):
            return False
        mine, theirs = self._state(segment), self._state(other)
        are_alike = mine.keys() == theirs.keys() and all(
            value is theirs[key] or (value.dim() == theirs[key].dim() and (value.dim() or value.equal(theirs[key])))
            for key, value in mine.items()
        )
        return are_alike and may_be_one(mine, theirs)

    def _join_run(self, segments: list[Segment]) -> Segment:
        states = [self._state(segment) for segment in segments]
        for segment in segments:
            self._twin.state.pop(segment.parameter, None)
        first, last = segments[0].stretch, segments[-1].stretch
        state: State = {}
        for key in [*states[0]]:
            parts = [one.pop(key) for one in states]  # each is gone before the next is copied
            state[key] = parts[0] if parts[0].dim() == 0 else _in_one_piece(parts)
        return self._segment(Stretch(first.bucket, first.start, last.stop), state)

    def _regroup(self, segments: list[Segment], runs: Runs) -> None:
        """`segments`: in the order of their stretches."""
        with self.lock:
            self.runs, self._segments = runs, segments
            self.revision += 1

    def states(
        self, runs: Runs, with_weights: bool = False
    ) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        """The state of held blocks, stretch by stretch, as views: what a digest reads.

        `with_weights`: what a fill sends: parameters too, where they are kept with the state and no masters tell them.
        """
        found: dict[Stretch, State] = {}
        wanted = self.layout.stretches(runs)
        for segment in self._segments:
            left_out = () if with_weights and not segment.has_master else (WEIGHTS,)
            for stretch in overlaps(wanted, segment.stretch):
                first, last = _within(segment, stretch, self.layout)
                state = {key: value for key, value in self._state(segment).items() if key not in left_out}
                found[stretch] = {key: _cut(value, first, last) for key, value in state.items()}
        return found

    def outline(self, runs: Runs) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        """Keys, sizes and dtypes of what `stream` brings, and the numbers that blocks share; no other values."""
        return self.states(runs)

    def stream(self, runs: Runs) -> Iterator[tuple[Stretch, State]]:  # each (elements of its stretch,), or ()
        """The state of held blocks, stretch by stretch: each is valid until the next is asked for."""
        yield from self.states(runs).items()

    def portions(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        """Parts of these stretches whose state may be in memory at one time, beside what is held."""
        yield list(stretches)

    def apply(
        self,
        gradients: BlockValues,  # reduced; what is not held is not read
        scale: float,
        on_updated: OnUpdated = unheard,
    ) -> None:
        """One update of all held blocks with the reduced gradients, times `scale` (clipping) first.

        The last buckets come first, as forwards begin with them. `on_updated` hears of a bucket when it and those after
        it are updated; not of each.
        """
        self._begin_change()
        take_over_hyper_parameters(self._twin, self._user)
        for part in parts_of(trained_segments(self._segments, self.layout, self._twin), may_step_in_parts(self._user)):
            self._apply_to(part.segments, gradients, scale)
            on_updated(part.first_bucket)
        give_back_own_values(self._twin, self._user)

    def _apply_to(
        self,
        segments: list[Segment],
        gradients: BlockValues,
        scale: float,
    ) -> None:
        self.optimizer_step.make(segments, [gradients.of(segment.stretch) for segment in segments], scale)
        masters = [segment for segment in segments if segment.has_master]
        if masters:
            rounded = [
                self._parameters.of(segment.stretch) if segment.weights is None else segment.weights
                for segment in masters
            ]
            torch._foreach_copy_(rounded, [segment.parameter for segment in masters])


def trained_segments(segments: list[Segment], layout: Layout, twin: torch.optim.Optimizer) -> list[Segment]:
    """Those that are not frozen, of groups whose turn it is."""
    buckets, turns = layout.buckets, [has_turn(group) for group in twin.param_groups]
    return [
        segment
        for segment, bucket in ((segment, buckets[segment.stretch.bucket]) for segment in segments)
        if not bucket.is_frozen and turns[bucket.group]
    ]


def first_weights(
    layout: Layout, stretch: Stretch, first: StretchValues | None, kept: StretchValues | None
) -> State:  # each (elements of the stretch,)
    """Master weights from the first values, where they are given; else parameters, where they are with the state (then
    `kept` has them too).
    """
    if first is not None and layout.buckets[stretch.bucket].has_masters:
        return {MASTER: first.of(stretch)}
    if kept is None:
        return {}
    return {WEIGHTS: kept.of(stretch).clone() if first is None else first.of(stretch)}


def parts_of(segments: list[Segment], may_be_several: bool) -> list[UpdatePart]:
    """From the last bucket to the first; a bucket is in one part, and its segments are in their order."""
    parts, stop, size = list[UpdatePart](), len(segments), 0
    if may_be_several:
        for index in range(len(segments) - 1, 0, -1):
            one, following = segments[index].stretch.bucket, segments[index - 1].stretch.bucket
            size += segments[index].parameter.nbytes
            if size >= PART_BYTES and following != one:
                parts.append(UpdatePart(segments[index:stop], one))
                stop, size = index, 0
    return [*parts, UpdatePart(segments[:stop], 0)]


def _within(segment: Segment, stretch: Stretch, layout: Layout) -> Span:
    """The elements of a segment that are a stretch of it."""
    size, start = layout.buckets[segment.stretch.bucket].block_elements, segment.stretch.start
    return (stretch.start - start) * size, (stretch.stop - start) * size


def _cut(
    value: Tensor,  # (elements,) or ()
    first: int,
    last: int,
) -> Tensor:  # (last - first,), or () as it is
    return value if value.dim() == 0 else value[first:last]


def _anyhow(
    _: State,  # each (elements,), or ()
    __: State,  # each (elements,), or ()
) -> bool:
    """Wherever two states lie."""
    return True


def lie_together(
    mine: State,  # each (elements,), or ()
    theirs: State,  # each (elements,), or ()
) -> bool:
    """Whether one continues the other in memory, so that joining them copies nothing."""
    return all(_are_adjacent(value, theirs[key]) for key, value in mine.items() if value.dim())


def _are_adjacent(
    left: Tensor,  # (elements,)
    right: Tensor,  # (elements,)
) -> bool:
    """Whether the one ends where the other begins, in memory that was found as one."""
    is_one = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return is_one and left.data_ptr() + left.nbytes == right.data_ptr()


def _in_one_piece(
    parts: Sequence[Tensor],  # each (elements,), of one dtype
) -> Tensor:  # (sum of their elements,)
    """A view where they lie so in memory, a copy elsewhere."""
    total = sum(part.numel() for part in parts)
    if all(map(_are_adjacent, parts, parts[1:])):
        return parts[0].as_strided((total,), (1,))
    return torch.cat(list(parts), out=memory_on(parts[0].device, total, parts[0].dtype))
