"""State of whole tensors that is not one value for each element, as the blocks of a worker keep it.

Where it is cut or digested it has a value for each element, as all state (optim/own_class.py): the tensor's first
elements have it, and zeros follow. Kept, sent and saved are these first ones alone (core/value_places.py). So it lies
with the blocks in which a tensor begins. Called by segments and by whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from torch import Tensor

from shoal.core.layout import Layout
from shoal.core.value_places import Spans
from shoal.optim.whole import Updates


class OddStates:
    """Of a layout. Elements are those of a bucket."""

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
