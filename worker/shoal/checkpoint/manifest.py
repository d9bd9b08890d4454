"""The manifest: what makes a checkpoint exist, and all that is known of it without opening a data file.

JSON, written last. `parse` turns its text into a `Manifest` or into one sentence. A manifest that passes is sound in
itself: every block is in one file exactly once, every range lies within its file, every checksum is there. Whether the
files hold what it says is the reader's affair.

`checksum` guards what lies in the files: XXH3-128, which is read at the speed of memory. It detects damage by a disk, a
copy or an interrupted write, and proves nothing about who wrote the file. The fingerprint has SHA-256 of its own
(`shoal.checkpoint.fingerprint`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from shoal_protos.release import RELEASE
from shoal_protos.runs import Runs, every
from shoal_protos.text import of_shoal
from shoal_protos.validation import every_sentence
from xxhash import xxh3_128_digest

from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.container import DTYPES, count_of
from shoal.core.layout import MOST_BLOCKS, Layout, Stretch
from shoal.core.layout import VERSION as LAYOUT_VERSION
from shoal.core.manifest_parts import (
    MOST_BRANCHES,
    Branch,
    Code,
    Count,
    Entry,
    LayoutEntry,
    Name,
    RunName,
    Shape,
    only_of_cells,
)
from shoal.core.misses import Misses
from shoal.core.plain import Json
from shoal.core.value_places import Places, Spans, Strides

CHECKSUM_BYTES = 16


def checksum(content: bytes | memoryview) -> bytes:  # (CHECKSUM_BYTES,)
    """Of bytes that lie in one piece."""
    return xxh3_128_digest(content)


FORMAT = "shoal checkpoint"
VERSION = 3
"""Of the manifest that this code writes; raised as CONTRIBUTING.md, "Numbers of formats", says."""
OLDEST_VERSION = 2
"""Of those that it reads: every one from here to `VERSION`. What has come since has a default."""
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 256 << 20
"""Bytes: 65,536 blocks with a dozen state tensors each take a fifth of it."""
PIECE_KEY = re.compile(rb'"checksums"\s*:')
"""In each piece once, and in no text: there a quotation mark has a backslash before it."""
NO_SEAL = "0" * 64

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Checksum = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * CHECKSUM_BYTES}}}$")]


def only_where_so() -> Any:
    """A field that stands in the manifest only where it is something."""
    return Field(None, exclude_if=lambda value: value is None)


class StateEntry(Entry):
    """One optimizer state tensor of a piece."""

    dtype: Code
    at: Count
    """Its first byte in the file."""
    scalar: bool
    """One number that all blocks of the piece share."""
    spans: tuple[tuple[Count, Count], ...] | None = only_where_so()
    """Elements of the piece that the file has, ascending; all others are zero. None: it has all."""
    strides: tuple[Count, Count] | None = only_where_so()
    """The same where it has the first so many (the second) of each so many (the first)."""

    @property
    def places(self) -> Places | None:
        """Which elements of the piece the file has; None: all."""
        if self.strides is not None:
            return Strides(*self.strides)
        return Spans(self.spans) if self.spans is not None else None


class PieceEntry(Entry):
    """A stretch of blocks: its parameters and each state tensor lie in one range of the file."""

    bucket: Count
    blocks: tuple[Count, Count]
    """Their positions in the bucket: from the first to before the second."""
    at: Count
    """The parameters' first byte in the file."""
    state: dict[Name, StateEntry]
    checksums: str
    """Base64. Per block the checksum of the parameters and of each state tensor, keys sorted."""

    @property
    def stretch(self) -> Stretch:
        return Stretch(self.bucket, *self.blocks)

    @cached_property
    def by_block(self) -> list[bytes]:
        """The checksums of each block."""
        table = base64.b64decode(self.checksums, validate=True)
        width = CHECKSUM_BYTES * (1 + len(self.state))
        return [table[at : at + width] for at in range(0, len(table), width)]


class TensorEntry(Entry):
    """A tensor beside the blocks: a buffer, or one of a user's state."""

    dtype: Code
    shape: Shape
    at: Count
    checksum: Checksum

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class HeadEntry(Entry):
    """What stands in a data file before the data; Shoal needs none of it, other readers do."""

    bytes: Count
    checksum: Checksum


class FileEntry(Entry):
    """A data file, written by one worker. The same text lies beside the file until the manifest is there."""

    name: FileName
    bytes: Count
    head: HeadEntry
    worker: Name
    incarnation: Name
    coordinate: int = only_of_cells(0)
    """Its writer's in a cell: whose the pieces of own buckets are."""
    pieces: tuple[PieceEntry, ...]
    tensors: dict[Name, TensorEntry]


class FrozenEntry(Entry):
    """The parameters that no optimizer changes, in a file of their own that all checkpoints of a path share."""

    file: FileName
    bytes: Count
    head: HeadEntry
    digest: Digest
    """SHA-256 over names, dtypes, shapes and bytes."""
    tensors: dict[Name, TensorEntry]


class DataPosition(Entry):
    """Position in the data. With the step it says which samples come next: the order is a function of these numbers."""

    seed: Annotated[int, Field(ge=0, lt=1 << 64)]
    lanes: Count
    micro_batch_size: Count
    micro_batches_per_lane: Count
    samples: Count
    """Length of the dataset."""


class GivenEntry(Entry):
    """What the run was given, before training moved anything."""

    groups: list[dict[str, Json]]
    schedule: dict[str, Json]


class Manifest(Entry):
    format: Literal["shoal checkpoint"] = "shoal checkpoint"
    version: Annotated[int, Field(ge=OLDEST_VERSION, le=VERSION)] = VERSION
    release: Annotated[str, Field(max_length=128)] = ""
    """The release of Shoal that wrote it; empty: one from before they were named."""
    kind: Literal["training", "model"]
    """`model`: parameters only, imported from elsewhere; training begins with them at step 0."""
    job: Name
    run: RunName = ""
    """The uid of the job's run that saved it; empty: not known."""
    lineage: Annotated[tuple[Branch, ...], Field(max_length=MOST_BRANCHES)] = ()
    """What that run had gone on from, newest first."""
    step: Count
    generation: Count
    last_step: Count
    layout: LayoutEntry
    optimizer: Name
    """Class name; of several optimizers `SGD + Adam`."""
    classes: tuple[Name, ...] = ()
    """Class of the optimizer that has it, by group; empty: there is one."""
    forms: tuple[str, ...] = ()
    """By group, what of its state the optimizer alone can read; empty: not known."""
    groups: list[dict[str, Json]]
    """Hyper-parameters by optimizer group."""
    given: GivenEntry | None = None
    """None: not known."""
    evaluating: tuple[Name, ...] | None = None
    """Parts of the module in evaluation mode; None: not known, or in tensors (`modes_tensor`), as each stage of a
    pipeline has its own."""
    data: DataPosition | None
    scheduler: Json
    scheduler_class: Name = ""
    """Class name; empty: there is none, or it is not known."""
    scaler: Json
    states: dict[Name, Json]
    """The user's own, by the name under which they are registered."""
    streams: tuple[str, ...] = ()
    """Where lanes stand in their streams (core/stream_position.py); one that is not here is read from its beginning."""
    missed: tuple[tuple[Count, Count, bool], ...] = ()
    """How many updates parameters have missed, as runs in the layout's order (core/misses.py); empty: none has any."""
    record: str
    """The vote's record of the step, JSON; empty for step 0."""
    buffers: tuple[Name, ...]
    """The persistent ones; `buffer_tensor` says how their tensors are named."""
    frozen: FrozenEntry | None
    config: dict[Name, str]
    numerics: dict[Name, str]
    files: tuple[FileEntry, ...]
    verified: bool = False
    """Whether every block had two copies at least when it was saved, and all of them agreed."""
    checksum: Digest = NO_SEAL
    """SHA-256 of all that stands in the file before this last key."""

    @cached_property
    def blocks(self) -> Layout:
        """The layout as it is used, at coordinate 0 of a cell."""
        return self.layout.layout()

    @cached_property
    def tensors(self) -> dict[str, tuple[FileEntry, TensorEntry]]:
        """Every tensor beside the blocks with its file."""
        return {name: (file, entry) for file in self.files for name, entry in file.tensors.items()}

    @property
    def data_bytes(self) -> int:
        """Bytes of all files of this checkpoint alone."""
        return sum(file.bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """The file's content, with its checksum."""
        return sealed(self.model_dump_json().encode())


def buffer_tensor(name: str, coordinate: int = 0) -> str:
    """Under which name the tensor of a buffer lies in a file: each coordinate of a cell has buffers of its own."""
    return f"buffer/{name}" if coordinate == 0 else f"buffer at coordinate {coordinate}/{name}"


MODES = "modes at coordinate "


def modes_tensor(coordinate: int) -> str:
    """Under which name the modes of a pipeline's stages lie in a file: uint8, JSON of the parts in evaluation mode."""
    return f"{MODES}{coordinate}"


def sealed(content: bytes) -> bytes:
    """A manifest's JSON with the right checksum in the place of whichever stands there."""
    return content[:-_SEAL_BYTES] + _seal(content[:-_SEAL_BYTES])


def _seal(text: bytes) -> bytes:
    return f',"checksum":"{hashlib.sha256(text).hexdigest()}"}}'.encode()


_SEAL_BYTES = len(_seal(b""))


def parse(content: bytes, where: str) -> Manifest:
    """Raises `CheckpointDamaged` with one sentence. `where`: how a person finds it."""
    _check_pieces(content, where)
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointDamaged(_refusal(content, error, where)) from None
    if content[-_SEAL_BYTES:] != _seal(content[:-_SEAL_BYTES]):
        raise CheckpointDamaged(f"{where} is damaged: its checksum differs, so it was changed after it was written.")
    for broken in _broken(manifest):
        raise CheckpointDamaged(f"{where} is damaged: {broken}.")
    return manifest


def parse_part(content: bytes, where: str) -> FileEntry:
    """Parse what a writer says of its file."""
    _check_pieces(content, where)
    try:
        return FileEntry.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointDamaged(f"{where} is damaged: {every_sentence(error.errors(), 'it')}.") from None


def _check_pieces(content: bytes, where: str) -> None:
    """Before each of them is looked at, which takes long."""
    pieces = sum(1 for _ in PIECE_KEY.finditer(content))
    if pieces > MOST_BLOCKS:
        raise CheckpointDamaged(
            f"{where} is damaged: it has {pieces} pieces; no model has more than {MOST_BLOCKS} blocks."
        )


def _refusal(content: bytes, error: ValidationError, where: str) -> str:
    try:
        head = json.loads(content)
    except (ValueError, RecursionError):
        return f"{where} is damaged: it is not JSON."
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        return f'{where} is not the manifest of a checkpoint: its format is not "{FORMAT}".'
    version, layout, release = head.get("version"), head.get("layout"), str(head.get("release", ""))[:60]
    blocks = layout.get("version", 1) if isinstance(layout, dict) else LAYOUT_VERSION
    readable = range(OLDEST_VERSION, VERSION + 1), range(LAYOUT_VERSION, LAYOUT_VERSION + 1)
    for kind, found, read in zip(("format", "layout"), (version, blocks), readable, strict=True):
        if type(found) is int and found not in read:
            both = f"{read[0]} to {read[-1]}" if len(read) > 1 else read[0]
            return (
                f"{where} has {kind} version {found}, written by {of_shoal(release)}; this is {of_shoal(RELEASE)}, "
                f"which reads {both}. Use the release that wrote it, or export its model there and import it here."
            )
    return f"{where} is damaged: {every_sentence(error.errors(), 'it')}."


def _broken(manifest: Manifest) -> Iterator[str]:
    """Called on what has the right types only."""
    yield from manifest.layout.broken()
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        yield "a file is in it twice"
    for file in manifest.files:
        yield from broken_file(file, manifest.blocks)
    yield from broken_cover(manifest.files, manifest.blocks)
    try:
        Misses.from_runs(manifest.blocks, manifest.missed)
    except ValueError as error:
        yield str(error)
    if manifest.frozen is not None:
        yield from _broken_ranges(manifest.frozen, manifest.frozen.file)
    coordinates = range(manifest.layout.coordinates)
    missing = ((name, coordinate) for name in manifest.buffers for coordinate in _lacking(manifest, name))
    for name, coordinate in islice(missing, 1):
        whose = f" of coordinate {coordinate}" if len(coordinates) > 1 else ""
        yield f'buffer "{name}"{whose} is in none of its files'
    groups = {bucket.group for bucket in manifest.blocks.buckets}
    if manifest.kind == "training" and groups and max(groups) >= len(manifest.groups):
        yield f"it has {len(manifest.groups)} optimizer groups, its layout {max(groups) + 1}"
    if manifest.classes and len(manifest.classes) != len(manifest.groups):
        yield f"it has {len(manifest.groups)} optimizer groups, and classes of {len(manifest.classes)}"


def _lacking(manifest: Manifest, name: str) -> list[int]:
    """The coordinates that should have a buffer: all, or all of a stage that has one."""
    of_stage = manifest.layout.coordinates // manifest.layout.stages
    stages = [range(first, first + of_stage) for first in range(0, manifest.layout.coordinates, of_stage)]
    lacking = [[one for one in stage if buffer_tensor(name, one) not in manifest.tensors] for stage in stages]
    there = [some for some in lacking if len(some) < of_stage]
    return list(chain.from_iterable(there)) if there else lacking[0]


def broken_file(file: FileEntry, layout: Layout) -> Iterator[str]:
    """What a file's entry says that cannot be. `layout`: at any coordinate."""
    if file.coordinate >= layout.part.coordinates:
        yield f"{file.name} is of coordinate {file.coordinate}, and its cells have {layout.part.coordinates}"
    else:
        at_its_coordinate = layout.at(file.coordinate)
        for piece in file.pieces:
            yield from _broken_piece(file, piece, at_its_coordinate)
    yield from _broken_ranges(file, file.name)


def _broken_ranges(file: FileEntry | FrozenEntry, name: str) -> Iterator[str]:
    if file.head.bytes > file.bytes:
        yield f"the header lies beyond the {file.bytes} bytes of {name}"
    for tensor, entry in file.tensors.items():
        if entry.at + entry.bytes > file.bytes:
            yield f'tensor "{tensor}" lies beyond the {file.bytes} bytes of {name}'


def _broken_piece(file: FileEntry, piece: PieceEntry, layout: Layout) -> Iterator[str]:
    start, stop = piece.blocks
    name = f"the piece of blocks {start} to {stop - 1} of bucket {piece.bucket}"
    if piece.bucket >= len(layout.buckets) or not start < stop <= layout.buckets[piece.bucket].blocks:
        yield f"{name} lies in no bucket"
        return
    bucket = layout.buckets[piece.bucket]
    for key, state in piece.state.items():
        if not _is_sound(state, (stop - start) * layout.block_elements, layout.block_elements):
            yield f'{name} has state "{key}" of elements that cannot be'
            return
    for at, size in piece_ranges(piece, bucket.dtype.itemsize, layout.block_elements):
        if at + size > file.bytes:
            yield f"{name} lies beyond the {file.bytes} bytes of {file.name}"
            return
    try:
        complete = len(piece.by_block) == stop - start and len(set(map(len, piece.by_block))) == 1
    except (binascii.Error, ValueError):
        complete = False
    if not complete:
        yield f"{name} has not one checksum per tensor and block"


def _is_sound(state: StateEntry, elements: int, block_elements: int) -> bool:
    """Whether what it says of its elements can be."""
    if state.strides is not None:
        each, used = state.strides
        return state.spans is None and not state.scalar and 0 < used <= each and block_elements % each == 0
    if state.spans is None:
        return True
    bounds = [0, *chain.from_iterable(state.spans), elements]
    return not state.scalar and all(first <= second for first, second in pairwise(bounds))


def piece_ranges(piece: PieceEntry, itemsize: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of every tensor of a piece."""
    elements = (piece.blocks[1] - piece.blocks[0]) * block_elements
    yield piece.at, elements * itemsize
    for state in piece.state.values():
        count = 1 if state.scalar else count_of(state.places, 0, elements)
        yield state.at, count * DTYPES[state.dtype].itemsize


def broken_cover(files: tuple[FileEntry, ...], layout: Layout) -> Iterator[str]:
    """Every block is there exactly once, or which is not. `layout`: at any coordinate."""
    layouts = {one: layout.at(one) for one in {file.coordinate for file in files}}
    copies = Counter(
        number
        for file in files
        for piece in file.pieces
        for number in layouts[file.coordinate].numbers_of(piece.stretch)
    )
    for start, stop in Runs.of(number for number, count in copies.items() if count > 1).spans:
        yield f"{_named(start, stop)} in it twice"
    for start, stop in (every(layout.blocks) - Runs.of(copies)).spans:
        yield f"{_named(start, stop)} in none of its files"


def _named(start: int, stop: int) -> str:
    return f"block {start} is" if stop == start + 1 else f"blocks {start} to {stop - 1} are"


def safe_name(text: str) -> str:
    """A worker's id as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]", "_", text)[:64] or "_"
