"""The sums over this worker's lanes: one gradient copy per whole subtree of lanes that it has finished.

A stack, as in pairwise summation: a finished lane is pushed, and two siblings are added at once. With k lanes in one
aligned run that takes log2(k) + 1 copies, 2·log2(k) + 1 at most when they come in order. Copies are pooled over the
job's life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from torch import nn

from shoal.blocks.flat import Gradients, versions
from shoal.cells.marks import OverCell
from shoal.core.layout import Layout
from shoal.core.misses import all_at
from shoal.core.tree import push

KEPT_CHANGED = (
    "gradients were changed after engine.step (zero_() of a kept `.grad` and the like), when their memory holds a "
    "step's sums. Remove this from the loop; engine.step drops gradients itself, and a copy of one may be kept."
)


class LaneSums:
    """`live` is the copy that backward accumulates into; `finished` are the others, ascending, after `push`."""

    def __init__(self, layout: Layout, lanes: int) -> None:
        self._layout = layout
        self._lanes = lanes
        self._pool: list[Gradients] = []
        self._stack: list[tuple[Span, Gradients]] = []
        self._chain: list[Gradients] = []
        self._merged = 0
        self._versions: list[int] = []
        """Of the finished sums' flats, as the last push left them."""
        self._live_versions: list[int] = []
        """Of the live copy's, as the lane's begin or its last backward left them."""
        self.live = Gradients(layout)
        self.over_cell: OverCell | None = None
        """None: the cell is one process, or its processes divide no layers."""
        self.unused = all_at(layout, layout.part.coordinate)
        """The parameters that have had no gradient since the step began, as bits."""

    @property
    def reduced(self) -> Gradients:  # of whole buckets
        """Where the step's mean lies once it is reduced: in place."""
        return self.live

    def reserve(self, lanes: Iterable[int]) -> None:
        """Finds and touches the copies that these lanes will take: a step that met new memory would be longer by it."""
        stack: list[tuple[Span, None]] = []
        most = 0
        for lane in lanes:
            most = max(most, len(stack) + 1)
            push(stack, lane, None, self._lanes, lambda kept, _: kept)
        while self.copies < most:
            self._pool.append(Gradients(self._layout))
            self._pool[-1].zero()

    def begin_lane(self) -> None:
        """A live copy without a gradient, apart from every finished sum."""
        if any(kept is self.live for _, kept in self._stack):
            self.live = self._pool.pop() if self._pool else Gradients(self._layout)
        self.live.begin()
        self._live_versions = versions(self.live.flats)

    def before_backward(self) -> None:
        """Raises `UserError` where the script has changed the live copy since the lane's begin or its last backward."""
        if versions(self.live.flats) != self._live_versions:
            raise UserError(KEPT_CHANGED)

    def backward_done(self, parameters: Sequence[nn.Parameter], is_lanes_last: bool = False) -> None:
        """Those without a gradient have one of zeros. After a lane's last backward gradients that are spread over a
        cell are added up. Raises `WorldChanged`.
        """
        self.live.complete(parameters)
        if self.over_cell is not None and is_lanes_last:
            self.live.sum_over_cell(self.over_cell)
        self._live_versions = versions(self.live.flats)

    def lane_done(self, lane: int, is_last: bool) -> None:
        """The last lane's push began with its backward: since then the script has had its hands on the sums."""
        if is_last:
            self._refuse_changed()
        else:
            self.push(lane)

    def push(self, lane: int) -> None:
        """The live copy holds the gradient of `lane`; merges it as far as whole subtrees allow."""
        self.begin_push(lane)
        self.end_push()

    def begin_push(self, lane: int) -> None:
        """The gradient of `lane` is being accumulated: `spans` says what its push will leave, `merge` makes it so.
        Raises `UserError` where the script has changed a finished sum.
        """
        self._refuse_changed()
        self._chain = [self.live]
        push(self._stack, lane, self.live, self._lanes, self._chain_up)
        self._merged = 0

    def _chain_up(
        self,
        kept: Gradients,  # of whole buckets; what `merge` adds to, bucket by bucket
        _: Gradients,
    ) -> Gradients:  # of whole buckets
        self._chain.append(kept)
        return kept

    def merge(self, bucket: int) -> None:
        """The lane's gradient of this bucket is final; buckets come in order."""
        assert bucket == self._merged
        for theirs, mine in pairwise(self._chain):
            mine.flats[bucket].add_(theirs.flats[bucket])
        self._merged += 1

    def end_push(self) -> None:
        """Merges what is left; the copies that are free again go back to the pool."""
        self.live.complete()
        while self._merged < len(self._layout.buckets):
            self.merge(self._merged)
        self._pool += self._chain[:-1]
        self.live = self._stack[-1][1]
        self._versions = self._versions_now()

    def _refuse_changed(self) -> None:
        if self._stack and self._versions_now() != self._versions:
            raise UserError(KEPT_CHANGED)

    def _versions_now(self) -> list[int]:
        return versions(flat for _, kept in self._stack for flat in kept.flats)

    @property
    def spans(self) -> list[Span]:
        """The finished subtrees, ascending."""
        return [span for span, _ in self._stack]

    @property
    def finished(self) -> list[Gradients]:  # each of whole buckets
        """The finished sums, in the order of `spans`."""
        return [kept for _, kept in self._stack]

    @property
    def last(self) -> Gradients:  # of whole buckets
        """The copy that is live once the push that has begun is over: the reduced gradient's place."""
        return self._stack[-1][1] if self._stack else self.live

    def clear(self) -> None:
        """Forget the step's sums; the live copy keeps its values until the next lane begins."""
        self._pool += [kept for _, kept in self._stack if kept is not self.live and kept not in self._pool]
        self._stack, self.unused = [], all_at(self._layout, self._layout.part.coordinate)

    @property
    def bytes(self) -> int:
        """What gradients take here."""
        return self.copies * self.live.bytes

    @property
    def copies(self) -> int:
        """How many gradient copies exist."""
        return len(self._pool) + len({id(kept) for _, kept in self._stack} | {id(self.live)})
