"""The writing half of a save: one worker's data file with its entry, and the manifest that makes the checkpoint exist.

A file is streamed from its content (a copy, or the state itself): each chunk is checked and written while it is in the
cache. Its entry for the manifest lies beside it as JSON until the manifest is there. Files carry step, worker and
incarnation, and are never overwritten.

`draft_of` is the manifest without its files, with the tensors that stand beside blocks. The worker that will write the
manifest makes it at the step boundary, and it is the same on every worker: all that the future depends on and that is
in no block (step, data position, hyper-parameters, scheduler, buffers, the user's own states).

`commit` joins all writers' entries once every writer has said that it is done. It believes nothing: every block must be
in one file exactly once, and every file must lie there in its full size.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from shoal_protos.plan import Member
from shoal_protos.release import RELEASE
from torch import Tensor

from shoal.checkpoint.manifest import (
    MANIFEST,
    DataPosition,
    FileEntry,
    GivenEntry,
    HeadEntry,
    Manifest,
    PieceEntry,
    StateEntry,
    TensorEntry,
    broken_cover,
    broken_file,
    buffer_tensor,
    checksum,
    modes_tensor,
    parse_part,
    safe_name,
)
from shoal.checkpoint.retrying_storage import Chunks
from shoal.checkpoint.snapshot import PARAMETERS, DataContent, Piece
from shoal.checkpoint.storage import Storage
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.container import CODES, Region, ends_of, header
from shoal.core.manifest_parts import LayoutEntry
from shoal.core.plain import Json, encode
from shoal.core.value_places import Places, Spans, Strides
from shoal.exchange.module_buffers import persistent_buffers
from shoal.optim.hyper import hyper_parameters
from shoal.optim.schedules import class_of
from shoal.optim.several import classes_of, title_of
from shoal.state.training_state import TrainingState

CHUNK_BYTES = 1 << 20
"""Small enough to be in the cache still when it is written after its checksums were made."""


@dataclass(frozen=True, slots=True)
class Author:
    """Whose file it is."""

    worker: str
    incarnation: str
    coordinate: int = 0

    @classmethod
    def of(cls, member: Member) -> Author:
        return cls(member.worker, member.incarnation, member.coordinate)

    def file(self, step: int, of: str = "") -> str:
        """The data file's name. `of`: what it has, beside that of the author's blocks."""
        return f"{step:012d}-{safe_name(self.worker)}-{safe_name(self.incarnation)}{of}.safetensors"


def part_of(file: str) -> str:
    """The name of what a writer says of its file."""
    return f"{file}.json"


def write_content(
    storage: Storage, folder: str, step: int, author: Author, content: DataContent, of: str = ""
) -> FileEntry:
    """Writes the file, then its entry. `of`: see `Author.file`. Raises `StorageFailed`."""
    head = header(content.regions, {"format": "pt", "shoal": f"step {step}, a part; see manifest.json"})
    checksums: dict[str, list[bytes]] = {}
    name = author.file(step, of)
    size = storage.write(f"{folder}/{name}", Chunks(partial(_stream, head, content, checksums)))
    entry = FileEntry(
        name=name,
        bytes=size,
        head=head_entry(head),
        worker=author.worker,
        incarnation=author.incarnation,
        coordinate=author.coordinate,
        pieces=tuple(_piece_entry(piece, len(head), checksums) for piece in content.pieces),
        tensors={name: _tensor_entry(region, len(head), checksums) for name, region in content.tensors.items()},
    )
    storage.publish(f"{folder}/{part_of(name)}", entry.model_dump_json().encode())
    return entry


def head_entry(head: bytes) -> HeadEntry:
    return HeadEntry(bytes=len(head), checksum=checksum(head).hex())


def _stream(head: bytes, content: DataContent, checksums: dict[str, list[bytes]]) -> Iterator[memoryview]:
    """The file's bytes; leaves the checksums of every region's blocks behind."""
    yield memoryview(head)
    ends = {
        region.name: _block_ends(piece, key, content.block_elements)
        for piece in content.pieces
        for key, region in piece.regions.items()
        if region.shape
    }
    for region, view in content.contents():
        if region.name not in ends:
            checksums[region.name] = [checksum(view)]
            yield view
            continue
        checksums[region.name] = found = list[bytes]()
        at = left = 0
        for end in ends[region.name]:
            found.append(checksum(view[at:end]))
            at = end
            if at - left >= CHUNK_BYTES:
                yield view[left:at]
                left = at
        if left < at:
            yield view[left:at]


def _block_ends(piece: Piece, key: str, block_elements: int) -> list[int]:
    """Where in the piece's tensor each block's bytes end."""
    bounds = range(0, (piece.stretch.blocks + 1) * block_elements, block_elements)
    return [end * piece.regions[key].dtype.itemsize for end in ends_of(piece.places.get(key), bounds)]


def _piece_entry(piece: Piece, shift: int, checksums: dict[str, list[bytes]]) -> PieceEntry:
    count = piece.stretch.blocks
    columns = []
    for key in sorted(piece.regions):
        found = checksums[piece.regions[key].name]
        columns.append(found if piece.regions[key].shape else found * count)
    return PieceEntry(
        bucket=piece.stretch.bucket,
        blocks=(piece.stretch.start, piece.stretch.stop),
        at=piece.regions[PARAMETERS].at + shift,
        state={
            key: _state_entry(region, shift, piece.places.get(key))
            for key, region in piece.regions.items()
            if key != PARAMETERS
        },
        checksums=base64.b64encode(b"".join(map(b"".join, zip(*columns, strict=True)))).decode(),
    )


def _state_entry(region: Region, shift: int, places: Places | None) -> StateEntry:
    return StateEntry(
        dtype=CODES[region.dtype],  # type: ignore[arg-type]
        at=region.at + shift,
        scalar=not region.shape,
        spans=places.spans if isinstance(places, Spans) else None,
        strides=(places.each, places.used) if isinstance(places, Strides) else None,
    )


def _tensor_entry(region: Region, shift: int, checksums: dict[str, list[bytes]]) -> TensorEntry:
    return TensorEntry(
        dtype=CODES[region.dtype],  # type: ignore[arg-type]
        shape=region.shape,
        at=region.at + shift,
        checksum=checksums[region.name][0].hex(),
    )


LARGEST_PART = 64 << 20


def commit(storage: Storage, folder: str, draft: Manifest, files: Sequence[str]) -> Manifest:
    """Writes the manifest. `draft`: all of it but files; `files`: the names that the writers use.

    Raises `CheckpointDamaged` where the files do not make a checkpoint, `StorageFailed` where the place fails.
    """
    where = f"{storage.url}/{folder}"
    entries = tuple(_entry(storage, folder, name) for name in files)
    sizes = storage.list(folder)
    for entry in entries:
        if sizes.get(entry.name) != entry.bytes:
            raise CheckpointDamaged(
                f"{where} cannot be completed: {entry.name} has {sizes.get(entry.name, 0)} bytes, "
                f"its writer wrote {entry.bytes}."
            )
    of_files = (broken for entry in entries for broken in broken_file(entry, draft.blocks))
    for broken in chain(of_files, broken_cover(entries, draft.blocks)):
        raise CheckpointDamaged(f"{where} cannot be completed: {broken}.")
    manifest = draft.model_copy(update={"files": entries})
    storage.publish(f"{folder}/{MANIFEST}", manifest.to_bytes())
    for name in files:
        storage.remove(f"{folder}/{part_of(name)}")
    return manifest


def _entry(storage: Storage, folder: str, file: str) -> FileEntry:
    where = f"{storage.url}/{folder}/{part_of(file)}"
    try:
        content = storage.read(f"{folder}/{part_of(file)}", LARGEST_PART)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{where} does not exist: its writer did not finish.") from None
    entry = parse_part(content, where)
    if entry.name != file:
        raise CheckpointDamaged(f"{where} speaks of {entry.name}.")
    return entry


States = Mapping[str, Any]
"""Registered states by name: objects with `state_dict` and `load_state_dict`."""


@dataclass(frozen=True, slots=True)
class TakenStates:
    """The states that the script has registered, as they were at one moment."""

    tree: dict[str, Json]
    """By name, as the manifest has them."""
    tensors: dict[str, Tensor]
    """Theirs, in host memory."""

    @classmethod
    def of(cls, registered: States) -> TakenStates:
        """Those of now. Raises `UserError` naming one that cannot be kept, and what a `state_dict` raises, with a note
        that names it.
        """
        tensors: dict[str, Tensor] = {}
        return cls({name: _encoded(name, one, tensors) for name, one in registered.items()}, tensors)


def _encoded(name: str, of: Any, tensors: dict[str, Tensor]) -> Json:
    named = f'the state registered as "{name}"'
    try:
        state = of.state_dict()
    except Exception as error:
        error.add_note(f"state_dict of {named}")
        raise
    return encode(state, tensors, named)


@dataclass(frozen=True, slots=True)
class NoStates:
    """Why a checkpoint has none of them."""

    why: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What does not change in a job's life."""

    job: str
    run: str
    layout: LayoutEntry
    data: DataPosition
    config: Mapping[str, str]
    numerics: Mapping[str, str]


def tensors_of_coordinate(state: TrainingState) -> dict[str, Tensor]:
    """Buffers, and the modes of a pipeline's stages, as they stand in a file, copied: each coordinate of a cell has its
    own.
    """
    coordinate = state.layout.part.coordinate
    found = {buffer_tensor(name, coordinate): value.clone() for name, value in state.buffers.committed.items()}
    if state.layout.stages:
        content = bytearray(json.dumps(state.modes.evaluating).encode())
        found[modes_tensor(coordinate)] = torch.frombuffer(content, dtype=torch.uint8)
    return found


def draft_of(
    state: TrainingState, origin: Origin, generation: int, registered: States
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest without files, and the tensors that its author's file has beside blocks.

    Raises `UserError` naming a state that cannot be kept.
    """
    tensors = tensors_of_coordinate(state)
    states = TakenStates.of(registered)
    scheduler = state.scheduler.state_dict() if state.scheduler is not None else None
    manifest = Manifest(
        release=RELEASE,
        kind="training",
        job=origin.job,
        run=origin.run,
        lineage=state.lineage,
        step=state.step,
        generation=generation,
        last_step=state.last_step,
        layout=origin.layout,
        optimizer=title_of(state.optimizer),
        classes=classes_of(state.optimizer),
        forms=state.held.effects.own_forms,
        groups=[
            encode(group, tensors, f"optimizer group {number}")
            for number, group in enumerate(hyper_parameters(state.optimizer))
        ],
        given=_given(state),
        evaluating=None if state.layout.stages else tuple(state.modes.evaluating),
        data=origin.data,
        scheduler=encode(scheduler, tensors, "the scheduler's state"),
        scheduler_class=class_of(state.scheduler),
        scaler=encode(state.loss_scale.position, tensors, "the loss scale") if state.loss_scale is not None else None,
        states=states.tree,
        streams=tuple(state.stream_positions.to_texts()),
        missed=state.misses.runs(),
        record=state.record.to_bytes().decode() if state.record else "",
        buffers=tuple(_buffers_of_job(state)),
        frozen=None,
        config=dict(origin.config),
        numerics=dict(origin.numerics),
        files=(),
    )
    return manifest, tensors | states.tensors


def _buffers_of_job(state: TrainingState) -> Iterable[str]:
    """Names: those of all stages of a pipeline."""
    if state.layout.stages:
        return (name for module in state.modules for name in persistent_buffers(module))
    return state.buffers.committed


def _given(state: TrainingState) -> GivenEntry:
    given, none = state.given.values, dict[str, Tensor]()
    return GivenEntry(
        groups=[encode(dict(group), none, "a given value") for group in given.groups],
        schedule=encode(dict(given.schedule), none, "a given value"),
    )
