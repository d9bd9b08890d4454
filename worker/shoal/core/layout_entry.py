"""The layout as a manifest writes it: buckets with their slots, and the other names under which tensors are known.

A layout that was read is built again as the worker's own `Layout`, so that both sides address blocks by one thing.
Whatever does not add up (slots that overlap, a block size that no layout has) makes the manifest a damaged one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.core.container import CODES, DTYPES
from shoal.core.layout import MOST_BLOCKS, SMALLEST_BLOCK, VERSION, Bucket, Layout, Slot, Trainable


class Entry(BaseModel):
    """A section of a manifest: frozen, exact types, no key but the listed ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Count = Annotated[int, Field(ge=0, le=1 << 53)]
Name = Annotated[str, Field(max_length=4_096)]
RunName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$")]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]
Code = Literal[
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
    "C64",
]  # fmt: skip
"""safetensors' names of dtypes."""


class SlotEntry(Entry):
    """Where a parameter lies in its bucket: from element `start` on."""

    name: Name
    shape: Shape
    start: Count


class BucketEntry(Entry):
    group: Annotated[int, Field(ge=0, le=1 << 20)]
    dtype: Code
    blocks: Annotated[int, Field(ge=1, le=1 << 20)]
    slots: tuple[SlotEntry, ...]


class LayoutEntry(Entry):
    version: Literal[2] = VERSION
    block_elements: Count
    buckets: tuple[BucketEntry, ...]
    tied: dict[Name, Name]
    """Other names of parameters and buffers → the name under which they are written."""

    @classmethod
    def of(cls, layout: Layout, tied: dict[str, str]) -> LayoutEntry:
        """The entry as it is written."""
        buckets = tuple(
            BucketEntry(
                group=bucket.group,
                dtype=CODES[bucket.dtype],  # type: ignore[arg-type]
                blocks=bucket.blocks,
                slots=tuple(
                    SlotEntry(name=slot.parameter.name, shape=slot.parameter.shape, start=slot.start)
                    for slot in bucket.slots
                ),
            )
            for bucket in layout.buckets
        )
        return cls(block_elements=layout.block_elements, buckets=buckets, tied=tied)

    def layout(self) -> Layout:
        """The layout as it is used."""
        buckets: list[Bucket] = []
        for index, entry in enumerate(self.buckets):
            dtype = DTYPES[entry.dtype]
            slots = tuple(Slot(Trainable(s.name, s.shape, dtype, entry.group), s.start) for s in entry.slots)
            elements = entry.blocks * self.block_elements
            buckets.append(Bucket(index, entry.group, dtype, slots, entry.blocks, elements))
        return Layout(self.block_elements, tuple(buckets))

    def broken(self) -> Iterator[str]:
        """What no layout is like."""
        if not self.buckets:
            yield "its layout has no parameters"
        size = self.block_elements
        if size < SMALLEST_BLOCK or size & (size - 1):
            yield f"its blocks have {size} elements; expected a power of two from {SMALLEST_BLOCK} on"
        most = max(MOST_BLOCKS, len(self.buckets))
        if sum(bucket.blocks for bucket in self.buckets) > most:
            yield f"it has {sum(bucket.blocks for bucket in self.buckets)} blocks; expected at most {most}"
        names: set[str] = set()
        for bucket in self.layout().buckets:
            at = 0
            for slot in bucket.slots:
                if slot.start < at or slot.start + slot.parameter.elements > bucket.elements:
                    yield f'parameter "{slot.parameter.name}" does not fit into bucket {bucket.index}'
                if slot.parameter.name in names:
                    yield f'parameter "{slot.parameter.name}" is in it twice'
                names.add(slot.parameter.name)
                at = slot.start + slot.parameter.elements
