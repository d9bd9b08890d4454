"""Parts of a manifest that training knows too: the layout as it is written, and the lineage of a run.

Buckets are written with their slots, and with the other names under which tensors are known. A layout that was read is
built again as the worker's own `Layout`, so that both sides address blocks by one thing. Where it does not add up
(slots that overlap, a block size that no layout has), the manifest is a damaged one.

The lineage says which checkpoints a run's training goes back to, and which ones were given up when it went back to an
older one. The manifest keeps it, so that a folder tells it without any controller. Several runs may share a folder:
what is of none of a run's lineage is not its to count or to delete. The rest of a manifest is in
checkpoint/manifest.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from shoal_protos.shape import MOST_PROCESSES

from shoal.core.cell_part import CellPart, Division
from shoal.core.container import CODES, DTYPES
from shoal.core.cuts import Cut, Dealt
from shoal.core.layout import MOST_BLOCKS, SMALLEST_BLOCK, VERSION, Bucket, Layout, Slot, Trainable
from shoal.core.ties import Copy, Tie


class Entry(BaseModel):
    """A section of a manifest: frozen, exact types, no key but the listed ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Count = Annotated[int, Field(ge=0, le=1 << 53)]
Positive = Annotated[int, Field(ge=1, le=1 << 53)]
Name = Annotated[str, Field(max_length=4_096)]
RunName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$")]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]
Code = Literal[
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
    "C64",
]  # fmt: skip
"""safetensors' names of dtypes."""


def only_of_cells(default: int) -> Any:
    """A field that stands in the manifest only where a cell is several processes. `default`: what it is else."""
    return Field(default, ge=default, le=MOST_PROCESSES, exclude_if=lambda value: value == default)


class SlotEntry(Entry):
    """Where a parameter lies in its bucket: from element `start` on."""

    name: Name
    shape: Shape
    start: Count
    cut: Annotated[tuple[Count, Positive] | None, Field(exclude_if=lambda cut: cut is None)] = None
    """Of one that each coordinate of a cell has a part of, or would have with more of them: dimension and pieces
    (cuts.py). None: not known."""
    registered: Annotated[tuple[Count, Count] | None, Field(exclude_if=lambda one: one is None)] = None
    """Its number among the parameters of its stage, in registration order, and its unit's. None: not known."""
    gradient: Annotated[Literal["", "sum", "placed"], Field(exclude_if=lambda one: not one)] = ""
    """`sum`: marked as one of whose gradient each place has a part; `placed`: a DTensor, whose placements say it."""
    dealt: Annotated[
        tuple[Annotated[int, Field(ge=-1, le=64)], Annotated[int, Field(ge=0, le=64)], Positive] | None,
        Field(exclude_if=lambda dealt: dealt is None),
    ] = None
    """Of an expert's, or one that would be with more places of `expert`: where its number is (cuts.py)."""
    tie: Annotated[Name, Field(exclude_if=lambda tie: not tie)] = ""
    """Of one of which stages at other places of a pipeline have copies: the name that they have in common."""
    copies: Annotated[tuple[tuple[Name, Name, Count, Count], ...], Field(exclude_if=lambda copies: not copies)] = ()
    """Of one that several stages at its place have: of what further stages have the tie, name, number and unit."""


class BucketEntry(Entry):
    group: Annotated[int, Field(ge=0, le=1 << 20)]
    dtype: Code
    blocks: Annotated[int, Field(ge=1, le=1 << 20)]
    slots: tuple[SlotEntry, ...]
    own: Annotated[bool, Field(exclude_if=lambda own: not own)] = False
    """Whether each place of a cell's tensor dimension has one of its own."""
    expert: Annotated[bool, Field(exclude_if=lambda expert: not expert)] = False
    """Whether each place of its experts has."""
    place: int = only_of_cells(0)
    """Of a pipeline: the stage that it is of."""


class LayoutEntry(Entry):
    version: Literal[2] = VERSION
    block_elements: Count
    buckets: tuple[BucketEntry, ...]
    tied: dict[Name, Name]
    """Other names of parameters and buffers → the name under which they are written."""
    coordinates: int = only_of_cells(1)
    """The processes of a cell; all of a stage have buckets alike."""
    contexts: int = only_of_cells(1)
    """How many of them have each part of the model."""
    stages: int = only_of_cells(1)
    """Of a pipeline."""
    experts: int = only_of_cells(1)
    """Among how many places experts are divided."""
    numbered: Annotated[Count, Field(exclude_if=lambda one: not one)] = 0
    """How many stages `cell.stages` has made of the model, with whose numbers names begin; 0: it has not."""

    @classmethod
    def of(cls, layout: Layout, tied: dict[str, str]) -> LayoutEntry:
        """The entry as it is written."""
        buckets = tuple(
            BucketEntry(
                group=bucket.group,
                dtype=CODES[bucket.dtype],  # type: ignore[arg-type]
                blocks=bucket.blocks,
                slots=tuple(
                    SlotEntry(
                        name=one.name,
                        shape=one.shape,
                        start=slot.start,
                        cut=one.cut,
                        registered=(one.order, one.unit) if one.order >= 0 else None,
                        gradient="placed" if one.wrapped else "sum" if one.adds else "",
                        dealt=one.dealt,
                        tie=one.tie.name if one.tie is not None else "",
                        copies=one.copies,
                    )
                    for slot in bucket.slots
                    for one in (slot.parameter,)
                ),
                own=bucket.division.by_tensor,
                expert=bucket.division.by_expert,
                place=place,
            )
            for place, of_stage in enumerate(layout.by_stage)
            for bucket in of_stage
        )
        part = layout.part
        return cls(
            block_elements=layout.block_elements, buckets=buckets, tied=tied, coordinates=part.coordinates,
            contexts=part.contexts, stages=part.stages, experts=part.experts, numbered=part.numbered,
        )  # fmt: skip

    def layout(self) -> Layout:
        """The layout as it is used, at coordinate 0 of a cell."""
        stages: list[list[Bucket]] = [[] for _ in range(self.stages)]
        places = dict[str, tuple[int, ...]]()
        for place, tie in sorted(
            {(entry.place, slot.tie) for entry in self.buckets for slot in entry.slots if slot.tie}
        ):
            places[tie] = (*places.get(tie, ()), place)
        for entry in self.buckets:
            buckets, dtype = stages[entry.place], DTYPES[entry.dtype]
            slots = tuple(Slot(_parameter(slot, entry, places), slot.start) for slot in entry.slots)
            elements = entry.blocks * self.block_elements
            buckets.append(Bucket(len(buckets), entry.group, dtype, slots, entry.blocks, elements))
        own, of_expert = (
            frozenset(slot.name for entry in self.buckets if getattr(entry, which) for slot in entry.slots)
            for which in ("own", "expert")
        )
        part = CellPart(
            self.coordinates, own=own, contexts=self.contexts, stages=self.stages, experts=self.experts,
            of_expert=of_expert, numbered=self.numbered,
        )  # fmt: skip
        found = tuple(map(tuple, stages))
        return Layout(self.block_elements, found[0], part=part, stages=found if self.stages > 1 else ())

    def broken(self) -> Iterator[str]:
        """What no layout is like."""
        if not self.buckets:
            yield "its layout has no parameters"
        size = self.block_elements
        if size < SMALLEST_BLOCK or size & (size - 1):
            yield f"its blocks have {size} elements; expected a power of two from {SMALLEST_BLOCK} on"
        if self.coordinates % (self.contexts * self.stages * self.experts):
            experts = f", and {self.experts} places of experts" if self.experts > 1 else ""
            yield (
                f"its cells have {self.coordinates} processes in {self.contexts} contexts and {self.stages} stages"
                f"{experts}"
            )
            return
        if {entry.place for entry in self.buckets} != set(range(self.stages)) and self.buckets:
            yield f"its buckets are not of the {self.stages} stages that it has"
            return
        layout = self.layout()
        most = max(MOST_BLOCKS, len(self.buckets) * self.coordinates)
        if layout.blocks > most:
            yield f"it has {layout.blocks} blocks; expected at most {most}"
        names: set[str] = set()
        for bucket in chain.from_iterable(layout.by_stage):
            at = 0
            for slot in bucket.slots:
                if slot.start < at or slot.start + slot.parameter.elements > bucket.elements:
                    yield f'parameter "{slot.parameter.name}" does not fit into bucket {bucket.index}'
                cut, shape = slot.parameter.cut, slot.parameter.shape
                if cut is not None and not cut.fits(shape):
                    yield f'parameter "{slot.parameter.name}" of shape {shape} is cut along {cut.dim} by {cut.stride}'
                if slot.parameter.dealt is not None and not slot.parameter.dealt.fits(slot.parameter.name, shape):
                    yield f'parameter "{slot.parameter.name}" of shape {shape} has no number of an expert'
                if slot.parameter.name in names:
                    yield f'parameter "{slot.parameter.name}" is in it twice'
                names.add(slot.parameter.name)
                at = slot.start + slot.parameter.elements


def _parameter(slot: SlotEntry, of: BucketEntry, places: Mapping[str, tuple[int, ...]]) -> Trainable:
    """`places`: by the name of a tie."""
    order, unit = slot.registered or (-1, 0)
    return Trainable(
        slot.name, slot.shape, DTYPES[of.dtype], of.group, unit, Division(of.expert, of.own),
        wrapped=slot.gradient == "placed", cut=Cut(*slot.cut) if slot.cut is not None else None,
        adds=slot.gradient == "sum", order=order, dealt=Dealt(*slot.dealt) if slot.dealt is not None else None,
        tie=Tie(slot.tie, places[slot.tie], of.place) if slot.tie else None,
        copies=tuple(Copy(*one) for one in slot.copies),
    )  # fmt: skip


MOST_BRANCHES = 64
"""How far back it is remembered: retention has long deleted what is older, but for every n-th."""


class Branch(Entry):
    """Training went on from a checkpoint: what was saved after it and before the generation `began` was given up."""

    run: RunName
    """Run of the checkpoint."""
    generation: Count
    step: Count
    began: Count
    """The first generation that went on from it."""


Lineage = tuple[Branch, ...]
"""Newest first."""


def gone_on(run: str, generation: int, step: int, before: Lineage, began: int) -> Lineage:
    """The lineage of a world that goes on from a checkpoint whose own lineage is `before`."""
    return (Branch(run=run, generation=generation, step=step, began=began), *before)[:MOST_BRANCHES]


def is_given_up(generation: int, step: int, lineage: Sequence[Branch]) -> bool:
    """Whether training went back behind this save and on without it."""
    return any((b.generation, b.step) < (generation, step) and generation < b.began for b in lineage)
