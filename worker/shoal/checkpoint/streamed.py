"""A save without a copy: what this worker owns is written as it lies, and training waits (`shoal.checkpoint.stream`).

The file has the same content as one that is written from a snapshot, in another order: stretch by stretch with all its
tensors, as state comes out of a file, then the numbers that blocks share and what is in no block. Beside the state
there is one tensor of a stretch in memory, where zeros must be put into its gaps, or where it came from a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from shoal_protos.runs import Runs
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.host_memory import tensor_bytes
from shoal.blocks.values import BlockValues, without_gaps
from shoal.checkpoint.container import Region
from shoal.checkpoint.snapshot import PARAMETERS, Piece, region_name
from shoal.core.layout import Layout, Stretch


@dataclass(frozen=True, slots=True)
class StreamedState:
    """A `DataContent`. It is what training holds, so nothing may change until it is written."""

    block_elements: int
    pieces: tuple[Piece, ...]
    tensors: Mapping[str, Region]
    regions: tuple[Region, ...]
    weights: BlockValues
    held: HeldBlocks
    owned: Runs
    small: Mapping[str, Tensor]
    """What stands behind the stretches, by its region's name: each of its own shape."""

    def contents(self) -> Iterator[tuple[Region, memoryview]]:
        pieces = {piece.stretch: piece for piece in self.pieces}
        for stretch, state in self.held.stream(self.owned):
            piece = pieces[stretch]
            values = {PARAMETERS: self.weights.of(stretch), **state}
            for key, region in piece.regions.items():
                if region.shape:
                    first = stretch.start * self.block_elements
                    yield region, _bytes_of(without_gaps(values[key], first, piece.bucket.gaps))
        for region in self.regions:
            if region.name in self.small:
                yield region, _bytes_of(self.small[region.name])


def streamed_state(
    layout: Layout, weights: BlockValues, held: HeldBlocks, owned: Runs, beside: Mapping[str, Tensor]
) -> StreamedState:
    """The parameters and states of `owned`, and the tensors `beside` (by name: buffers and the like)."""
    regions: list[Region] = []
    small: list[tuple[str, Tensor]] = []
    of_stretch: dict[Stretch, list[str]] = {}

    def add(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        regions.append(Region(name, dtype, shape, regions[-1].at + regions[-1].bytes if regions else 0))

    for stretch, state in held.outline(owned).items():
        dtypes = {PARAMETERS: layout.buckets[stretch.bucket].dtype}
        dtypes |= {key: value.dtype for key, value in state.items() if value.dim()}
        of_stretch[stretch] = sorted(dtypes, key=lambda key: (-dtypes[key].itemsize, key))
        for key in of_stretch[stretch]:
            add(region_name(key, stretch), dtypes[key], (stretch.blocks * layout.block_elements,))
        shared = {key: value for key, value in state.items() if not value.dim()}
        of_stretch[stretch] += shared
        small += [(region_name(key, stretch), value) for key, value in shared.items()]
    small += beside.items()
    small.sort(key=lambda one: -one[1].element_size())  # every tensor is aligned to its own elements
    for name, value in small:
        add(name, value.dtype, tuple(value.shape))
    by_name = {region.name: region for region in regions}
    pieces = tuple(
        Piece(stretch, layout.buckets[stretch.bucket], {key: by_name[region_name(key, stretch)] for key in keys})
        for stretch, keys in of_stretch.items()
    )
    tensors = {name: by_name[name] for name in beside}
    return StreamedState(
        layout.block_elements, pieces, tensors, tuple(regions), weights, held, owned, dict(small)
    )  # fmt: skip


def _bytes_of(
    value: Tensor,  # of any shape
) -> memoryview:
    return tensor_bytes(value.detach().cpu().contiguous())
