"""Reads any set of blocks of a checkpoint, and only the byte ranges that they need.

Address is the block: who wrote it does not matter. Parameters go straight into the flats, states into one tensor per
run, so that what was many pieces becomes few segments again. Every block's checksums are verified; the first that
differs is named and nothing of the checkpoint may be used then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.blocks.loaded_state import State
from shoal.blocks.values import BlockValues
from shoal.checkpoint.manifest import CHECKSUM_BYTES, Manifest, PieceEntry, TensorEntry, buffer_tensor, checksum
from shoal.checkpoint.snapshot import PARAMETERS
from shoal.checkpoint.storage import Storage, Target
from shoal.core.cell_part import DIVISIONS
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.container import DTYPES, count_of, ends_of
from shoal.core.layout import Bucket, Slot, Stretch
from shoal.process.host_memory import ReusedMemory, host_memory, tensor_bytes

READERS = 4
"""Threads that read and verify: hashing is what takes the time, and it lets others run."""
BATCH_BYTES = 32 << 20
"""What one of them reads before it verifies."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The bytes of consecutive blocks of one tensor (or of one tensor beside them): where they lie, where they go,
    what they must be."""

    file: str
    at: int
    target: memoryview
    checksums: Sequence[bytes]
    ends: Sequence[int]
    """Where in the target what each checksum is of ends."""
    label: str
    place: tuple[int, int] | None
    """Bucket, and position there of the first block."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of one piece that are wanted."""

    stretch: Stretch
    file: str
    piece: PieceEntry

    def span(self, block_elements: int) -> Span:
        """Which elements of the piece it has."""
        first, stop = self.stretch.start - self.piece.blocks[0], self.stretch.stop - self.piece.blocks[0]
        return first * block_elements, stop * block_elements

    def range_of(self, key: str, target: Tensor, block_elements: int) -> _Range:
        """The range that fills `target` with what the file has of these blocks' part of one tensor; a number that all
        share whole.
        """
        piece, view = self.piece, tensor_bytes(target)
        column = 0 if key == PARAMETERS else 1 + sorted(piece.state).index(key)
        at = piece.at if key == PARAMETERS else piece.state[key].at
        label = "the parameters" if key == PARAMETERS else f"state {key}"
        first, stop = self.stretch.start - piece.blocks[0], self.stretch.stop - piece.blocks[0]
        place = self.stretch.bucket, self.stretch.start
        if target.dim() == 0:
            return _Range(self.file, at, view, [_column(piece.by_block[first], column)], [view.nbytes], label, place)
        checksums = [_column(block, column) for block in piece.by_block[first:stop]]
        places = None if key == PARAMETERS else piece.state[key].places
        bounds = range(first * block_elements, (stop + 1) * block_elements, block_elements)
        ends = [end * target.element_size() for end in ends_of(places, bounds)]
        at += count_of(places, 0, bounds[0]) * target.element_size()
        return _Range(self.file, at, view, checksums, ends, label, place)


class Reader:
    """One checkpoint, as a coordinate of a cell sees it: the blocks of its part of the model, which those who have it
    too have written besides, and the common ones, which all have.

    `folder` is its folder in the storage.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, coordinate: int = 0) -> None:
        self._storage, self._folder, self.manifest = storage, folder, manifest
        self.coordinate, self.blocks = coordinate, manifest.blocks.at(coordinate)
        self._pieces = sorted(
            (
                (piece.stretch, file, piece)
                for file in manifest.files
                for buckets in [self.blocks.at(file.coordinate).buckets]  # of the stage that has written it
                for shared in [[one for one in DIVISIONS if file.coordinate in self.blocks.part.holders(one)]]
                for piece in file.pieces
                if buckets[piece.bucket].division in shared
            ),
            key=lambda one: one[0],
        )
        self._places = [stretch for stretch, _, _ in self._pieces]
        self.bytes_read = 0
        self._at = {coordinate: self}

    def at(self, coordinate: int) -> Reader:
        """The same as another coordinate sees it."""
        if coordinate not in self._at:
            other = self._at[coordinate] = Reader(self._storage, self._folder, self.manifest, coordinate)
            other._at = self._at
        return self._at[coordinate]

    @property
    def where(self) -> str:
        return f"{self._storage.url}/{self._folder}"

    # ---- blocks

    def parameters(self, stretches: Sequence[Stretch], into: BlockValues) -> None:
        """Fills the parameters of blocks in. `into`: of the manifest's layout."""
        parts = list(self._parts(stretches))
        places = [into.of(part.stretch) for part in parts]
        found = [place if place.device.type == "cpu" else torch.empty_like(place, device="cpu") for place in places]
        size = self.blocks.block_elements
        self._read([part.range_of(PARAMETERS, values, size) for part, values in zip(parts, found, strict=True)])
        for place, values in zip(places, found, strict=True):
            if values is not place:
                place.copy_(values)

    def states(self, stretches: Sequence[Stretch], only: str = "") -> dict[Stretch, State]:
        """The optimizer states of blocks, in as few stretches as may be: for `HeldBlocks.take`. `only`: of this key."""
        states: dict[Stretch, State] = {}
        ranges: list[_Range] = []
        apart: list[tuple[State, dict[str, list[Tensor]], list[_Part]]] = []
        for run in _runs(self._parts(stretches)):
            whole = Stretch(run[0].stretch.bucket, run[0].stretch.start, run[-1].stretch.stop)
            states[whole] = self._blank(whole, run, only)
            few = {key: self._few(run, key, value) for key, value in states[whole].items() if _is_of_few(run, key)}
            apart.append((states[whole], few, run))
            ranges += self._ranges(states[whole], few, whole, run)
        self._read(ranges)
        for state, few, run in apart:
            for key, parts in few.items():
                state[key] = torch.cat([self._apart(part, key, one) for part, one in zip(run, parts, strict=True)])
        return states

    def of_slot(
        self, bucket: Bucket, slot: Slot, first: int, last: int, key: str = PARAMETERS
    ) -> Tensor:  # (last - first,), or ()
        """Elements of a parameter, flat; with a key those of its state, or the one number that its elements share."""
        size = self.blocks.block_elements
        start, stop = slot.start + first, slot.start + last
        stretch = Stretch(bucket.index, start // size, -(-stop // size))
        if key == PARAMETERS:
            window = Window(stretch, bucket)
            self.parameters([stretch], window)
            return window.values[start % size : start % size + last - first]
        found = self.states([stretch], only=key)
        parts = [found[one][key] for one in sorted(found)]
        if parts[0].dim() == 0:
            return parts[0]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values[start % size : start % size + last - first]

    def _few(
        self,
        run: list[_Part],
        key: str,
        like: Tensor,  # of any shape
    ) -> list[Tensor]:  # of each part (values that the file has,)
        """Empty tensors for state that is not one value for each element, or was not when it was written."""
        spans = [part.span(self.blocks.block_elements) for part in run]
        places = [part.piece.state[key].places for part in run]
        return [host_memory(count_of(one, *span), like.dtype) for one, span in zip(places, spans, strict=True)]

    def _apart(
        self,
        part: _Part,
        key: str,
        values: Tensor,  # (values that the file has,)
    ) -> Tensor:  # (elements of the part,)
        places = part.piece.state[key].places
        return values if places is None else places.apart(values, *part.span(self.blocks.block_elements))

    def _parts(self, stretches: Iterable[Stretch]) -> Iterator[_Part]:
        """What of which piece is wanted, in the order of the stretches."""
        for wanted in stretches:
            first = max(0, bisect_right(self._places, wanted) - 1)
            for stretch, file, piece in islice(self._pieces, first, None):
                if (stretch.bucket, stretch.start) >= (wanted.bucket, wanted.stop):
                    break
                start, stop = max(stretch.start, wanted.start), min(stretch.stop, wanted.stop)
                if stretch.bucket == wanted.bucket and start < stop:
                    yield _Part(Stretch(wanted.bucket, start, stop), f"{self._folder}/{file.name}", piece)

    def _blank(self, whole: Stretch, run: list[_Part], only: str) -> State:
        """Empty tensors for a run."""
        elements = whole.blocks * self.blocks.block_elements
        return {
            key: torch.empty((), dtype=dtype)
            if entry.scalar
            else host_memory(0 if _is_of_few(run, key) else elements, dtype)
            for key, entry in run[0].piece.state.items()
            if only in ("", key)
            for dtype in (DTYPES[entry.dtype],)
        }

    def _ranges(
        self,
        state: State,  # each (elements of the stretch,), or ()
        few: Mapping[str, list[Tensor]],  # by key, of each part (values that the file has,)
        whole: Stretch,
        run: list[_Part],
    ) -> Iterator[_Range]:
        """What fills them; a number that all blocks share is read once."""
        size = self.blocks.block_elements
        for key, target in state.items():
            if key in few:
                yield from (part.range_of(key, one, size) for part, one in zip(run, few[key], strict=True))
                continue
            for part in run if target.dim() else run[:1]:
                first, stop = ((at - whole.start) * size for at in (part.stretch.start, part.stretch.stop))
                yield part.range_of(key, target[first:stop] if target.dim() else target, size)

    def check_shared_numbers(self) -> None:
        """The numbers that all blocks of a piece share, of every piece: `states` reads one for many that are alike."""
        ranges = []
        for stretch, file, piece in self._pieces:
            part = _Part(stretch, f"{self._folder}/{file.name}", piece)
            for key, entry in piece.state.items():
                if entry.scalar:
                    number = torch.empty((), dtype=DTYPES[entry.dtype])
                    ranges.append(part.range_of(key, number, self.blocks.block_elements))
        self._read(ranges)

    # ---- tensors beside the blocks

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors beside the blocks, by name; all of them where none is named."""
        known = self.manifest.tensors
        found: dict[str, Tensor] = {}
        ranges = []
        for name in known if names is None else names:
            file, entry = known[name]
            found[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            ranges.append(_range_of_tensor(f"{self._folder}/{file.name}", name, entry, found[name]))
        self._read(ranges)
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers by their names in the model."""
        names = self.names_of_buffers()
        found = self.tensors(names.values())
        return {name: found[tensor] for name, tensor in names.items()}

    def names_of_buffers(self) -> dict[str, str]:
        """Those of this coordinate: under which name of a tensor each lies."""
        names = {name: buffer_tensor(name, self.coordinate) for name in self.manifest.buffers}
        return {name: tensor for name, tensor in names.items() if tensor in self.manifest.tensors}

    def frozen(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The parameters that no optimizer changes, by name; all of them where none is named."""
        entry = self.manifest.frozen
        if entry is None:
            return {}
        wanted = {name: one for name, one in entry.tensors.items() if names is None or name in names}
        found = {name: torch.empty(one.shape, dtype=DTYPES[one.dtype]) for name, one in wanted.items()}
        self._read([_range_of_tensor(entry.file, name, one, found[name]) for name, one in wanted.items()])
        return found

    def check_heads(self) -> None:
        """What stands in the files before the data: for other readers than Shoal."""
        heads = [(f"{self._folder}/{file.name}", file.head) for file in self.manifest.files]
        if self.manifest.frozen is not None:
            heads.append((self.manifest.frozen.file, self.manifest.frozen.head))
        self._read(
            [
                _Range(
                    file,
                    0,
                    memoryview(bytearray(head.bytes)),
                    [bytes.fromhex(head.checksum)],
                    [head.bytes],
                    "the header",
                    None,
                )
                for file, head in heads
            ]
        )

    # ---- reading

    def _read(self, ranges: list[_Range]) -> None:
        by_file: dict[str, list[_Range]] = {}
        for one in ranges:
            by_file.setdefault(one.file, []).extend(_split(one))
        jobs = [(file, batch) for file, some in by_file.items() for batch in _batches(some)]
        if len(jobs) == 1:
            self._fill(*jobs[0])
        elif jobs:
            with ThreadPoolExecutor(READERS, thread_name_prefix="shoal-read") as pool:
                for done in [pool.submit(self._fill, *job) for job in jobs]:
                    done.result()
        self.bytes_read += sum(one.target.nbytes for one in ranges)

    def _fill(self, file: str, batch: list[_Range]) -> None:
        targets: list[Target] = [(one.at, one.target) for one in batch if one.target.nbytes]
        try:
            self._storage.read_ranges(file, targets)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.where} is damaged: {file} is not there.") from None
        except EOFError:
            raise CheckpointDamaged(f"{self.where} is damaged: {file} is cut short.") from None
        for one in batch:
            starts = [0, *one.ends]
            for index, expected in enumerate(one.checksums):
                if checksum(one.target[starts[index] : one.ends[index]]) != expected:
                    block = "" if one.place is None else f" of block {self._number(one.place, index)}"
                    raise CheckpointDamaged(
                        f"{self.where} is damaged: the checksum of {one.label}{block} in {file} differs."
                    )

    def _number(self, place: tuple[int, int], index: int) -> int:
        bucket, position = place
        return self.blocks.numbers[bucket][position + index]


class Window:
    """`BlockValues` of some blocks of a bucket, which are read into memory of their own, `values`: (elements,)."""

    def __init__(self, stretch: Stretch, bucket: Bucket, memory: ReusedMemory | None = None) -> None:
        self._stretch, self._size = stretch, bucket.block_elements
        self.values = (memory or ReusedMemory()).take((stretch.blocks * self._size,), bucket.dtype)

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        return self.range(stretch.bucket, stretch.start * self._size, stretch.stop * self._size)

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        assert bucket == self._stretch.bucket
        first = self._stretch.start * self._size
        return self.values[start - first : stop - first]


def _runs(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Neighbours within a bucket whose states are alike, their common numbers equal."""
    run: list[_Part] = []
    for part in parts:
        if run and not (
            (run[-1].stretch.bucket, run[-1].stretch.stop) == (part.stretch.bucket, part.stretch.start)
            and (run[-1].piece is part.piece or are_alike(run[-1].piece, part.piece))
        ):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def are_alike(left: PieceEntry, right: PieceEntry) -> bool:
    """Whether two pieces may become one run: same states, and the numbers that all blocks share are equal."""
    keys = sorted(left.state)
    if keys != sorted(right.state):
        return False
    for column, key in enumerate(keys, start=1):
        a, b = left.state[key], right.state[key]
        if (a.dtype, a.scalar) != (b.dtype, b.scalar):
            return False
        if a.scalar and _column(left.by_block[0], column) != _column(right.by_block[0], column):
            return False
    return True


def _column(block: bytes, column: int) -> bytes:
    return block[column * CHECKSUM_BYTES : (column + 1) * CHECKSUM_BYTES]


def _range_of_tensor(file: str, name: str, entry: TensorEntry, target: Tensor) -> _Range:
    view = tensor_bytes(target)
    return _Range(file, entry.at, view, [bytes.fromhex(entry.checksum)], [view.nbytes], f'tensor "{name}"', None)


def _is_of_few(run: list[_Part], key: str) -> bool:
    """Whether the file has values of some elements alone, of one part at least."""
    return any(part.piece.state[key].places is not None for part in run)


def _split(one: _Range) -> Iterator[_Range]:
    """A long range as several, cut between blocks, for several threads."""
    size = max(1, one.target.nbytes // len(one.checksums))
    step = max(1, BATCH_BYTES // size)
    for first in range(0, len(one.checksums), step):
        checksums, ends = one.checksums[first : first + step], one.ends[first : first + step]
        start = one.ends[first - 1] if first else 0
        place = None if one.place is None else (one.place[0], one.place[1] + first)
        yield replace(
            one, at=one.at + start, target=one.target[start : ends[-1]], checksums=checksums,
            ends=[end - start for end in ends], place=place,
        )  # fmt: skip


def _batches(ranges: list[_Range]) -> Iterator[list[_Range]]:
    """Batches of ranges in the order of the file, so that neighbours are read together."""
    batch: list[_Range] = []
    size = 0
    for one in sorted(ranges, key=lambda one: one.at):
        batch.append(one)
        size += one.target.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
