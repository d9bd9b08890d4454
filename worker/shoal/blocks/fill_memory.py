"""Memory for the state of blocks that a world fills: found for whole stretches, of which slices bring part by part.

So a slice is received where its blocks are to stay, and the parts of a stretch are one segment as they come. Pages that
nothing has come into yet take no memory. Knows no group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import torch
from shoal_protos.runs import Runs
from torch import Tensor

from shoal.core.layout import Layout, Stretch
from shoal.process.host_memory import memory_on

FindMemory = Callable[[int, torch.dtype], Tensor]  # (elements,) of the dtype


class FillMemory:
    """`runs`: all blocks that are still to be filled. `find`: where, if not beside the parameters."""

    def __init__(self, layout: Layout, runs: Runs, find: FindMemory | None = None) -> None:
        self._layout, self._find = layout, find or partial(memory_on, layout.device)
        self.runs, self._wholes = runs, layout.stretches(runs)
        self._found: dict[tuple[Stretch, str, torch.dtype], Tensor] = {}

    def part(self, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (stretch's elements,) of `dtype`
        """Where the state `key` of a stretch of these blocks is to lie."""
        whole = self._wholes[bisect_right(self._wholes, (stretch.bucket, stretch.start), key=_begin) - 1]
        assert whole.bucket == stretch.bucket and stretch.stop <= whole.stop, f"{stretch} is not among {self._wholes}"
        size = self._layout.buckets[stretch.bucket].block_elements
        if (whole, key, dtype) not in self._found:
            self._found[whole, key, dtype] = self._find(whole.blocks * size, dtype)
        first, last = ((at - whole.start) * size for at in (stretch.start, stretch.stop))
        return self._found[whole, key, dtype][first:last]


def _begin(stretch: Stretch) -> tuple[int, int]:
    return stretch.bucket, stretch.start
