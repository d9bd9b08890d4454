"""Parameters where they are sharded (stage 3): with the state of the blocks that a worker holds, and nowhere else."""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

from shoal.blocks.segments import Segments, stretch_of
from shoal.core.layout import Stretch


class HeldWeights:
    """`BlockValues` of held blocks. From another thread than the training's under the segments' lock."""

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
                assert segment.weights is not None
                stop, size = min(where.stop, stretch.stop), self._layout.buckets[where.bucket].block_elements
                found.append(segment.weights[(at - where.start) * size : (stop - where.start) * size])
                at = stop
        assert at == stretch.stop, f"{stretch} is not held"
        return found

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
