"""A plain model file as a checkpoint of step 0, which a job begins with (`resume`).

It holds tensors by name and no training state: one optimizer group, whatever the job has; a job takes the tensors by
name for its parameters, frozen parameters and buffers, and converts their dtype to its own. It is carried over part by
part, whatever its size.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shoal.blocks.host_memory import tensor_bytes
from shoal.checkpoint.catalogue import SaveName
from shoal.checkpoint.commit import commit
from shoal.checkpoint.container import Region
from shoal.checkpoint.layout_entry import LayoutEntry
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.model_file import ModelFile, open_model
from shoal.checkpoint.snapshot import PARAMETERS, Piece, region_name
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, write_content
from shoal.core.layout import Bucket, Layout, Stretch, Trainable, lay_out

PART_BYTES = 32 << 20
"""What is in memory at one time, about."""


def import_model(file: Path, storage: Storage) -> SaveName:
    """Writes the checkpoint; returns its name. Raises `UserError` for a file that holds no model."""
    model = open_model(file)
    layout = lay_out([Trainable(name, known.shape, known.dtype, 0) for name, known in model.known.items()])
    author = Author("import", secrets.token_hex(8))
    name = SaveName.of(0, 0, 0, author.incarnation)
    draft = Manifest(
        kind="model", job="", step=0, generation=0, last_step=0, layout=LayoutEntry.of(layout, dict(model.tied)),
        optimizer="", groups=[], data=None, scheduler=None, scaler=None, states={}, record="", buffers=(), frozen=None,
        config={}, numerics={}, files=(),
    )  # fmt: skip
    storage.prepare()
    entry = write_content(storage, name.folder, 0, author, _content(model, layout))
    commit(storage, name.folder, draft, [entry.name])
    return name


@dataclass(frozen=True, slots=True)
class _Content:
    """A `DataContent` that is read from a model file while it is written."""

    model: ModelFile
    block_elements: int
    pieces: tuple[Piece, ...]
    tensors: Mapping[str, Region] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(piece.regions[PARAMETERS] for piece in self.pieces)

    def contents(self) -> Iterator[tuple[Region, memoryview]]:
        for piece in self.pieces:
            start, stop = (at * self.block_elements for at in (piece.stretch.start, piece.stretch.stop))
            yield piece.regions[PARAMETERS], tensor_bytes(_range(self.model, piece.bucket, start, stop))


def _content(model: ModelFile, layout: Layout) -> _Content:
    pieces, at = list[Piece](), 0
    for bucket in layout.buckets:
        most = max(1, PART_BYTES // (layout.block_elements * bucket.dtype.itemsize))
        for first in range(0, bucket.blocks, most):
            stretch = Stretch(bucket.index, first, min(bucket.blocks, first + most))
            shape = (stretch.blocks * layout.block_elements,)
            region = Region(region_name(PARAMETERS, stretch), bucket.dtype, shape, at)
            pieces.append(Piece(stretch, bucket, {PARAMETERS: region}))
            at += region.bytes
    return _Content(model, layout.block_elements, tuple(pieces))


def _range(model: ModelFile, bucket: Bucket, start: int, stop: int) -> Tensor:  # (stop - start,) of the bucket's dtype
    """Zeros where no tensor lies."""
    found = torch.zeros(stop - start, dtype=bucket.dtype)
    for slot in bucket.slots:
        first, last = max(start, slot.start), min(stop, slot.start + slot.parameter.elements)
        if first < last:
            values = model.part(slot.parameter.name, first - slot.start, last - slot.start)
            found[first - start : last - start] = values
    return found
