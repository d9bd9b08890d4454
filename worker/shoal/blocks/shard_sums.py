"""One worker's gradients where they are sharded (stages 2 and 3): the lane at hand, and the reduced ones of its blocks.

`ShardSums` stands where `LaneSums` does; what waits between rounds belongs to exchange/round_reduction.py. `Leaves`
keeps the lane at hand bucket by bucket: a bucket's memory exists from its first parameter's gradient until it has left
for the owners. Gradients are taken from their parameters as backward makes them, and one that fills a bucket is the
bucket's memory, as it is: the lanes' sum turns −0.0 into +0.0, not this file. Knows no group.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import gt

import torch
from shoal_protos.runs import NO_BLOCKS, Runs
from torch import Tensor, nn

from shoal.blocks.flat import add_to, put_first, refuse_others, views
from shoal.blocks.released import looks_at_no_value
from shoal.blocks.values import ShardValues
from shoal.cells.marks import OverCell, SpreadGradients
from shoal.core.layout import Layout
from shoal.core.misses import all_at


class ShardSums:
    """`live` is the lane at hand; `reduced` the mean over all lanes of the blocks that this worker replays."""

    def __init__(self, layout: Layout, are_narrow: bool) -> None:
        self.live, self.reduced = Leaves(layout, are_narrow), ShardValues(layout)
        self.are_mirrored_by_host = False
        """Whether what others mirror comes to the memory of their hosts; alike on all workers."""
        self.over_cell: OverCell | None = None
        """As that of `LaneSums`."""
        self._all = self.unused = all_at(layout, layout.part.coordinate)
        """`unused`: the parameters that have had no gradient since the step began, as bits."""

    def reserve(self, lanes: Iterable[int]) -> None:
        """Nothing is kept for lanes: their gradients leave."""

    def begin_lane(self) -> None:
        """What a void lane has left behind is forgotten."""
        self.live.clear()

    def before_backward(self) -> None:
        """The script is given no gradient that it could have changed."""

    def backward_done(self, _: Sequence[nn.Parameter], is_lanes_last: bool = False) -> None:
        """Buckets are completed one by one, as they leave. After a lane's last backward gradients that are spread over
        a cell are added up. Raises `WorldChanged`.
        """
        if self.over_cell is not None and is_lanes_last:
            self.live.sum_over_cell(self.over_cell)

    def lane_done(self, lane: int, is_last: bool) -> None:
        """It has left with its backward."""

    def keep(self, runs: Runs, owned: Runs) -> None:
        """The blocks that this worker replays at the coming vote; `owned`: those of them that it owns."""
        self.reduced.keep(runs, owned)

    def clear(self) -> None:
        """The step's sums are void, or applied: their memory serves the next forward."""
        self.live.clear()
        self.reduced.keep(NO_BLOCKS)
        self.unused = self._all

    @property
    def bytes(self) -> int:
        """What gradients take here."""
        return self.live.bytes + self.reduced.bytes


def _uses(
    tensor: Tensor,  # of any shape
) -> tuple[int, int]:
    """How many tensors lie in its memory, and how many names Python has for that: whoever counts is counted."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


OF_ITS_OWN = _uses(torch.empty(1))
"""So many uses has memory that a gradient shares with nobody."""


class Leaves:
    """`are_narrow`: a lane is one micro-batch, so its gradient has the precision of the parameters."""

    def __init__(self, layout: Layout, are_narrow: bool) -> None:
        self._layout = layout
        self._dtypes = [bucket.leaf_dtype if are_narrow else bucket.wide_dtype for bucket in layout.buckets]
        self._spread = SpreadGradients(layout) if layout.is_in_parts else None
        self.taken = range(sum(len(bucket.slots) for bucket in layout.buckets))
        self._slots = [(b, s) for b, bucket in enumerate(layout.buckets) for s in range(len(bucket.slots))]
        self._names = [slot.parameter.name for bucket in layout.buckets for slot in bucket.slots]
        self._flats: dict[int, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}
        self._seen: dict[int, set[int]] = {}
        self._kept: dict[int, dict[int, Tensor]] = defaultdict(dict)
        """By bucket and place, gradients of buckets that have no memory yet."""
        self._lent: set[int] = set()
        """Buckets whose memory is a gradient's own."""
        self._pool: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def put_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before a backward. Raises `UserError` as `Gradients.put_back` does."""
        for name, parameter in _odd(self._names, parameters):
            refuse_others(name, parameter, None)
            parameter.grad = None

    def take(
        self,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
    ) -> None:
        """As `Gradients.take`; the parameter has none then."""
        gradient = parameter.grad
        if gradient is not None:
            self.add(slot, gradient if self._spread is None else self._spread.local(slot, parameter, gradient))
            parameter.grad = None

    def add(
        self,
        slot: int,
        gradient: Tensor,  # of its parameter's shape and dtype
    ) -> None:
        """To what there is of a parameter's. One that nobody else can change is kept, not copied, until its bucket is
        complete: by then another bucket's memory has become free, as a rule.
        """
        bucket, place = self._slots[slot]
        if bucket not in self._flats and place not in self._kept[bucket] and not _is_shared(gradient):
            self._kept[bucket][place] = gradient
            return
        self._begin(bucket)
        self._add(bucket, place, gradient)

    def _add(
        self,
        bucket: int,
        place: int,
        gradient: Tensor,  # of its parameter's shape and dtype
    ) -> None:
        view, seen = self._views[bucket][place], self._seen[bucket]
        if place in seen:
            add_to(gradient, view)
            return
        seen.add(place)
        put_first(gradient, view)

    def _begin(self, bucket: int) -> None:
        if bucket in self._flats:
            return
        layout, kept = self._layout.buckets[bucket], self._kept.pop(bucket, {})
        kind = layout.elements, self._dtypes[bucket]
        whole = _whole(kept, *kind)
        if whole is not None:
            self._flats[bucket], self._views[bucket], self._seen[bucket] = whole, views(layout, whole), {0}
            self._lent.add(bucket)
            return
        pool, device = self._pool[kind], self._layout.device
        flat = pool.pop() if pool else torch.empty(kind[0], dtype=kind[1], device=device)
        for start, stop in layout.gaps:
            flat[start:stop] = 0
        self._flats[bucket], self._views[bucket], self._seen[bucket] = flat, views(layout, flat), set()
        for place in [*kept]:
            self._add(bucket, place, kept.pop(place))

    def complete(self, bucket: int) -> None:
        """Parameters without a gradient have one of zeros."""
        self._begin(bucket)
        seen = self._seen[bucket]
        for place, view in enumerate(self._views[bucket]):
            if place not in seen:
                view.zero_()
                seen.add(place)

    def sum_over_cell(self, over_cell: OverCell) -> None:
        """The lane's backwards are over, and of buckets with what is spread over the cell nothing has left: that is
        added up. Raises `WorldChanged`.
        """
        if self._spread is not None:
            self._spread.add_up(self._completed, over_cell)

    def _completed(self, slot: int) -> Tensor:  # of its parameter's shape
        bucket, place = self._slots[slot]
        self.complete(bucket)
        return self._views[bucket][place]

    def made(self, bucket: int) -> dict[int, Tensor]:  # by place, each of its parameter's shape
        """The gradients of a bucket that backwards of the lane have made, as copies; −0.0 is +0.0 in them."""
        if bucket in self._flats:
            return {place: self._views[bucket][place] + 0.0 for place in self._seen[bucket]}
        return {place: gradient + 0.0 for place, gradient in self._kept.get(bucket, {}).items()}

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        """A view of elements of a bucket that is there."""
        return self._flats[bucket][start:stop]

    def release(self, bucket: int) -> None:
        """It has left: its memory serves others."""
        self._begin(bucket)
        flat = self._flats.pop(bucket)
        del self._views[bucket], self._seen[bucket]
        if bucket in self._lent:
            self._lent.remove(bucket)
        else:
            self._pool[flat.numel(), flat.dtype].append(flat)

    def clear(self) -> None:
        """Void; what is in flight keeps its memory."""
        self._flats, self._views, self._seen = {}, {}, {}
        self._lent.clear()
        self._kept.clear()
        self._pool.clear()
        if self._spread is not None:
            self._spread.begin()

    def are_in_place(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether no parameter has a gradient: they have been taken."""
        return all(parameter.grad is None for parameter in parameters)

    @property
    def bytes(self) -> int:
        """What the buckets that are there take, and memory for the next ones."""
        kept = sum(gradient.nbytes for gradients in self._kept.values() for gradient in gradients.values())
        pooled = sum(flat.nbytes for flats in self._pool.values() for flat in flats)
        return kept + pooled + sum(flat.nbytes for flat in self._flats.values())


def _whole(
    kept: Mapping[int, Tensor],  # by place, each of its parameter's shape and dtype
    elements: int,
    dtype: torch.dtype,
) -> Tensor | None:  # (elements,)
    """The memory of a gradient that is all of a bucket, and has its values there as they are."""
    gradient = kept.get(0)
    if gradient is None or gradient.numel() != elements or gradient.dtype != dtype:
        return None
    if not gradient.is_contiguous() or gradient.is_neg():
        return None
    return gradient.detach().view(-1)


def _is_shared(
    gradient: Tensor,  # of its parameter's shape
) -> bool:
    """Whether something else lies in its memory, too: what a function or a hook of the script writes again (of numpy's,
    say, which torch cannot resize), or a parameter, whose memory comes and goes.
    """
    if gradient.is_sparse:
        return True
    return any(map(gt, _uses(gradient), OF_ITS_OWN)) or not gradient.untyped_storage().resizable()


@looks_at_no_value
def _odd(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Those that have a gradient, or want none."""
    pairs = zip(names, parameters, strict=True)
    return [(name, one) for name, one in pairs if one.grad is not None or not one.requires_grad]
