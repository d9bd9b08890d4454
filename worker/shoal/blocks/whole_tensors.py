"""Tensors that are updated whole, as one worker's blocks see them: what of one leaves for its home, and its commit.

What a home has made of a tensor waits here, beside the reduced gradient, for the vote that commits both. It comes to
all who update one of the tensor's blocks: owner, mirrors, and who is filling it. Groups whose elements are updated by
themselves have nothing here. Called by segments, which update, and by the exchange (exchange/shaping.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from torch import Tensor

from shoal.core.anchors import Place, equal_cut
from shoal.core.layout import Bucket, Layout
from shoal.core.value_places import Spans
from shoal.optim.hyper import Group
from shoal.optim.whole import Pieces, Updates, WholeUpdate


class OddStates:
    """State of the tensors of a layout that is not one value for each element. Elements are those of a bucket.

    Where it is cut or digested it has a value for each element, as all state (optim/own_class.py): the tensor's first
    elements have it, and zeros follow. Kept, sent and saved are these first ones alone (core/value_places.py). So it
    lies with the blocks in which a tensor begins.
    """

    def __init__(self, layout: Layout, updates: Updates) -> None:
        self.places: dict[int, dict[str, Spans]] = {}
        """By bucket and key, where there are such."""
        self._keys: dict[int, tuple[str, set[str]]] = {}
        for bucket in layout.trained.buckets:
            update = updates[bucket.group]
            if update is None:
                continue
            kept = [(slot.start, update.odd(slot.parameter.shape)) for slot in bucket.slots]
            self._keys[bucket.index] = update.name, {*update.first_state(torch.zeros(1, device="cpu"))}
            self.places[bucket.index] = {
                key: Spans(tuple((start, start + found[key]) for start, found in kept if found[key]))
                for key in (kept[0][1] if kept else ())
            }

    def cut(
        self,
        bucket: int,
        state: Mapping[str, Tensor],  # each (elements,); of odd state as it is kept
        start: int,
        first: int,
        last: int,
    ) -> dict[str, Tensor]:  # the same
        """Views of what is kept of elements `[first, last)`. `state`: as it is kept, from element `start` on."""
        here, span = slice(first - start, last - start), [(first, last)]
        cuts = {key: self.cut_at(bucket, key, value, start, span) for key, value in state.items()}
        return {key: cuts[key][0] if cuts[key] else value[here] for key, value in state.items()}

    def cut_at(
        self,
        bucket: int,
        key: str,
        value: Tensor,  # (elements,): as it is kept, from element `start` on
        start: int,
        spans: Sequence[Span],
    ) -> list[Tensor]:  # of each span (elements,)
        """Views of what is kept of odd state there; empty for other keys."""
        places = self.places.get(bucket, {}).get(key)
        if places is None:
            return []
        origin = places.before(start)
        return [value[places.before(first) - origin : places.before(last) - origin] for first, last in spans]

    def carried(
        self,
        bucket: int,
        state: Mapping[str, Tensor],  # each (elements,), or (); of odd state as it is kept
        start: int,
        stop: int,
    ) -> dict[str, Tensor]:  # each (elements,), or ()
        """`state` of elements `[start, stop)` as others are given it."""
        found = dict(state)
        for key, places in self.places.get(bucket, {}).items():
            if key in state:
                found[key] = places.apart(state[key], start, stop)
        return found

    def kept(
        self,
        bucket: int,
        state: Mapping[str, Tensor],  # each (elements,), or ()
        start: int,
    ) -> dict[str, Tensor]:  # each (elements,), or (); of odd state as it is kept
        """The inverse of `carried`. Raises `UserError` for state that is kept otherwise."""
        name, keys = self._keys.get(bucket, ("", set[str]()))
        if name and state and state.keys() != keys:
            raise UserError(
                f"the state of optimizer {name} is {', '.join(sorted(state))}; expected {', '.join(sorted(keys))}. "
                "Another release of Shoal has made it, or other groups: begin with its weights alone (import with "
                "--model-only)."
            )
        found = dict(state)
        for key, places in self.places.get(bucket, {}).items():
            if key in state:
                found[key] = places.together(state[key], start)
        return found


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Elements `[start, stop)` of a bucket that are updated as one; `weights`, `gradient` and `state` are theirs."""

    start: int
    stop: int
    weights: Tensor  # (elements,)
    gradient: Tensor  # (elements,)
    state: Mapping[str, Tensor]  # each (elements,); of odd state as it is kept


@dataclass(slots=True)
class _Returned:
    """Of one tensor, what has come back. By run of elements that follow each other: their start, and the columns."""

    starts: list[int] = field(default_factory=list)
    columns: list[list[Tensor]] = field(default_factory=list)


class WholeTensors:
    """Of the blocks of one worker."""

    def __init__(self, layout: Layout, updates: Updates) -> None:
        """`updates`: of the optimizer's groups. Raises `UserError` for a parameter that its group's cannot train."""
        self._updates = updates
        self.places: tuple[Place, ...] = tuple(
            (bucket, slot)
            for bucket in layout.trained.buckets
            if updates[bucket.group] is not None
            for slot in bucket.slots
        )
        """Of all such tensors, in the layout's order."""
        self.are_trained = any(updates)
        """Whether the job has such tensors: a stage of a pipeline may have none of its groups'."""
        for bucket, slot in self.places:
            update = self.update_of(bucket.group)
            name = slot.parameter.name
            if slot.parameter.is_part:
                raise UserError(
                    f'each process of a cell has a part of parameter "{name}", and {update.name} updates whole '
                    "tensors; give it to an elementwise optimizer of the list, such as AdamW."
                )
            update.check(name, slot.parameter.shape)
        self.odd = OddStates(layout, updates)
        self._returned: dict[tuple[int, int], _Returned] = defaultdict(_Returned)

    def update_of(self, group: int) -> WholeUpdate:
        """Of a group that has such."""
        update = self._updates[group]
        assert update is not None, f"group {group} is updated element by element"
        return update

    def has(self, group: int) -> bool:
        """Whether a group's tensors are such."""
        return self._updates[group] is not None

    def part(
        self,
        place: Place,
        runs: Sequence[TensorRun],
        group: Group,
        scale: float,
        is_new: bool,
        into: Sequence[Tensor],  # by column (values of all runs,)
    ) -> None:
        """Makes what the home needs of a tensor's elements in these runs, which follow each other; no state changes."""
        pieces = Pieces.joined([self._pieces(place, run, scale)[1] for run in runs])
        self.update_of(place[0].group).part(pieces, group, is_new, into)

    # ---- what comes back

    def put(self, place: Place, start: int, columns: Sequence[Tensor]) -> None:  # each (values,)
        """What the home of a tensor has made of elements that begin there, in ascending order; until `forget`."""
        returned = self._returned[_key(place)]
        returned.starts.append(start)
        returned.columns.append(list(columns))

    def forget(self) -> None:
        """It is committed, or void."""
        self._returned.clear()

    def commit(self, places: Sequence[Place], run: TensorRun, group: Group, scale: float) -> None:
        """Updates a run of blocks where it lies. `places`: the tensors that are updated, of its bucket."""
        for place in places:
            bucket, slot = place
            spans, pieces = self._pieces(place, run, scale)
            if spans:
                returned = self._columns(place, spans[0][0], spans[-1][1], run.weights.device)
                self.update_of(bucket.group).commit(pieces, returned, group, slot.parameter.shape)

    def _columns(
        self, place: Place, start: int, stop: int, device: torch.device
    ) -> list[Tensor]:  # by column (values,): what has come back of these elements
        returned = self._returned[_key(place)]
        index = bisect_right(returned.starts, start) - 1
        first = returned.starts[index]
        return [column[start - first : stop - first].to(device) for column in returned.columns[index]]

    def _pieces(self, place: Place, run: TensorRun, scale: float) -> tuple[list[Span], Pieces]:
        """A tensor's pieces in a run, and where they lie in the bucket; gradients are times `scale`."""
        spans, (bucket, _) = [*equal_cut(place, run.start, run.stop, torch.get_num_threads())], place
        if not spans:
            return [], Pieces([], {}, [])
        if run.weights.device.type != "cpu":  # whose kernels round all elements alike
            spans = [(spans[0][0], spans[-1][1])]
        cut = partial(_split, spans, run.start)
        state = run.state or self.first_state(bucket, run.start, run.weights)
        of_state = {
            key: self.odd.cut_at(bucket.index, key, value, run.start, spans) or cut(value)
            for key, value in state.items()
        }
        return spans, Pieces(cut(run.weights), of_state, cut(run.gradient), scale)

    def first_state(
        self,
        bucket: Bucket,
        start: int,
        weights: Tensor,  # (elements,) from there on
    ) -> dict[str, Tensor]:  # each (elements,); of odd state as it is kept
        """What a run of blocks has before its first update."""
        return self.odd.kept(bucket.index, self.update_of(bucket.group).first_state(weights), start)


def _key(place: Place) -> tuple[int, int]:
    """Numbers, of which a hash costs nothing."""
    bucket, slot = place
    return bucket.index, slot.start


def _split(
    spans: Sequence[Span],
    first: int,
    value: Tensor,  # (elements,) from `first` on
) -> list[Tensor]:  # of each span (elements,)
    """Views of what lies in spans that follow each other."""
    return [*value[spans[0][0] - first : spans[-1][1] - first].split([stop - start for start, stop in spans])]
