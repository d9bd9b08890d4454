"""Which checkpoints may go, and how one goes: the manifest first, so that what is left of it never looks like one.

The newest few stay, every n-th step's stays, and the one in use stays; another run's are not touched, nor what cannot
be read: another version of Shoal may. Rests of older saves that were broken off go too. Called by the worker that has
just completed a save; a kill at any instant leaves whole checkpoints and rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.checkpoint.catalogue import SaveName, look_into, saves
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import part_of
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.lineage import Lineage, is_given_up

FROZEN = "frozen-"
"""Beginning of the names of files that several checkpoints share."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What the config says."""

    newest: int
    every: int | None
    """Checkpoints of every so many steps stay for good."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Whose saves in a folder a run may delete: its own, and those of the runs that it has gone on from."""

    run: str = ""
    lineage: Lineage = ()

    @property
    def runs(self) -> set[str]:
        return {self.run, *(branch.run for branch in self.lineage)}


def superfluous(whole: Sequence[SaveName], keep: Keep, in_use: str, lineage: Lineage = ()) -> list[SaveName]:
    """Complete checkpoints, newest first, that may be deleted. `in_use`: a folder's name, or empty.

    What was given up does not count as one of the newest few; it goes when those are newer than it.
    """
    gone, counted = [], 0
    for name in whole:
        for_good = keep.every and name.step % keep.every == 0
        if counted >= keep.newest and not for_good and name.folder != in_use:
            gone.append(name)
        counted += not is_given_up(name.generation, name.step, lineage)
    return gone


def prune(
    storage: Storage,
    done: SaveName,
    keep: Keep,
    ours: Ours = Ours(),
    in_use: str = "",
    known: set[str] | None = None,
) -> list[SaveName]:
    """After the save `done`: deletes what may go, and never `done`; returns the checkpoints that went. `known`: folders
    that were seen to be whole, of which it makes all that are. Raises `StorageFailed`.
    """
    known = set() if known is None else known
    whole, rests = _sorted_out(storage, done, ours, known)
    known &= {name.folder for name in whole}
    old = [name for name in superfluous(whole, keep, in_use, ours.lineage) if name != done]
    gone = [name for name in old if _is_readable(storage, name)]
    for name in [*gone, *rests]:
        delete(storage, name.folder)
        known.discard(name.folder)
    if gone:
        _delete_unused_frozen(storage)
    return gone


def _is_readable(storage: Storage, name: SaveName) -> bool:
    try:
        look_into(storage, name)
    except CheckpointDamaged:
        return False
    return True


def delete_rests(storage: Storage, before: SaveName, ours: Ours = Ours()) -> list[SaveName]:
    """Deletes what saves older than this one left when they were broken off; returns them. Raises `StorageFailed`."""
    _, rests = _sorted_out(storage, before, ours, set())
    for name in rests:
        delete(storage, name.folder)
    return rests


def _sorted_out(storage: Storage, save: SaveName, ours: Ours, known: set[str]) -> tuple[list[SaveName], list[SaveName]]:
    """Our whole checkpoints, newest first, and rests of our saves older than this one. Folders that are not `known` to
    be whole are looked into.
    """
    whole, rests, runs = [], [], ours.runs
    for name in saves(storage):
        if not name.is_of(runs):
            continue
        if name.folder in known or MANIFEST in storage.list(name.folder):
            whole.append(name)
            known.add(name.folder)
        elif name < save:
            rests.append(name)
    return whole, rests


def withdraw(storage: Storage, folder: str, file: str) -> None:
    """Deletes what one writer wrote of a save that failed. A checkpoint that is whole all the same stays so."""
    if MANIFEST in storage.list(folder):
        return
    for name in (part_of(file), file):
        storage.remove(f"{folder}/{name}")
    storage.remove_folder(folder)


def delete(storage: Storage, folder: str) -> None:
    """A whole checkpoint or the rest of one."""
    names = storage.list(folder)
    if MANIFEST in names:
        storage.remove(f"{folder}/{MANIFEST}")
    for name in names:
        if name != MANIFEST:
            storage.remove(f"{folder}/{name}")
    storage.remove_folder(folder)


def _delete_unused_frozen(storage: Storage) -> None:
    """Files of frozen parameters that no manifest names any more. A manifest that cannot be read keeps them all."""
    files = {name for name, size in storage.list().items() if size is not None and name.startswith(FROZEN)}
    if len(files) < 2:
        return  # the newest checkpoint's own
    for name in saves(storage):
        try:
            frozen = look_into(storage, name).manifest.frozen
        except CheckpointDamaged:
            return
        if frozen is not None:
            files.discard(frozen.file)
    for file in files:
        storage.remove(file)
