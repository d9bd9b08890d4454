"""The optimizer's own step on flat runs of blocks, each a "parameter" of the twin: on whole segments, or on pieces.

A segment is cut where parameters in it have missed updates (core/misses.py). A piece has views of the segment's state,
and the counts of steps less what it has missed; one that was never used has no state, so the optimizer begins it. What
no piece covers stays as it is. The segment's own counts are those of one element that stands in for a parameter that is
always used. Called by the held blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.whole_tensors import TensorRun, WholeTensors
from shoal.core.layout import Layout, Stretch
from shoal.core.misses import USED_ALWAYS, UpdatePiece, within
from shoal.optim.state_form import NUMBERS
from shoal.optim.twin import whole_updates, with_no_empty_group

Cuts = Mapping[int, Sequence[UpdatePiece]]
"""By bucket, the pieces that an update takes; a bucket that is not among them is taken as it lies."""


@dataclass(slots=True)
class Segment:
    """A stretch of blocks that are updated as one; their state is the twin's of `parameter`."""

    stretch: Stretch
    parameter: Tensor  # (elements,): of the bucket's dtype, or master weights of its wide dtype
    has_master: bool
    weights: Tensor | None  # (elements,) of the bucket's dtype: where they are with the state
    average: Tensor | None = None  # (elements,) of the bucket's wide dtype: once there is one
    is_on_host: bool = False
    """Whether it is a copy whose state lies on the host of the device that updates it."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A segment in pieces. `parts`: where each begins, and the segment that the twin sees."""

    segment: Segment
    state: dict[str, Any]
    counting: Segment
    parts: list[tuple[int, Segment]]


class OptimizerStep:
    """Steps of a twin on segments."""

    def __init__(self, twin: torch.optim.Optimizer, layout: Layout, stands_in: bool) -> None:
        """`stands_in`: whether groups must not be empty, as a step changes values of them."""
        self._twin, self._layout, self._stands_in = twin, layout, stands_in
        self.whole = WholeTensors(layout, whole_updates(twin))
        """Tensors that are not updated by the twin's step."""
        self.cuts: Cuts = {}
        """Of the next update."""

    def make(
        self,
        segments: Sequence[Segment],
        gradients: Sequence[Tensor],  # of each segment (elements,)
        scale: float,
    ) -> None:
        """One step, with the gradients times `scale`."""
        if self.whole.places:
            pairs = [*zip(segments, gradients, strict=True)]
            for segment, gradient in pairs:
                if self._is_whole(segment):
                    self._commit(segment, gradient, scale)
            segments = [one for one in segments if not self._is_whole(one)]
            gradients = [gradient for one, gradient in pairs if not self._is_whole(one)]
        cut = _CutSegments(self._twin, self._layout, self.cuts, segments, gradients)
        groups = [self._layout.buckets[one.stretch.bucket].group for one in cut.segments]
        _step_on(self._twin, groups, cut.segments, cut.gradients, scale, self._stands_in)
        cut.join()

    def _is_whole(self, segment: Segment) -> bool:
        return self.whole.has(self._layout.buckets[segment.stretch.bucket].group)

    def _commit(
        self,
        segment: Segment,
        gradient: Tensor,  # (elements of the segment,)
        scale: float,
    ) -> None:
        """Tensors that no lane has used stay as they are."""
        bucket, state = self._layout.buckets[segment.stretch.bucket], self._twin.state[segment.parameter]
        start, stop = self._layout.elements(segment.stretch)
        if not state:
            state.update(self.whole.first_state(bucket, start, segment.parameter))
        cuts = self.cuts.get(bucket.index)
        used = [
            (bucket, slot)
            for slot in bucket.slots
            if cuts is None or any(piece.start <= slot.start < piece.stop for piece in cuts)
        ]
        run = TensorRun(start, stop, segment.parameter.detach(), gradient, state)
        self.whole.commit(used, run, self._twin.param_groups[bucket.group], scale)


class _CutSegments:
    """`segments` and `gradients`, each (elements,), are what the step is given. `join` follows it."""

    def __init__(
        self,
        twin: torch.optim.Optimizer,
        layout: Layout,
        cuts: Cuts,
        segments: Sequence[Segment],
        gradients: Sequence[Tensor],  # of each segment (elements,)
    ) -> None:
        self._twin, self._cut = twin, list[_Cut]()
        self.segments, self.gradients = list[Segment](), list[Tensor]()
        for segment, gradient in zip(segments, gradients, strict=True):
            pieces = cuts.get(segment.stretch.bucket)
            spans = None if pieces is None else [*within(pieces, *layout.elements(segment.stretch))]
            if spans is None or spans == [((0, segment.parameter.numel()), USED_ALWAYS)]:
                self._give(segment, gradient)
                continue
            state: dict[str, Any] = twin.state.pop(segment.parameter, {})
            counting = replace(segment, parameter=torch.zeros_like(segment.parameter[:1]))
            cut = _Cut(segment, state, counting, [])
            twin.state[counting.parameter].update({key: _of_an_element(value) for key, value in state.items()})
            self._give(counting, torch.zeros_like(gradient[:1]))
            for (first, stop), missed in spans:
                part = replace(segment, parameter=segment.parameter.detach()[first:stop])
                if not missed.is_new:
                    own = {key: _of_a_piece(value, first, stop, missed.updates) for key, value in state.items()}
                    twin.state[part.parameter].update(own)
                cut.parts.append((first, part))
                self._give(part, gradient[first:stop])
            self._cut.append(cut)

    def _give(
        self,
        segment: Segment,
        gradient: Tensor,  # (elements,)
    ) -> None:
        self.segments.append(segment)
        self.gradients.append(gradient)

    def join(self) -> None:
        """What the step has made of the pieces is the state of their segments."""
        if self._cut:  # a view of a piece counts as another use of parameters that are on their way
            for group in self._twin.param_groups:
                group["params"] = []
        for cut in self._cut:
            made = self._twin.state.pop(cut.counting.parameter, {})
            whole = {key: self._whole(cut, key, value) for key, value in made.items()}
            for first, part in cut.parts:
                own = self._twin.state.pop(part.parameter, {})
                for key, value in ((key, value) for key, value in own.items() if _is_large(value)):
                    place = whole[key][first : first + value.numel()]
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
            self._twin.state[cut.segment.parameter].update(whole)

    @staticmethod
    def _whole(cut: _Cut, key: str, value: Any) -> Any:
        """Of what was made of one element: zeros where the segment had no such state, and no piece has any."""
        if not _is_large(value):
            return value
        return cut.state[key] if key in cut.state else value.new_zeros(cut.segment.parameter.numel())


def _is_large(value: Any) -> bool:
    """Whether each element has a value of its own."""
    return isinstance(value, Tensor) and value.dim() > 0


def _of_an_element(value: Any) -> Any:
    return torch.zeros_like(value[:1]) if _is_large(value) else value


def _of_a_piece(value: Any, first: int, stop: int, missed: int) -> Any:
    if _is_large(value):
        return value[first:stop]
    return value - missed if isinstance(value, Tensor) or type(value) in NUMBERS else value


def _step_on(
    twin: torch.optim.Optimizer,
    groups: Sequence[int],
    segments: Sequence[Segment],
    gradients: Sequence[Tensor],  # of each segment (elements,)
    scale: float,
    stands_in: bool,
) -> None:
    """The optimizer's own step, with the gradients times `scale`. `groups`: of each segment the optimizer's group."""
    for group in twin.param_groups:
        group["params"] = []
    for number, segment, gradient in zip(groups, segments, gradients, strict=True):
        segment.parameter.grad = gradient
        twin.param_groups[number]["params"].append(segment.parameter)
    if scale != 1.0 and segments:
        torch._foreach_mul_([one.parameter.grad for one in segments if one.parameter.grad is not None], scale)
    before = [segment.parameter.detach() for segment in segments]
    with with_no_empty_group(twin) if stands_in else nullcontext():
        twin.step()
    for segment, memory in zip(segments, before, strict=True):
        segment.parameter.grad = None
        if segment.parameter.data_ptr() != memory.data_ptr():
            _put_back(segment, memory, twin)


def _put_back(
    segment: Segment,
    memory: Tensor,  # (elements,): what the parameter was a view of
    by: torch.optim.Optimizer,
) -> None:
    """An optimizer has assigned `.data` where others write: the module would know nothing of it."""
    made = segment.parameter.detach()
    if (made.shape, made.dtype) != (memory.shape, memory.dtype):
        raise UserError(
            f"optimizer {type(by).__name__} has put a {made.dtype} of shape {tuple(made.shape)} in the place of a "
            f"{memory.dtype} of shape {tuple(memory.shape)}, a part of the parameters; it must write into parameters, "
            "or assign `.data` of the same shape and dtype."
        )
    memory.copy_(made)
    segment.parameter.data = memory
