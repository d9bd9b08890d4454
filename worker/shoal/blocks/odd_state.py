"""State of whole tensors that is not one value for each element, as the blocks of a worker keep it.

Where it travels, is saved or digested it has a value for each element, as all state (optim/own_class.py): the tensor's
first elements have it, and zeros follow. Kept are these first ones alone. So it lies with the blocks in which a tensor
begins, and all that cuts, fills and checks state knows nothing of it. Called by segments and by whole tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from torch import Tensor

from shoal.core.layout import Layout
from shoal.optim.whole import Updates


class _Places:
    """Of one key in one bucket: the spans of elements that have it, ascending, and how many lie before each."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._starts = [start for start, _ in spans]
        self._before = [0, *accumulate(stop - start for start, stop in spans)]

    def before(self, element: int) -> int:
        index = bisect_right(self._starts, element) - 1
        if index < 0:
            return 0
        start, stop = self._spans[index]
        return self._before[index] + min(element, stop) - start

    def within(self, first: int, last: int) -> Iterator[Span]:
        for start, stop in self._spans[max(0, bisect_right(self._starts, first) - 1) :]:
            if start >= last:
                return
            if stop > first:
                yield max(start, first), min(stop, last)


class OddStates:
    """Of a layout. Elements are those of a bucket."""

    def __init__(self, layout: Layout, updates: Updates) -> None:
        self._places: dict[int, dict[str, _Places]] = {}
        self._keys: dict[int, tuple[str, set[str]]] = {}
        for bucket in layout.trained.buckets:
            update = updates[bucket.group]
            if update is None:
                continue
            kept = [(slot.start, update.odd(slot.parameter.shape)) for slot in bucket.slots]
            self._keys[bucket.index] = update.name, {*update.first_state(torch.zeros(1, device="cpu"))}
            self._places[bucket.index] = {
                key: _Places([(start, start + found[key]) for start, found in kept if found[key]])
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
        places = self._places.get(bucket, {}).get(key)
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
        for key, places in self._places.get(bucket, {}).items():
            if key in state:
                found[key], at = torch.zeros(stop - start, dtype=state[key].dtype, device=state[key].device), 0
                for first, last in places.within(start, stop):
                    found[key][first - start : last - start] = state[key][at : at + last - first]
                    at += last - first
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
        for key, places in self._places.get(bucket, {}).items():
            if key in state:
                spans = places.within(start, start + state[key].numel())
                parts = [state[key][first - start : last - start] for first, last in spans]
                found[key] = torch.cat(parts) if parts else state[key].new_empty(0)
        return found
