"""Reads any set of blocks of a checkpoint, and only the byte ranges that they need.

Address is the block: who wrote it does not matter. Parameters go straight into the flats, states into one tensor per
run, so that what was many pieces becomes few segments again. Every block's checksums are verified; the first that
differs is named and nothing of the checkpoint may be used then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from shoal_protos.runs import Runs, Span
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.blocks.held import State
from shoal.blocks.host_memory import host_memory, tensor_bytes
from shoal.checkpoint.container import DTYPES
from shoal.checkpoint.errors import CheckpointDamaged
from shoal.checkpoint.manifest import DIGEST_BYTES, Manifest, PieceEntry, TensorEntry
from shoal.checkpoint.snapshot import PARAMETERS
from shoal.checkpoint.storage import Storage, Target
from shoal.core.layout import Bucket

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
    digests: Sequence[bytes]
    """One for each equal part of the target."""
    label: str
    first_block: int | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of one piece that are wanted."""

    blocks: Span
    bucket: Bucket
    file: str
    piece: PieceEntry

    def range_of(self, key: str, target: Tensor) -> _Range:
        """The range that fills `target` with these blocks' part of one tensor; a number that all share whole."""
        piece, view = self.piece, tensor_bytes(target)
        column = 0 if key == PARAMETERS else 1 + sorted(piece.state).index(key)
        at = piece.at if key == PARAMETERS else piece.state[key].at
        label = "the parameters" if key == PARAMETERS else f"state {key}"
        first, stop = self.blocks[0] - piece.blocks[0], self.blocks[1] - piece.blocks[0]
        if target.dim() == 0:
            return _Range(self.file, at, view, [_column(piece.digests[first], column)], label, self.blocks[0])
        digests = [_column(digest, column) for digest in piece.digests[first:stop]]
        at += first * (view.nbytes // (stop - first))
        return _Range(self.file, at, view, digests, label, self.blocks[0])


class Reader:
    """One checkpoint. `folder` is its folder in the storage."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._storage, self._folder, self.manifest = storage, folder, manifest
        self._pieces = sorted(
            (
                (piece.blocks, manifest.blocks.bucket_of(piece.blocks[0]), file, piece)
                for file in manifest.files
                for piece in file.pieces
            ),
            key=lambda one: one[0],
        )
        self.bytes_read = 0

    @property
    def where(self) -> str:
        return f"{self._storage.url}/{self._folder}"

    # ---- blocks

    def parameters(self, blocks: Runs, into: Flats) -> None:
        """Fills the parameters of blocks into flats of the manifest's layout."""
        size = self.manifest.blocks.block_elements
        ranges = []
        for part in self._parts(blocks):
            first, stop = ((block - part.bucket.first_block) * size for block in part.blocks)
            ranges.append(part.range_of(PARAMETERS, into[part.bucket.index][first:stop]))
        self._read(ranges)

    def states(self, blocks: Runs) -> dict[Span, State]:
        """The optimizer states of blocks, by runs within one bucket: for `HeldBlocks.take`."""
        states: dict[Span, State] = {}
        ranges: list[_Range] = []
        for run in _runs(self._parts(blocks)):
            span = (run[0].blocks[0], run[-1].blocks[1])
            states[span] = self._blank(span, run)
            ranges += self._ranges(states[span], span, run)
        self._read(ranges)
        return states

    def _parts(self, blocks: Runs) -> Iterator[_Part]:
        """What of which piece is wanted, in the order of blocks. Both are sorted, so one walk is enough."""
        spans = list(blocks.spans)
        for (start, stop), bucket, file, piece in self._pieces:
            while spans and spans[0][1] <= start:
                spans.pop(0)
            for first, last in spans:
                if first >= stop:
                    break
                yield _Part((max(first, start), min(last, stop)), bucket, f"{self._folder}/{file.name}", piece)

    def _blank(self, span: Span, run: list[_Part]) -> State:
        """Empty tensors for a run."""
        elements = (span[1] - span[0]) * self.manifest.blocks.block_elements
        return {
            key: torch.empty((), dtype=dtype) if entry.scalar else host_memory(elements, dtype)
            for key, entry in run[0].piece.state.items()
            for dtype in (DTYPES[entry.dtype],)
        }

    def _ranges(self, state: State, span: Span, run: list[_Part]) -> Iterator[_Range]:
        """What fills them; a number that all blocks share is read once."""
        size = self.manifest.blocks.block_elements
        for key, target in state.items():
            for part in run if target.dim() else run[:1]:
                first, stop = ((block - span[0]) * size for block in part.blocks)
                yield part.range_of(key, target[first:stop] if target.dim() else target)

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
        found = self.tensors(f"buffer/{name}" for name in self.manifest.buffers)
        return {name.removeprefix("buffer/"): value for name, value in found.items()}

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that no optimizer changes, by name."""
        entry = self.manifest.frozen
        if entry is None:
            return {}
        found = {name: torch.empty(one.shape, dtype=DTYPES[one.dtype]) for name, one in entry.tensors.items()}
        self._read([_range_of_tensor(entry.file, name, one, found[name]) for name, one in entry.tensors.items()])
        return found

    def check_heads(self) -> None:
        """What stands in the files before the data: for other readers than Shoal."""
        heads = [(f"{self._folder}/{file.name}", file.head) for file in self.manifest.files]
        if self.manifest.frozen is not None:
            heads.append((self.manifest.frozen.file, self.manifest.frozen.head))
        self._read(
            [
                _Range(file, 0, memoryview(bytearray(head.bytes)), [bytes.fromhex(head.sha256)], "the header", None)
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
            size = one.target.nbytes // len(one.digests)
            for index, digest in enumerate(one.digests):
                if hashlib.sha256(one.target[index * size : (index + 1) * size]).digest() != digest:
                    block = "" if one.first_block is None else f" of block {one.first_block + index}"
                    raise CheckpointDamaged(
                        f"{self.where} is damaged: the checksum of {one.label}{block} in {file} differs."
                    )


def _runs(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Neighbours within a bucket whose states are alike, their common numbers equal."""
    run: list[_Part] = []
    for part in parts:
        if run and not (
            run[-1].blocks[1] == part.blocks[0]
            and run[-1].bucket is part.bucket
            and (run[-1].piece is part.piece or _alike(run[-1].piece, part.piece))
        ):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _alike(left: PieceEntry, right: PieceEntry) -> bool:
    """Whether two pieces may become one run: same states, and the numbers that all blocks share are equal."""
    keys = sorted(left.state)
    if keys != sorted(right.state):
        return False
    for column, key in enumerate(keys, start=1):
        a, b = left.state[key], right.state[key]
        if (a.dtype, a.scalar) != (b.dtype, b.scalar):
            return False
        if a.scalar and _column(left.digests[0], column) != _column(right.digests[0], column):
            return False
    return True


def _column(digests: bytes, column: int) -> bytes:
    return digests[column * DIGEST_BYTES : (column + 1) * DIGEST_BYTES]


def _range_of_tensor(file: str, name: str, entry: TensorEntry, target: Tensor) -> _Range:
    return _Range(file, entry.at, tensor_bytes(target), [bytes.fromhex(entry.sha256)], f'tensor "{name}"', None)


def _split(one: _Range) -> Iterator[_Range]:
    """A long range as several, cut between blocks, for several threads."""
    size = max(1, one.target.nbytes // len(one.digests))
    step = max(1, BATCH_BYTES // size)
    for first in range(0, len(one.digests), step):
        digests = one.digests[first : first + step]
        target = one.target[first * size : (first + len(digests)) * size]
        block = None if one.first_block is None else one.first_block + first
        yield replace(one, at=one.at + first * size, target=target, digests=digests, first_block=block)


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
