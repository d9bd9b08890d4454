"""States of blocks that come from outside, another member's or a checkpoint's: what must be there for an update.

A state that lacks something, or brings it in another form, is refused before anything of it counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal_protos.runs import Runs
from torch import Tensor

from shoal.blocks.loaded_state import MASTER, WEIGHTS, State
from shoal.core.layout import Layout, Stretch


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
