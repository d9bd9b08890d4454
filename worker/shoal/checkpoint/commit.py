"""The last act of a save: all writers' entries become the manifest, and with it the checkpoint exists.

Carried out by one worker once every writer has said that it is done. Nothing is believed: every block must be in one
file exactly once, and every file must lie there in its full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from shoal.checkpoint.errors import CheckpointDamaged
from shoal.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    broken_cover,
    broken_file,
    parse_part,
)
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import part_of

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
