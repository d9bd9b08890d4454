"""The content of a worker's data file, as of a step boundary: a copy of what the worker owns, or the state itself.

Made on the training thread for the writer. Training waits for a `Snapshot` only while it is taken. It has the order of
the file, so that nothing is copied again: sections by tensor (parameters, then each optimizer state), within a section
the pieces in the order of their blocks. One flat buffer of host memory (`Arena`) serves all saves.

A `StreamedState` is written as it lies, and training waits until it is. The file has the same content in another order:
stretch by stretch with all its tensors, as state comes out of a file, then the numbers that blocks share and what is in
no block. It takes the memory of one tensor of a stretch, for zeros in gaps and for copies from a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from shoal_protos.runs import Runs, Span
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.loaded_state import State, counts_in_gaps
from shoal.blocks.values import BlockValues, without_gaps
from shoal.core.container import Region, count_of
from shoal.core.layout import Bucket, Layout, Stretch
from shoal.core.value_places import Places
from shoal.process.device import HOST, Device, DeviceCopy
from shoal.process.host_memory import ReusedMemory, tensor_bytes

PARAMETERS = ""
"""The section of the parameters; optimizer states have their own keys."""


class Arena:
    """Host memory that is used again from save to save; it grows with the largest one. Copies of what lies on `device`
    come into it beside each other: `settle` waits for them."""

    def __init__(self, device: Device = HOST) -> None:
        self._device = device
        self._copies: list[DeviceCopy] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, count: int) -> None:
        """Takes the memory and touches it: the first save would wait for the operating system to find the pages."""
        if self._memory.numel() < count:
            self._find(count)
            self._memory.zero_()

    def take(self, count: int) -> Tensor:
        """`(count,)` uint8; what was taken before is void."""
        if self._memory.numel() < count:
            self._find(count)
        return self._memory[:count]

    def _find(self, count: int) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._memory = self._device.pinned(count, torch.uint8)

    def copy(self, value: Tensor, at: int) -> None:
        """Begins to copy a tensor to byte `at` of what was taken last."""
        if not value.numel():
            return
        target = self._memory[at : at + value.numel() * value.element_size()].view(value.dtype)
        source = value.detach().reshape(-1)
        if self._device.holds(value):
            self._copies.append(self._device.to_host(source, target))
        else:
            target.copy_(source)

    def settle(self) -> None:
        """All is there."""
        for copy in self._copies:
            copy.wait()
        self._copies.clear()


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of blocks whose tensors lie in one range each. `regions`: by key, `PARAMETERS` too. `places`: by key of
    state that is not one value for each element, which of the piece's elements have one: these alone are there.
    """

    stretch: Stretch
    bucket: Bucket
    regions: Mapping[str, Region]
    places: Mapping[str, Places]


def _piece(
    stretch: Stretch, layout: Layout, held: HeldBlocks, keys: Iterable[str], by_name: Mapping[str, Region]
) -> Piece:
    regions, span = {key: by_name[region_name(key, stretch)] for key in keys}, layout.elements(stretch)
    places = {key: one.part(*span) for key, one in held.places_in(stretch).items() if key in regions}
    return Piece(stretch, layout.buckets[stretch.bucket], regions, places)


class DataContent(Protocol):
    """What a data file is written from."""

    @property
    def block_elements(self) -> int: ...
    @property
    def pieces(self) -> tuple[Piece, ...]: ...
    @property
    def tensors(self) -> Mapping[str, Region]:
        """What is in no block, by name."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """In the file's order; they count from the first byte behind its header."""

    def contents(self) -> Iterator[tuple[Region, memoryview]]:
        """All regions in their order with their bytes, each valid until the next is asked for. Where no parameter lies
        there are zeros: an optimizer may count there.
        """
        ...


class TensorsAlone:
    """A `DataContent` without blocks. `values`: contiguous, in host memory, by name."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.block_elements, self.pieces, self._values = 0, (), values
        self.regions = _regions([], values, {})
        self.tensors = {region.name: region for region in self.regions}

    def contents(self) -> Iterator[tuple[Region, memoryview]]:
        for region in self.regions:
            yield region, tensor_bytes(self._values[region.name])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A `DataContent` that is a copy: `data` is what stands in the file behind its header."""

    block_elements: int
    pieces: tuple[Piece, ...]
    tensors: Mapping[str, Region]
    regions: tuple[Region, ...]
    data: Tensor

    def contents(self) -> Iterator[tuple[Region, memoryview]]:
        self._clear_gaps()
        content = memoryview(self.data.numpy().data)
        for region in self.regions:
            yield region, content[region.at : region.at + region.bytes]

    def _clear_gaps(self) -> None:
        for piece in self.pieces:
            first, stop = (at * self.block_elements for at in (piece.stretch.start, piece.stretch.stop))
            gaps = [
                (max(a, first) - first, min(b, stop) - first) for a, b in piece.bucket.gaps if a < stop and b > first
            ]
            for key, region in piece.regions.items():
                is_whole = region.shape and key not in piece.places
                if is_whole and gaps and not (key and counts_in_gaps(key, piece.regions)):
                    values: Tensor = self.data[region.at : region.at + region.bytes].view(region.dtype)
                    for start, end in gaps:
                        values[start:end] = 0


def take_snapshot(
    layout: Layout, weights: BlockValues, held: HeldBlocks, owned: Runs, beside: Mapping[str, Tensor], arena: Arena
) -> Snapshot:
    """Copies the parameters and states of `owned`, and the tensors `beside` (by name: buffers and the like)."""
    drafts = list(_pieces(weights, held.home.outline(owned)))
    counts = {
        region_name(key, draft.stretch): count_of(places, *layout.elements(draft.stretch))
        for draft in drafts
        for key, places in held.places_in(draft.stretch).items()
    }
    regions = _regions(drafts, beside, counts)
    by_name = {region.name: region for region in regions}
    pieces = tuple(_piece(draft.stretch, layout, held, draft.views, by_name) for draft in drafts)
    tensors = {name: by_name[name] for name in beside}
    data = arena.take(regions[-1].at + regions[-1].bytes if regions else 0)
    snapshot = Snapshot(layout.block_elements, pieces, tensors, regions, data)
    _copy_states(snapshot, weights, held.home.stream(owned), arena)
    for name, tensor in beside.items():
        arena.copy(tensor, tensors[name].at)
    arena.settle()
    return snapshot


def _copy_states(
    snapshot: Snapshot, weights: BlockValues, states: Iterable[tuple[Stretch, State]], arena: Arena
) -> None:
    """Each stretch of state, and its parameters, to their places within their piece."""
    for stretch, state in states:
        piece = snapshot.pieces[bisect_right(snapshot.pieces, _begin(stretch), key=lambda one: _begin(one.stretch)) - 1]
        first = (stretch.start - piece.stretch.start) * snapshot.block_elements
        for key, value in {PARAMETERS: weights.of(stretch), **state}.items():
            places = piece.places.get(key)
            skipped = count_of(places, 0, first) * value.element_size() if value.dim() else 0
            arena.copy(value if places is None else places.together(value, first), piece.regions[key].at + skipped)


def _begin(stretch: Stretch) -> tuple[int, int]:
    return stretch.bucket, stretch.start


@dataclass(slots=True)
class _Draft:
    stretch: Stretch
    views: dict[str, list[Tensor]]
    """Views by key: those that follow each other in the piece; one for a number that all blocks share."""


def _pieces(weights: BlockValues, states: Mapping[Stretch, State]) -> Iterator[_Draft]:
    """What is held in many segments as few stretches."""
    draft: _Draft | None = None
    for stretch, state in sorted(states.items(), key=lambda item: item[0]):
        views = {PARAMETERS: weights.of(stretch), **state}
        if draft is not None and _continues(draft, stretch, views):
            draft.stretch = Stretch(stretch.bucket, draft.stretch.start, stretch.stop)
            for key, view in views.items():
                if view.dim():
                    draft.views[key].append(view)
            continue
        if draft is not None:
            yield draft
        draft = _Draft(stretch, {key: [view] for key, view in views.items()})
    if draft is not None:
        yield draft


def _continues(draft: _Draft, stretch: Stretch, views: Mapping[str, Tensor]) -> bool:
    """Whether the blocks are the next ones of the draft's piece, and their tensors of the same kind."""
    end = draft.stretch.bucket, draft.stretch.stop
    if end != (stretch.bucket, stretch.start) or draft.views.keys() != views.keys():
        return False
    return all(
        before[0].dtype == view.dtype and before[0].dim() == view.dim() and (view.dim() or torch.equal(before[0], view))
        for before, view in ((draft.views[key], view) for key, view in views.items())
    )


def _regions(drafts: list[_Draft], beside: Mapping[str, Tensor], counts: Mapping[str, int]) -> tuple[Region, ...]:
    """In the file's order: section by section, large elements first, so that every tensor is aligned to its own.
    `counts`: by name, of those that have not one value for each element.
    """
    found: list[tuple[tuple[int, bool, str], str, torch.dtype, tuple[int, ...]]] = []
    for draft in drafts:
        for key, views in draft.views.items():
            head = views[0]
            name = region_name(key, draft.stretch)
            count = counts.get(name, sum(view.numel() for view in views))
            order = (-head.element_size(), not head.dim(), key)
            found.append((order, name, head.dtype, (count,) if head.dim() else ()))
    for name, tensor in beside.items():
        found.append(((-tensor.element_size(), True, f"~{name}"), name, tensor.dtype, tuple(tensor.shape)))
    found.sort(key=lambda one: one[0])  # stable: within a section the pieces keep their order
    regions, at = list[Region](), 0
    for _, name, dtype, extents in found:
        regions.append(Region(name, dtype, extents, at))
        at += regions[-1].bytes
    return tuple(regions)


def region_name(key: str, stretch: Stretch) -> str:
    """Of a tensor of a stretch, in the file."""
    return f"{'state/' + key if key else 'parameters'}/{stretch.bucket}:{stretch.start}:{stretch.stop}"


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
        for stretch, state in self.held.home.stream(self.owned):
            piece = pieces[stretch]
            values = {PARAMETERS: self.weights.of(stretch), **state}
            for key, region in piece.regions.items():
                if region.shape:
                    first = stretch.start * self.block_elements
                    places, value = piece.places.get(key), values[key]
                    gaps = () if key and counts_in_gaps(key, piece.regions) else piece.bucket.gaps
                    value = without_gaps(value, first, gaps)
                    yield region, _bytes_of(value if places is None else places.together(value, 0))
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

    for stretch, state in held.home.outline(owned).items():
        dtypes = {PARAMETERS: layout.buckets[stretch.bucket].dtype}
        dtypes |= {key: value.dtype for key, value in state.items() if value.dim()}
        of_stretch[stretch] = sorted(dtypes, key=lambda key: (-dtypes[key].itemsize, key))
        for key in of_stretch[stretch]:
            places = held.places_in(stretch).get(key)
            add(region_name(key, stretch), dtypes[key], (count_of(places, *layout.elements(stretch)),))
        shared = {key: value for key, value in state.items() if not value.dim()}
        of_stretch[stretch] += shared
        small += [(region_name(key, stretch), value) for key, value in shared.items()]
    small += beside.items()
    small.sort(key=lambda one: -one[1].element_size())  # every tensor is aligned to its own elements
    for name, value in small:
        add(name, value.dtype, tuple(value.shape))
    by_name = {region.name: region for region in regions}
    pieces = tuple(_piece(stretch, layout, held, keys, by_name) for stretch, keys in of_stretch.items())
    tensors = {name: by_name[name] for name in beside}
    return StreamedState(
        layout.block_elements, pieces, tensors, tuple(regions), weights, held, owned, dict(small)
    )  # fmt: skip


def _bytes_of(
    value: Tensor,  # of any shape
) -> memoryview:
    return tensor_bytes(value.detach().cpu().contiguous())


PART_BYTES = 4 << 20
"""Of each tensor of a piece that is made while it is written."""
READ_BYTES = 1 << 20
"""Of each tensor that is read to be a part of one, or to be compared."""


def parts_of(bucket: Bucket, size: int) -> Iterator[Stretch]:
    """All its blocks, in stretches of so many bytes at most, or of a block."""
    step = max(1, size // (bucket.block_elements * bucket.dtype.itemsize))
    for first in range(0, bucket.blocks, step):
        yield Stretch(bucket.index, first, min(bucket.blocks, first + step))


Kind = tuple[torch.dtype, bool]
"""Of a state: its dtype, and whether it is one number that all elements share."""
PartOf = Callable[[str, str, int, int], Tensor]  # (elements,), or ()
"""What elements of a parameter have, by its name and a key of its state, or `PARAMETERS`; or their one number."""
Small = Mapping[str, tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]]
"""What is in no block, by name: dtype, shape, and what reads it."""


@dataclass(frozen=True, slots=True)
class MadeContent:
    """A `DataContent` that is read part by part while it is written, so that of it only a part is in memory, and that
    in the same memory as the one before.
    """

    block_elements: int
    pieces: tuple[Piece, ...]
    tensors: Mapping[str, Region]
    regions: tuple[Region, ...]
    makers: tuple[Callable[[ReusedMemory], Tensor], ...]
    """Of each region; for what is large there is memory."""

    def contents(self) -> Iterator[tuple[Region, memoryview]]:
        memory = ReusedMemory()
        for region, make in zip(self.regions, self.makers, strict=True):
            yield region, tensor_bytes(make(memory))


def made_content(
    layout: Layout, buckets: Iterable[Bucket], kinds: Callable[[Bucket], Mapping[str, Kind]], part: PartOf, small: Small
) -> MadeContent:
    """Sections by tensor: the parameters, then state by state, so that of each tensor's parts one follows the other,
    what is one number last. `kinds`: what state each of the buckets has.
    """
    drafts: list[tuple[tuple[bool, str], Stretch, torch.dtype]] = []
    beginning: dict[Stretch, Bucket] = {}
    for bucket in buckets:
        for stretch in parts_of(bucket, PART_BYTES):
            beginning[stretch] = bucket
            drafts.append(((False, PARAMETERS), stretch, bucket.dtype))
            drafts += [((is_number, key), stretch, dtype) for key, (dtype, is_number) in kinds(bucket).items()]
    drafts.sort(key=lambda one: one[0])  # stable: within a section the pieces keep their order
    found: dict[Stretch, dict[str, Region]] = {stretch: {} for stretch in beginning}
    regions, makers, at = list[Region](), list[Callable[[ReusedMemory], Tensor]](), 0
    for (is_number, key), stretch, dtype in drafts:
        count = () if is_number else (stretch.blocks * layout.block_elements,)
        regions.append(Region(region_name(key, stretch), dtype, count, at))
        found[stretch][key] = regions[-1]
        makers.append(partial(_made, regions[-1], beginning[stretch], layout.elements(stretch), key, part))
        at += regions[-1].bytes
    tensors = dict[str, Region]()
    for name, (dtype, shape, read) in small.items():
        regions.append(Region(name, dtype, shape, at))
        tensors[name] = regions[-1]
        makers.append(partial(_read, read))
        at += regions[-1].bytes
    pieces = tuple(Piece(stretch, bucket, found[stretch], {}) for stretch, bucket in beginning.items())
    return MadeContent(layout.block_elements, pieces, tensors, tuple(regions), tuple(makers))


def _read(read: Callable[[], Tensor], _: ReusedMemory) -> Tensor:  # of any shape
    return read()


def _made(
    region: Region, bucket: Bucket, elements: Span, key: str, part: PartOf, memory: ReusedMemory
) -> Tensor:  # of the region's shape
    """Zeros where no parameter lies."""
    if not region.shape:
        return part(bucket.slots[0].parameter.name, key, 0, 1)
    (start, stop), found = elements, memory.take(region.shape, region.dtype).zero_()
    for slot in bucket.slots:
        first, last = max(start, slot.start), min(stop, slot.start + slot.parameter.elements)
        for at in range(first, last, READ_BYTES // region.dtype.itemsize):
            end = min(at + READ_BYTES // region.dtype.itemsize, last)
            found[at - start : end - start] = part(slot.parameter.name, key, at - slot.start, end - slot.start)
    return found
