"""Writes one worker's data file and what it says of it; the second half of a save.

The file is streamed from what it is written from (a copy, or the state itself): each chunk is checked and written while
it is in the cache, so nothing is copied. The file's entry for the manifest lies beside it as JSON until the
manifest is there (`commit.py`). Files carry step, worker and incarnation, and are never overwritten.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from shoal_protos.plan import Member

from shoal.checkpoint.checksum import checksum
from shoal.checkpoint.container import CODES, Region, header
from shoal.checkpoint.manifest import FileEntry, HeadEntry, PieceEntry, StateEntry, TensorEntry, safe_name
from shoal.checkpoint.retrying_storage import Chunks
from shoal.checkpoint.snapshot import PARAMETERS, DataContent, Piece
from shoal.checkpoint.storage import Storage

CHUNK_BYTES = 1 << 20
"""Small enough to be in the cache still when it is written after its checksums were made."""


@dataclass(frozen=True, slots=True)
class Author:
    """Whose file it is."""

    worker: str
    incarnation: str

    @classmethod
    def of(cls, member: Member) -> Author:
        return cls(member.worker, member.incarnation)

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
    block_bytes = {
        region.name: content.block_elements * region.dtype.itemsize
        for piece in content.pieces
        for region in piece.regions.values()
        if region.shape
    }
    for region, view in content.contents():
        if region.name not in block_bytes:
            checksums[region.name] = [checksum(view)]
            yield view
            continue
        size, found = block_bytes[region.name], list[bytes]()
        checksums[region.name] = found
        chunk = max(1, CHUNK_BYTES // size) * size
        for at in range(0, region.bytes, chunk):
            part = view[at : at + chunk]
            found += [checksum(part[b : b + size]) for b in range(0, part.nbytes, size)]
            yield part


def _piece_entry(piece: Piece, shift: int, checksums: dict[str, list[bytes]]) -> PieceEntry:
    count = piece.stretch.blocks
    columns = []
    for key in sorted(piece.regions):
        found = checksums[piece.regions[key].name]
        columns.append(found if len(found) == count else found * count)
    return PieceEntry(
        bucket=piece.stretch.bucket,
        blocks=(piece.stretch.start, piece.stretch.stop),
        at=piece.regions[PARAMETERS].at + shift,
        state={
            key: StateEntry(dtype=CODES[region.dtype], at=region.at + shift, scalar=not region.shape)  # type: ignore[arg-type]
            for key, region in piece.regions.items()
            if key != PARAMETERS
        },
        checksums=base64.b64encode(b"".join(map(b"".join, zip(*columns, strict=True)))).decode(),
    )


def _tensor_entry(region: Region, shift: int, checksums: dict[str, list[bytes]]) -> TensorEntry:
    return TensorEntry(
        dtype=CODES[region.dtype],  # type: ignore[arg-type]
        shape=region.shape,
        at=region.at + shift,
        checksum=checksums[region.name][0].hex(),
    )
