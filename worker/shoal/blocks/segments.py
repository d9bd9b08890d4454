"""Blocks that lie in memory, in flat runs (segments): each is a "parameter" of a twin of the user's optimizer.

The twin is a shallow one of the user's object: its hyper-parameters are read from that in each step. A segment's
"parameter" is a view of the parameters, or, where these are in half precision, the segment's master weights, which are
a part of its state. Right for every optimizer that works element by element; segments are cut at block boundaries only,
because fused kernels give the bits of the whole tensor on no other slices. Called by held blocks and by the home of
their state; knows no gradient. `HeldWeights` reads parameters that lie with their state, for hand-outs and fetches.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from shoal_protos.runs import NO_BLOCKS, Runs, Span
from torch import Tensor

from shoal.blocks.loaded_state import AVERAGE, MASTER, WEIGHTS, State
from shoal.blocks.optimizer_step import OptimizerStep, Segment
from shoal.blocks.shared_weights import SharedWeights
from shoal.blocks.update_place import CopiesOnHost, UpdatePlace
from shoal.blocks.values import BlockValues
from shoal.core.average_rule import AverageRule
from shoal.core.layout import Bucket, Layout, Stretch, overlaps
from shoal.core.value_places import Places
from shoal.optim.state_form import PLAIN_FORM, StateForm
from shoal.optim.twin import effects_of_steps, may_step_in_parts, twin_of
from shoal.process.host_memory import memory_on

SEGMENTS_PER_BUCKET = 4
"""More make an update slower than it need be; fewer are not worth the copy that joins them."""


def stretch_of(segment: Segment) -> Stretch:
    """What segments are sorted by."""
    return segment.stretch


class Segments:
    """Of one worker's held blocks. From another thread than the training's under `lock`."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        place: UpdatePlace,
        keeps_weights: bool = False,
    ) -> None:
        """`keeps_weights`: parameters are with the state; `parameters` are their first values."""
        self.layout, self.user, self.parameters, self.place = layout, optimizer, parameters, place
        self.keeps_weights = keeps_weights
        self.have_state = True
        """Whether state lies with them, and is updated so; else they are parameters alone."""
        self.lock = threading.Lock()
        """Held while it is changed which segments there are, and while they are read on another thread."""
        self.revision = 0
        """Of the segments: it grows whenever they are others."""
        self.twin, self.effects = twin_of(optimizer), effects_of_steps(optimizer, layout)
        self.steps_in_parts = may_step_in_parts(optimizer)
        self.optimizer_step = OptimizerStep(self.twin, layout, stands_in=bool(self.effects.moved))
        self.in_order: list[Segment] = []
        """Of their stretches. To be read only; another list is put in its place, under `lock`."""
        self.runs = NO_BLOCKS
        """The blocks that are held, here and elsewhere."""
        self.shared: SharedWeights | None = None
        """Where parameters lie that are with the state; set before anything is held. None: in memory of their own."""
        self.average_rule: AverageRule | None = None
        """None: no averages are kept."""
        self.averages_now = False
        """Whether the next update counts in averages."""
        self.copies: CopiesOnHost | None = None
        """Where copies of blocks that others own lie; set before anything is held. None: where all lie."""
        self.owned = NO_BLOCKS
        """The blocks that this worker owns; said only where copies lie elsewhere."""

    # ---- one segment

    def state_of(self, segment: Segment) -> State:  # each (elements of the segment,), or ()
        """All that is kept of it."""
        kept, where = self._kept_of(segment), segment.stretch
        return self.optimizer_step.whole.odd.carried(where.bucket, kept, *self.layout.elements(where))

    def bytes_of(self, segment: Segment) -> int:
        """What all that is kept of it takes, but parameters."""
        return sum(value.nbytes for key, value in self._kept_of(segment).items() if key != WEIGHTS)

    def _kept_of(self, segment: Segment) -> State:  # each (elements of the segment,), or (); odd state as it is kept
        found: State = self._form(segment.stretch).carried(self.twin.state[segment.parameter])
        if segment.has_master:
            found[MASTER] = segment.parameter
        if segment.weights is not None:
            found[WEIGHTS] = segment.weights
        if segment.average is not None:
            found[AVERAGE] = segment.average
        return found

    def part_of(self, segment: Segment, stretch: Stretch) -> State:  # each (elements of the stretch,), or ()
        """All that is kept of some of its blocks, as views."""
        first, last = _within(segment, stretch, self.layout)
        return {key: _cut(value, first, last) for key, value in self.state_of(segment).items()}

    def parameters_of(self, segment: Segment) -> Tensor:  # (elements of the segment,) of the bucket's dtype
        """Its parameters, as others read them."""
        if segment.weights is not None:
            return segment.weights
        if self.place.updates_in_place and not segment.has_master:
            return segment.parameter
        return self.parameters.of(segment.stretch)

    def make(
        self,
        stretch: Stretch,
        state: State,  # each (elements of the stretch,), or () for what all its blocks share
    ) -> Segment:
        """One with this state, which is not among the others yet."""
        bucket, place = self.layout.buckets[stretch.bucket], self._place_of(stretch)
        state = place.bring(bucket, state)
        has_master = MASTER in state and bucket.has_masters
        weights = self._weights(stretch, state) if self.keeps_weights else None
        parameter = state[MASTER] if has_master else self.parameters.of(stretch) if weights is None else weights
        if self.have_state and not (has_master or bucket.is_frozen):
            parameter = place.updated(parameter)
        segment = Segment(stretch, parameter, has_master, weights, state.get(AVERAGE), place is self.copies)
        apart = {AVERAGE, MASTER, WEIGHTS} if has_master else {AVERAGE, WEIGHTS}
        self.give_state(segment, {key: value for key, value in state.items() if key not in apart})
        return segment

    def make_of_weights(
        self,
        stretch: Stretch,
        state: State,  # each (elements of the stretch,), or () for what all its blocks share
    ) -> Segment:
        """One of the parameters alone: those in this state."""
        return self.make(stretch, {WEIGHTS: self._weights(stretch, state)})

    def give_state(
        self,
        segment: Segment,
        own: State,  # each (elements of the segment,), or ()
    ) -> None:
        """The optimizer has this of it; master weights are the segment's parameter."""
        if own:
            start, _ = self.layout.elements(segment.stretch)
            kept = self.optimizer_step.whole.odd.kept(segment.stretch.bucket, own, start)
            self.twin.state[segment.parameter].update(self._form(segment.stretch).given_back(kept))

    def places_in(self, bucket: Bucket) -> Mapping[str, Places]:
        """Keys of state that is not one value for each element, with those that have one."""
        form = self.effects.forms.get((bucket.group, bucket.wide_dtype), PLAIN_FORM)
        return {**form.places, **self.optimizer_step.whole.odd.places.get(bucket.index, {})}

    def _form(self, stretch: Stretch) -> StateForm:
        bucket = self.layout.buckets[stretch.bucket]
        return self.effects.forms.get((bucket.group, bucket.wide_dtype), PLAIN_FORM)

    def average(self, segments: Sequence[Segment], are_updated: bool) -> None:
        """Takes the exact weights of these into their averages: the first ones are the average. `are_updated`: whether
        the update at hand has just made them; else they are read where others read them.
        """
        rule, pairs = self.average_rule, list[tuple[Tensor, Tensor]]()
        assert rule is not None
        for one in segments:
            exact = (one.parameter if one.has_master or are_updated else self.parameters_of(one)).detach()
            if one.average is None:
                dtype = self.layout.buckets[one.stretch.bucket].wide_dtype
                one.average = self.place.memory(exact.numel(), dtype).copy_(exact)
            else:
                pairs.append((one.average, exact.to(one.average.device)))
        if pairs:
            averages, weights = map(list, zip(*pairs, strict=True))
            torch._foreach_lerp_(averages, weights, rule.taken)

    def _weights(
        self,
        stretch: Stretch,
        state: State,  # each (elements of the stretch,), or () for what all its blocks share
    ) -> Tensor:  # (elements of the stretch,) of the bucket's dtype
        """Those given, else the masters rounded, else memory that a reader fills."""
        bucket = self.layout.buckets[stretch.bucket]
        given = state.get(WEIGHTS, state.get(MASTER) if bucket.has_masters else None)
        if self.shared is not None:
            return self.shared.put(stretch, given)
        return self._place_of(stretch).weights(given, stretch.blocks * bucket.block_elements, bucket.dtype)

    # ---- where they lie

    def _place_of(self, stretch: Stretch) -> UpdatePlace:
        """All of whose blocks are owned here, or none, where that makes a difference."""
        return self.place if self.copies is None or self.layout.runs([stretch]) <= self.owned else self.copies

    @property
    def place_of_fills(self) -> UpdatePlace:
        """What comes is owned by others."""
        return self.copies or self.place

    def by_place(self, stretch: Stretch) -> list[Stretch]:
        """Its blocks, in as few stretches as lie in one place each."""
        if self.copies is None:
            return [stretch]
        mine = self.layout.runs([stretch])
        return sorted(self.layout.stretches(mine & self.owned) + self.layout.stretches(mine - self.owned))

    def own(self, runs: Runs) -> None:
        """These blocks are owned here from now on, and all others by others: their state moves to where it belongs,
        segment by segment.
        """
        if self.copies is None or runs == self.owned:
            return
        self.owned, index = runs, 0
        while index < len(self.in_order):
            segment = self.in_order[index]
            parts = self.by_place(segment.stretch)
            if len(parts) > 1 or segment.is_on_host != (self._place_of(segment.stretch) is self.copies):
                moved = [self._split_off(segment, stretch) for stretch in parts]
                self.twin.state.pop(segment.parameter, None)
                self._regroup(self.in_order[:index] + moved + self.in_order[index + 1 :], self.runs)
            index += len(parts)

    # ---- which there are

    def add(self, segments: Sequence[Segment], runs: Runs) -> None:
        """`runs`: the blocks that are held now besides."""
        self._regroup(sorted([*self.in_order, *segments], key=stretch_of), self.runs | runs)

    def keep_only(self, runs: Runs) -> None:
        """Every other block goes; pieces that stay of a cut segment are copied, so that the memory is given back:
        segment by segment, so that no more than one is there twice.
        """
        index, wanted = 0, self.layout.stretches(runs)
        while index < len(self.in_order):
            segment = self.in_order[index]
            stays = overlaps(wanted, segment.stretch)
            if stays != [segment.stretch]:
                parts = [self._split_off(segment, stretch) for stretch in stays]
                self.twin.state.pop(segment.parameter, None)  # nothing there before the first step
                self._regroup(self.in_order[:index] + parts + self.in_order[index + 1 :], self.runs)
            index += len(stays)
        if self.shared is not None:
            self.shared.give_back(self.layout.stretches(self.runs - runs))
        self.runs &= runs

    def _split_off(self, segment: Segment, stretch: Stretch) -> Segment:
        stays = {WEIGHTS} if self.shared is not None else set()
        parts, to_host = self.part_of(segment, stretch), self._place_of(stretch) is self.copies
        if to_host and not segment.is_on_host:
            stays = {key for key, one in parts.items() if one.dim()}  # it is copied where it is brought
        elif segment.is_on_host and not to_host and self.copies is not None:
            parts = {key: self.copies.bring_up(one) for key, one in parts.items()}
            stays = {key for key, one in parts.items() if one.dim()}
        return self.make(stretch, {key: one if key in stays else one.clone() for key, one in parts.items()})

    def join(self) -> None:
        """Makes neighbours of one bucket one segment, if there are so many that it is worth a copy: else a job would
        get slower with every change.
        """
        if len(self.in_order) > SEGMENTS_PER_BUCKET * len(self.layout.buckets):
            self._join(are_copied=True)

    def join_neighbours(self) -> None:
        """Makes one segment of those that lie together, which costs no copy."""
        self._join(are_copied=False)

    def _join(self, are_copied: bool) -> None:
        """Run by run, so that no more than one is there twice. `are_copied`: also what does not lie together."""
        first = 0
        while first < len(self.in_order):
            stop = first + 1
            segments = self.in_order
            while stop < len(segments) and self._is_continued(segments[stop - 1], segments[stop], are_copied):
                stop += 1
            if stop > first + 1:
                whole = self._join_run(segments[first:stop])
                self._regroup([*segments[:first], whole, *segments[stop:]], self.runs)
            first += 1

    def _is_continued(self, segment: Segment, other: Segment, anywhere: bool) -> bool:
        """Whether `other` is the next stretch of the bucket, and the numbers that all its blocks share are equal."""
        if (segment.stretch.bucket, segment.stretch.stop) != (other.stretch.bucket, other.stretch.start):
            return False
        if segment.is_on_host != other.is_on_host:
            return False
        mine, theirs = self.state_of(segment), self.state_of(other)
        are_alike = mine.keys() == theirs.keys() and all(
            value is theirs[key] or (value.dim() == theirs[key].dim() and (value.dim() or value.equal(theirs[key])))
            for key, value in mine.items()
        )
        return are_alike and (anywhere or _lie_together(mine, theirs))

    def _join_run(self, segments: list[Segment]) -> Segment:
        states, is_on_host = [self.state_of(segment) for segment in segments], segments[0].is_on_host
        for segment in segments:
            self.twin.state.pop(segment.parameter, None)
        first, last = segments[0].stretch, segments[-1].stretch
        state: State = {}
        for key in [*states[0]]:
            parts = [one.pop(key) for one in states]  # each is gone before the next is copied
            state[key] = parts[0] if parts[0].dim() == 0 else _in_one_piece(parts, self.copies if is_on_host else None)
        return self.make(Stretch(first.bucket, first.start, last.stop), state)

    def _regroup(self, segments: list[Segment], runs: Runs) -> None:
        """`segments`: in the order of their stretches."""
        with self.lock:
            self.runs, self.in_order = runs, segments
            self.revision += 1


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


def _lie_together(
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
    place: UpdatePlace | None,
) -> Tensor:  # (sum of their elements,)
    """A view where they lie so in memory, else a copy: in that place, or where they lie."""
    total = sum(part.numel() for part in parts)
    if all(map(_are_adjacent, parts, parts[1:])):
        return parts[0].as_strided((total,), (1,))
    dtype, device = parts[0].dtype, parts[0].device
    return torch.cat(list(parts), out=place.memory(total, dtype) if place else memory_on(device, total, dtype))


class HeldWeights:
    """Parameters of held blocks: `BlockValues`. Where they are sharded (stage 3) they are with their state, and nowhere
    else.

    From another thread than the training's under the segments' lock.
    """

    def __init__(self, segments: Segments) -> None:
        self._layout, self._segments = segments.layout, segments

    def parts(self, stretch: Stretch) -> list[Tensor]:  # each (elements,); together the stretch's
        """Views, one for each segment that the stretch lies in."""
        segments, found, at = self._segments.in_order, list[Tensor](), stretch.start
        first = bisect_right(segments, stretch, key=stretch_of) - 1
        for segment in segments[max(0, first) :]:
            where = segment.stretch
            if at == stretch.stop or where.bucket > stretch.bucket:
                break
            if where.bucket == stretch.bucket and where.start <= at < where.stop:
                stop, size = min(where.stop, stretch.stop), self._layout.buckets[where.bucket].block_elements
                found.append(self._part(segment, (at - where.start) * size, (stop - where.start) * size))
                at = stop
        assert at == stretch.stop, f"{stretch} is not held"
        return found

    def _part(self, segment: Segment, first: int, last: int) -> Tensor:  # (last - first,)
        return self._segments.parameters_of(segment)[first:last]

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        """A view where the stretch lies in one segment, a copy elsewhere."""
        parts = self.parts(stretch)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        """As `of`. Bounds are those of blocks."""
        size = self._layout.buckets[bucket].block_elements
        assert start % size == stop % size == 0, f"{bucket}:{start}:{stop} cuts a block"
        return self.of(Stretch(bucket, start // size, stop // size))

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(segment.weights.nbytes for segment in self._segments.in_order if segment.weights is not None)


class HeldAverages(HeldWeights):
    """Averages of weights, in the dtype of the parameters, for state in memory."""

    def _part(self, segment: Segment, first: int, last: int) -> Tensor:  # (last - first,)
        if segment.average is None:
            return super()._part(segment, first, last)
        return segment.average[first:last].to(self._layout.buckets[segment.stretch.bucket].dtype)
