"""The home of held blocks' state: where it lies between two updates, how an update reaches it, and what comes into it.

`InMemory` is the home beside the parameters, and on the host of a device; which of both, the segments' place says
(update_place.py). A file is another home (offload/state_place.py). A home holds, frees, shows and updates what it is
told to; which blocks those are, and what they begin with, is the affair of held blocks (held.py).

States from outside, another member's or a checkpoint's, must have what an update needs: one that lacks something, or
brings it in another form, is refused before anything of it counts (`numbers_of`, `check_masters`, `check_weights`).

`FillMemory` is memory for the state of blocks that a world fills: found for whole stretches, of which slices bring part
by part. So a slice is received where its blocks are to stay, and the parts of a stretch are one segment as they come.
Pages that nothing has come into yet take no memory. No group is known here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from shoal_protos.runs import NO_BLOCKS, Runs
from torch import Tensor

from shoal.blocks.loaded_state import AVERAGE, MASTER, WEIGHTS, LoadedState, State
from shoal.blocks.optimizer_step import Segment
from shoal.blocks.segments import HeldAverages, HeldWeights, Segments
from shoal.blocks.update_place import Coming
from shoal.blocks.values import BlockValues, FindMemory, StretchValues
from shoal.core.layout import Layout, Stretch, overlaps
from shoal.optim.hyper import has_turn
from shoal.process.device import DeviceCopy
from shoal.process.host_memory import memory_on

PART_BYTES = 16 << 20
"""Of parameters that are updated by one step of the optimizer: far more than the step costs besides."""

OnUpdated = Callable[[int], None]
"""Called with a bucket's number."""


def unheard(_: int) -> None:
    """The `OnUpdated` of an update whose pieces are not waited for."""


class FirstStates:
    """What blocks have in step 0. `first`: the parameters' first values, in wide dtypes, where they are given; `kept`:
    the parameters, where they are to be with the state.
    """

    def __init__(
        self, layout: Layout, loaded: LoadedState, first: StretchValues | None, kept: StretchValues | None
    ) -> None:
        self._layout, self._loaded, self._first, self._kept = layout, loaded, first, kept

    def of(self, stretch: Stretch) -> State:  # each (elements of the stretch,), or ()
        """All of it."""
        return {**self._loaded.of(stretch), **self.weights_of(stretch)}

    def weights_of(self, stretch: Stretch) -> State:  # each (elements of the stretch,)
        """What tells the parameters, where they are with the state: themselves, or their master weights."""
        masters = self._masters_of(stretch)
        if masters or self._kept is None:
            return masters
        return {WEIGHTS: self._kept.of(stretch).clone() if self._first is None else self._first.of(stretch)}

    def part_of(self, _: Stretch, part: Stretch) -> State:  # each (elements of the part,), or ()
        """Of some blocks of a stretch, all but the parameters."""
        return {**self._loaded.of(part), **self._masters_of(part)}

    def _masters_of(self, stretch: Stretch) -> State:  # each (elements of the stretch,)
        if self._first is None or not self._layout.buckets[stretch.bucket].has_masters:
            return {}
        return {MASTER: self._first.of(stretch)}


class ReceivedStates:
    """What another holder had, or a checkpoint."""

    def __init__(
        self,
        layout: Layout,
        states: Mapping[Stretch, State],  # each (elements of the stretch,), or ()
    ) -> None:
        self._layout, self._states = layout, states

    def of(self, stretch: Stretch) -> State:  # each (elements of the stretch,), or ()
        return self._states[stretch]

    weights_of = of

    def part_of(self, stretch: Stretch, part: Stretch) -> State:  # each (elements of the part,), or ()
        size = self._layout.buckets[stretch.bucket].block_elements
        first, stop = ((at - stretch.start) * size for at in (part.start, part.stop))
        state = {key: value for key, value in self._states[stretch].items() if key != WEIGHTS}
        return {key: value[first:stop] if value.dim() else value for key, value in state.items()}


StateSource = FirstStates | ReceivedStates


class StateHome(Protocol):
    """Of the held blocks of one worker."""

    segments: Segments
    """What of it lies in memory."""
    bytes_per_second: float
    """At which the last update's state came from a file and went back; 0: none did."""

    @property
    def averages(self) -> HeldWeights:
        """Of weights, as others read them; before they begin, and of frozen blocks, the weights."""
        ...

    def expect(self, runs: Runs) -> None:
        """A world fills these: `memory_for` is asked for them."""

    def memory_for(self, stretch: Stretch, key: str, dtype: torch.dtype, /) -> Tensor:  # (elements,) of `dtype`
        """Where a state of expected blocks is received; not their parameters."""
        ...

    def put(self, stretches: Sequence[Stretch], source: StateSource) -> None:
        """The blocks of these are held from now on."""

    def keep_only(self, runs: Runs) -> None:
        """Frees every other block, of which there are some."""

    def join(self) -> None:
        """What was expected has come."""

    def states(
        self, runs: Runs, with_weights: bool = False
    ) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        """The state of held blocks, stretch by stretch, as views of memory or as copies: what a digest reads.

        `with_weights`: what a fill sends: parameters too, where they are kept with the state and no masters tell them.
        """
        ...

    def outline(self, runs: Runs) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        """Keys, sizes and dtypes of what `stream` brings, and the numbers that blocks share; no other values."""
        ...

    def stream(self, runs: Runs) -> Iterator[tuple[Stretch, State]]:  # each (elements of its stretch,), or ()
        """The state of held blocks, stretch by stretch: each is valid until the next is asked for."""
        ...

    def portions(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        """Parts of these stretches whose state may be in memory at one time, beside what is held."""
        ...

    def update(self, gradients: BlockValues, scale: float, on_updated: OnUpdated) -> None:
        """See `HeldBlocks.apply`. The twin of the optimizer has the hyper-parameters."""

    def state_bytes(self) -> int:
        """Bytes of all state held, counted over tensors."""
        ...

    def bytes_by_place(self) -> dict[str, int]:
        """What it takes between two steps: `state` is memory, `state_files` are bytes of files."""
        ...


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """Segments that are updated in one go."""

    segments: list[Segment]
    first_bucket: int
    """All that is held of it and of those after it is updated then."""


class InMemory:
    """A `StateHome`: state lies with its segments."""

    bytes_per_second = 0.0

    def __init__(self, segments: Segments) -> None:
        self.segments, self.averages = segments, HeldAverages(segments)
        self.expect(NO_BLOCKS)

    # ---- to hold

    def expect(self, runs: Runs) -> None:
        self._expected = FillMemory(self.segments.layout, runs, self.segments.place_of_fills.memory)

    def memory_for(self, stretch: Stretch, key: str, dtype: torch.dtype, /) -> Tensor:  # (elements,) of `dtype`
        return self._expected.part(stretch, key, dtype)

    def put(self, stretches: Sequence[Stretch], source: StateSource) -> None:
        segments, made = self.segments, list[Segment]()
        for stretch in stretches:
            state = source.of(stretch)
            for part in segments.by_place(stretch):
                made.append(segments.make(part, state if part == stretch else self._cut(state, stretch, part)))
        segments.add(made, segments.layout.runs(stretches))

    def _cut(
        self,
        state: State,  # each (elements of the stretch,), or ()
        stretch: Stretch,
        part: Stretch,
    ) -> State:  # each (elements of the part,), or (): copies
        size = self.segments.layout.buckets[stretch.bucket].block_elements
        first, stop = ((at - stretch.start) * size for at in (part.start, part.stop))
        return {key: (value[first:stop] if value.dim() else value).clone() for key, value in state.items()}

    def keep_only(self, runs: Runs) -> None:
        self.segments.keep_only(runs)

    def join(self) -> None:
        self.expect(NO_BLOCKS)

    # ---- to read

    def states(
        self, runs: Runs, with_weights: bool = False
    ) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        found: dict[Stretch, State] = {}
        wanted = self.segments.layout.stretches(runs)
        for segment in self.segments.in_order:
            left_out = () if with_weights and not segment.has_master else (WEIGHTS,)
            for stretch in overlaps(wanted, segment.stretch):
                state = self.segments.part_of(segment, stretch)
                found[stretch] = {key: value for key, value in state.items() if key not in left_out}
        return found

    def outline(self, runs: Runs) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        return self.states(runs)

    def stream(self, runs: Runs) -> Iterator[tuple[Stretch, State]]:  # each (elements of its stretch,), or ()
        yield from self.states(runs).items()

    def portions(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        yield list(stretches)

    # ---- the update

    def update(self, gradients: BlockValues, scale: float, on_updated: OnUpdated) -> None:
        """Part by part, so that the next part comes to the place while one is updated there."""
        segments, place = self.segments, self.segments.place
        place.begin_update()
        trained = trained_segments(segments.in_order, segments.layout, segments.twin)
        parts = parts_of(trained, segments.steps_in_parts)
        copies = CopiesUpdate(segments, gradients, [one for part in parts for one in part.segments])
        beside = [[one for one in part.segments if not one.is_on_host] for part in parts]
        coming = self._bring_down(beside[0], gradients)
        for index, part in enumerate(parts):
            following = self._bring_down(beside[index + 1], gradients) if index + 1 < len(parts) else []
            place.update(segments.optimizer_step, beside[index], coming, scale)
            if segments.averages_now:
                segments.average(beside[index], are_updated=True)
            copies.make(part.segments, scale)
            coming = following
            on_updated(part.first_bucket)
        copies.end()
        if segments.averages_now:
            self._average(without_a_turn(segments.in_order, segments.layout, segments.twin), gradients)

    def _average(self, unchanged: Sequence[Segment], gradients: BlockValues) -> None:
        """Of weights that were not updated now."""
        copies = CopiesUpdate(self.segments, gradients, unchanged)
        self.segments.average([one for one in unchanged if not one.is_on_host], are_updated=False)
        copies.make(unchanged, None)
        copies.end()

    def _bring_down(self, segments: Sequence[Segment], gradients: BlockValues) -> list[Coming]:
        place, parameters_of = self.segments.place, self.segments.parameters_of
        return [
            place.bring_down(gradients.of(one.stretch), parameters_of(one), None if one.has_master else one.parameter)
            for one in segments
        ]

    # ---- what it takes

    def state_bytes(self) -> int:
        return sum(map(self.segments.bytes_of, self.segments.in_order))

    def bytes_by_place(self) -> dict[str, int]:
        """With the copies of parameters that the host updates; those that lie with the state are counted as weights."""
        own = [one for one in self.segments.in_order if not one.has_master]
        copied = [one for one in own if one.parameter.data_ptr() != self.segments.parameters_of(one).data_ptr()]
        return {"state": self.state_bytes() + sum(one.parameter.nbytes for one in copied)}


PIECE_ELEMENTS = 1 << 18
"""Of a copy that goes through the device: a mebibyte of each tensor, far more than a transfer costs to begin."""


@dataclass(slots=True)
class _Piece:
    """Of a copy on the host. `update`: the same on the device."""

    of: Segment
    update: Segment
    coming: Coming
    is_last: bool


class CopiesUpdate:
    """One update of the copies on the host among segments, in their order: piece by piece through the device, where
    their owners' kernels run. One comes up while another is updated, and one goes down.
    """

    def __init__(self, segments: Segments, gradients: BlockValues, trained: Sequence[Segment]) -> None:
        self._segments, self._gradients = segments, gradients
        self._copies = [one for one in trained if one.is_on_host]
        self._brought = self._bring()
        self._next = next(self._brought, None)
        self._made: State = {}
        """What the optimizer makes of the segment at hand that it had not before."""
        self._going: tuple[list[DeviceCopy], list[DeviceCopy]] = [], []
        """Down: those of the piece before the last, and of the last."""

    def make(self, segments: Sequence[Segment], scale: float | None) -> None:
        """Of the next ones. `scale`: None: their weights enter averages alone."""
        last = next((one for one in reversed(segments) if one.is_on_host), None)
        while last is not None and (piece := self._next) is not None:
            self._next = next(self._brought, None)
            self._update(piece, scale)
            if piece.is_last and piece.of is last:
                break

    def end(self) -> None:
        """All of it lies on the host again, and nothing refers to what was on the device."""
        if self._copies:
            for group in self._segments.twin.param_groups:
                group["params"] = []
        for copy in (one for copies in self._going for one in copies):
            copy.wait()

    def _bring(self) -> Iterator[_Piece]:
        """Each when it is asked for."""
        for of in self._copies:
            size = max(1, PIECE_ELEMENTS // self._segments.layout.buckets[of.stretch.bucket].block_elements)
            for start in range(of.stretch.start, of.stretch.stop, size):
                stop = min(of.stretch.stop, start + size)
                yield self._piece(of, Stretch(of.stretch.bucket, start, stop), stop == of.stretch.stop)

    def _piece(self, of: Segment, stretch: Stretch, is_last: bool) -> _Piece:
        segments, place = self._segments, self._segments.copies
        assert place is not None, "a copy lies on the host"
        state = segments.part_of(of, stretch)
        rounded = state.pop(WEIGHTS) if of.has_master and of.weights is not None else None
        state = {key: place.bring_up(one) if one.dim() else one.clone() for key, one in state.items()}
        master, average, weights = state.pop(MASTER, None), state.pop(AVERAGE, None), state.pop(WEIGHTS, None)
        if rounded is not None:  # what the update makes of the master weights
            weights = torch.empty_like(rounded, device=segments.layout.device)
        parameters = weights if weights is not None else segments.parameters.of(stretch)
        update = Segment(stretch, parameters if master is None else master, of.has_master, weights, average)
        segments.give_state(update, state)
        return _Piece(of, update, Coming(place.bring_up(self._gradients.of(stretch)), parameters, []), is_last)

    def _update(self, piece: _Piece, scale: float | None) -> None:
        segments = self._segments
        if scale is not None:
            segments.place.update(segments.optimizer_step, [piece.update], [piece.coming], scale)
        if segments.averages_now:
            segments.average([piece.update], are_updated=True)
        state = segments.state_of(piece.update)
        if scale is None:
            state = {AVERAGE: state[AVERAGE]}
        segments.twin.state.pop(piece.update.parameter, None)
        for copy in self._going[0]:
            copy.wait()
        self._going = self._going[1], self._bring_down(piece, state)
        if piece.is_last:
            numbers = {key: one for key, one in state.items() if not one.dim()}
            piece.of.average = self._made.pop(AVERAGE, piece.of.average)
            segments.give_state(piece.of, {**self._made, **numbers})
            self._made = {}

    def _bring_down(
        self,
        piece: _Piece,
        state: State,  # each (elements of the piece,) on the device, or ()
    ) -> list[DeviceCopy]:
        """Begins to copy it to where it lies on the host."""
        place, layout = self._segments.copies, self._segments.layout
        assert place is not None, "a copy lies on the host"
        kept, (start, stop) = self._segments.state_of(piece.of), layout.elements(piece.of.stretch)
        first, last = (at - start for at in layout.elements(piece.update.stretch))
        copies = list[DeviceCopy]()
        for key, value in ((key, one) for key, one in state.items() if one.dim()):
            if key not in kept and key not in self._made:
                self._made[key] = place.memory(stop - start, value.dtype)
            copies.append(place.device.to_host(value, {**self._made, **kept}[key][first:last]))
        return copies


def trained_segments(segments: list[Segment], layout: Layout, twin: torch.optim.Optimizer) -> list[Segment]:
    """Those that are not frozen, of groups whose turn it is."""
    buckets, turns = layout.buckets, [has_turn(group) for group in twin.param_groups]
    return [
        segment
        for segment, bucket in ((segment, buckets[segment.stretch.bucket]) for segment in segments)
        if not bucket.is_frozen and turns[bucket.group]
    ]


def without_a_turn(segments: list[Segment], layout: Layout, twin: torch.optim.Optimizer) -> list[Segment]:
    """Those that are not frozen, and are not updated now: their weights enter averages all the same."""
    buckets, turns = layout.buckets, [has_turn(group) for group in twin.param_groups]
    trained = ((segment, buckets[segment.stretch.bucket]) for segment in segments)
    return [segment for segment, bucket in trained if not (bucket.is_frozen or turns[bucket.group])]


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


def numbers_of(layout: Layout, stretches: Collection[Stretch]) -> Runs:
    """Block numbers. Raises `ValueError` for stretches that lie in no bucket."""
    for stretch in stretches:
        is_in = 0 <= stretch.bucket < len(layout.buckets) and stretch.stop <= layout.buckets[stretch.bucket].blocks
        if not is_in or not 0 <= stretch.start < stretch.stop:
            raise ValueError(f"{stretch} lies in no bucket")
    return layout.runs(stretches)


def check_masters(
    layout: Layout,
    states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
) -> None:
    """Raises `ValueError` where states lack master weights, or have others than an update needs."""
    for stretch, state in states.items():
        bucket, master = layout.buckets[stretch.bucket], state.get(MASTER)
        if not bucket.has_masters or (master is not None and master.dim() and master.dtype == bucket.wide_dtype):
            continue
        raise ValueError(f"{_named(stretch)} need one {bucket.wide_dtype} master weight per element; {_found(master)}")


def check_averages(
    layout: Layout,
    states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
) -> None:
    """Raises `ValueError` for averages that are not of the masters' dtype, one for each element."""
    for stretch, state in states.items():
        dtype, average = layout.buckets[stretch.bucket].wide_dtype, state.get(AVERAGE)
        if average is not None and not (average.dim() and average.dtype == dtype):
            raise ValueError(f"{_named(stretch)} need one {dtype} average per element; {_found(average)}")


def check_weights(
    layout: Layout,
    states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
) -> None:
    """Raises `ValueError` where they lack parameters that are kept with the state and that no masters tell."""
    for stretch, state in states.items():
        bucket, weights = layout.buckets[stretch.bucket], state.get(WEIGHTS)
        if bucket.has_masters or (weights is not None and weights.dim() and weights.dtype == bucket.dtype):
            continue
        raise ValueError(f"{_named(stretch)} need one {bucket.dtype} parameter per element; {_found(weights)}")


def _named(stretch: Stretch) -> str:
    return f"blocks {stretch.start} to {stretch.stop - 1} of bucket {stretch.bucket}"


def _found(
    value: Tensor | None,  # of any shape
) -> str:
    return "found none" if value is None else f"found {value.dtype} of shape {tuple(value.shape)}"


class FillMemory:
    """`runs`: all blocks that are still to be filled. `find`: where, if not beside the parameters."""

    def __init__(self, layout: Layout, runs: Runs, find: FindMemory | None = None) -> None:
        self._layout, self._find = layout, find or partial(memory_on, layout.device)
        self.runs, self._wholes = runs, layout.stretches(runs)
        self._found: dict[tuple[Stretch, str, torch.dtype], Tensor] = {}

    def part(self, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (stretch's elements,) of `dtype`
        """Where the state `key` of a stretch of these blocks is to lie."""
        whole = self._wholes[bisect_right(self._wholes, (stretch.bucket, stretch.start), key=_begin) - 1]
        assert whole.bucket == stretch.bucket and stretch.stop <= whole.stop, f"{stretch} is not among {self._wholes}"
        size = self._layout.buckets[stretch.bucket].block_elements
        if (whole, key, dtype) not in self._found:
            self._found[whole, key, dtype] = self._find(whole.blocks * size, dtype)
        first, last = ((at - whole.start) * size for at in (stretch.start, stretch.stop))
        return self._found[whole, key, dtype][first:last]


def _begin(stretch: Stretch) -> tuple[int, int]:
    return stretch.bucket, stretch.start
