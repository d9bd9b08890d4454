"""The traffic of a world: who sends which element ranges to whom, derived once from its plan and the layout.

Pure bookkeeping; no tensor, no group. `ranges[bucket]` are element ranges within that bucket's flat.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from shoal_protos.plan import Plan
from shoal_protos.runs import Runs, Span

from shoal.core.layout import Layout
from shoal.core.tree import subtrees

Ranges = tuple[tuple[Span, ...], ...]
"""Element ranges by bucket."""

FIRST_MESSAGE, PARTIALS, MIRRORED, HANDED, FILLED, BUFFERS, DIGESTS, STARTED, HYPER = range(9)
"""Tags. Messages of one tag between two members keep their order, so a tag need not name bucket or step."""


class Traffic:
    """The traffic of one member of a world."""

    def __init__(self, plan: Plan, rank: int, layout: Layout) -> None:
        self.plan, self.rank, self.layout = plan, rank, layout
        self.others = tuple(r for r in range(plan.world_size) if r != rank)
        self._cut = lru_cache(maxsize=4_096)(layout.cut)
        self._replays = lru_cache(maxsize=4)(
            lambda boundaries: tuple(plan.replays(r, boundaries) for r in range(plan.world_size))
        )

    @cached_property
    def lane_spans(self) -> tuple[tuple[Span, ...], ...]:
        """Whole subtrees of lanes whose sums each rank sends."""
        return tuple(tuple(subtrees(Runs.of(share.lanes), self.plan.lanes)) for share in self.plan.shares)

    @cached_property
    def norm_spans(self) -> tuple[tuple[Span, ...], ...]:
        """Whole subtrees of blocks that each rank owns, whose sums of squares it votes."""
        return tuple(tuple(subtrees(share.owned, self.plan.blocks)) for share in self.plan.shares)

    @cached_property
    def owned(self) -> tuple[Ranges, ...]:
        """Ranges of the blocks that each rank owns."""
        return tuple(self._cut(share.owned) for share in self.plan.shares)

    def replays(self, boundaries: int) -> tuple[Runs, ...]:
        """Blocks that each rank updates itself at the vote that follows `boundaries` passed ones."""
        return self._replays(min(boundaries, self.plan.boundaries))

    def mirrored(self, boundaries: int, owner: int, mirror: int) -> Ranges:
        """The ranges whose reduced gradient `owner` sends to `mirror`."""
        return self._cut(self.plan.shares[owner].owned & self.replays(boundaries)[mirror])

    def handed(self, boundaries: int, owner: int, receiver: int) -> Ranges:
        """The ranges whose updated parameters `owner` hands out to `receiver`."""
        return self._cut(self.plan.shares[owner].owned - self.replays(boundaries)[receiver])

    def stale(self, owner: int, receiver: int) -> Ranges:
        """The ranges that `owner` hands out to `receiver` before a recovered world opens."""
        assert self.plan.recovery is not None
        return self._cut(self.plan.shares[owner].owned & self.plan.recovery.stale[receiver])
