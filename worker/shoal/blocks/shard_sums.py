"""Gradients where they are sharded (stages 2 and 3): the lane at hand, and the reduced ones of this worker's blocks.

What waits between rounds belongs to the reduction (exchange/rounds.py). Stands where `LaneSums` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal_protos.runs import NO_BLOCKS, Runs
from torch import nn

from shoal.blocks.leaves import Leaves
from shoal.blocks.values import ShardValues
from shoal.core.layout import Layout
from shoal.core.misses import every_one


class ShardSums:
    """`live` is the lane at hand; `reduced` the mean over all lanes of the blocks that this worker replays."""

    def __init__(self, layout: Layout, are_narrow: bool) -> None:
        self.live, self.reduced = Leaves(layout, are_narrow), ShardValues(layout)
        self._all = self.unused = every_one(layout)
        """`unused`: the parameters that have had no gradient since the step began, as bits."""

    def reserve(self, lanes: Iterable[int]) -> None:
        """Nothing is kept for lanes: their gradients leave."""

    def begin_lane(self) -> None:
        """What a void lane has left behind is forgotten."""
        self.live.clear()

    def before_backward(self) -> None:
        """The script is given no gradient that it could have changed."""

    def backward_done(self, parameters: Sequence[nn.Parameter]) -> None:
        """Buckets are completed one by one, as they leave."""

    def lane_done(self, lane: int, is_last: bool) -> None:
        """It has left with its backward."""

    def keep(self, runs: Runs) -> None:
        """The blocks that this worker replays at the coming vote."""
        self.reduced.keep(runs)

    def clear(self) -> None:
        """The step's sums are void, or applied: their memory serves the next forward."""
        self.live.clear()
        self.reduced.keep(NO_BLOCKS)
        self.unused = self._all

    @property
    def bytes(self) -> int:
        """What gradients take here."""
        return self.live.bytes + self.reduced.bytes
