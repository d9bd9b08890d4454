"""Which checkpoints a place holds, newest first, and which of them is meant by `resume`.

The directory alone is enough: every save has a folder of its own, and a folder with a sound manifest whose files are
all there in full size is a checkpoint. Others are skipped, each with a sentence that says why; what only reading can
tell (a changed bit) the reader tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from shoal_protos.errors import NotFound

from shoal.checkpoint.errors import CheckpointDamaged
from shoal.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST, Manifest, parse, safe_name
from shoal.checkpoint.reader import Reader
from shoal.checkpoint.storage import Storage, open_storage

FOLDER = re.compile(r"step-(?P<step>\d{12,18})-(?P<generation>\d{1,18})-(?P<save>\d{1,18})-[A-Za-z0-9_]{1,64}")

Skipped = Callable[[str], None]
"""Hears a sentence for every folder that is no checkpoint."""


@dataclass(frozen=True, slots=True, order=True)
class SaveName:
    """One save. Ordered by when it was made: generations only grow, and steps within one."""

    generation: int
    step: int
    save: int
    """Votes passed in the generation: tells two saves of one step apart."""
    folder: str

    @classmethod
    def of(cls, step: int, generation: int, save: int, incarnation: str) -> SaveName:
        """`incarnation`: of the worker that writes the manifest, so that no other job's folder is met."""
        folder = f"step-{step:012d}-{generation}-{save}-{safe_name(incarnation)}"
        return cls(generation, step, save, folder)

    @classmethod
    def parse(cls, folder: str) -> SaveName | None:
        """None where the folder is none of a save."""
        match = FOLDER.fullmatch(folder)
        if match is None:
            return None
        return cls(int(match["generation"]), int(match["step"]), int(match["save"]), folder)

    def __str__(self) -> str:
        return f"checkpoint of step {self.step}, generation {self.generation} ({self.folder})"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint: where it is, and its manifest."""

    storage: Storage
    name: SaveName
    manifest: Manifest

    @property
    def path(self) -> str:
        """What `resume` and the command take."""
        return f"{self.storage.url}/{self.name.folder}"

    def reader(self) -> Reader:
        return Reader(self.storage, self.name.folder, self.manifest)


def saves(storage: Storage) -> list[SaveName]:
    """All folders of saves, complete or not, newest first."""
    names = (SaveName.parse(name) for name, size in storage.list().items() if size is None)
    return sorted((name for name in names if name is not None), reverse=True)


def highest_generation(path: str) -> int:
    """Of all saves there, whole or not; 0 where there is none."""
    return max((name.generation for name in saves(open_storage(path))), default=0)


def look_into(storage: Storage, name: SaveName) -> Found:
    """Raises `CheckpointDamaged` where the folder holds no whole checkpoint."""
    where = f"{storage.url}/{name.folder}"
    try:
        content = storage.read(f"{name.folder}/{MANIFEST}", LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointDamaged(
            f"{where} is half-written: it has no {MANIFEST}. Its save is under way, or was broken off."
        ) from None
    manifest = parse(content, f"{where}/{MANIFEST}")
    _check_sizes(storage.list(name.folder), {file.name: file.bytes for file in manifest.files}, where)
    if manifest.frozen is not None:
        _check_sizes(storage.list(), {manifest.frozen.file: manifest.frozen.bytes}, where)
    if manifest.step != name.step or manifest.generation != name.generation:
        raise CheckpointDamaged(
            f"{where} is damaged: its manifest is of step {manifest.step}, generation {manifest.generation}."
        )
    return Found(storage, name, manifest)


def _check_sizes(there: Mapping[str, int | None], written: Mapping[str, int], where: str) -> None:
    for file, size in written.items():
        if there.get(file) != size:
            found = f"has {there[file]} bytes" if file in there else "is not there"
            raise CheckpointDamaged(f"{where} is damaged: {file} {found}; it was written with {size}.")


def checkpoints(storage: Storage, skipped: Skipped, generations: Collection[int] | None = None) -> Iterator[Found]:
    """The whole ones, newest first; of these generations alone where they are given."""
    for name in saves(storage):
        if generations is not None and name.generation not in generations:
            skipped(f"{storage.url}/{name.folder} is of generation {name.generation}, which this job did not have.")
            continue
        try:
            yield look_into(storage, name)
        except CheckpointDamaged as error:
            skipped(str(error))


def resolve(
    path: str | None,
    resume: int | str | bool,
    skipped: Skipped,
    generations: Collection[int] | None = None,
    spoiled: Collection[str] = (),
) -> Found | None:
    """The checkpoint that `resume` means: "latest", a step, a path or URL, or False; None where there is nothing.

    `path`: where this job keeps its own. A step or a path that is not there is an error (`NotFound`), and one that is
    named is taken whatever its generation. `spoiled`: paths that cannot be read; the latest is one of others.
    """
    if resume is False:
        return None
    if isinstance(resume, str) and resume != "latest":
        return at(resume, skipped)
    if path is None:
        if resume == "latest":
            return None
        raise NotFound(f"resume is step {resume}, and no `shoal.checkpoint.path` says where checkpoints are.")
    storage = open_storage(path)
    if resume == "latest":
        return next((f for f in checkpoints(storage, skipped, generations) if f.path not in spoiled), None)
    for found in checkpoints(storage, skipped):
        if found.name.step == resume:
            return found
    there = sorted({name.step for name in saves(storage)})
    raise NotFound(f"{storage.url} has no whole checkpoint of step {resume}; there are {there or 'none'}.")


def at(path: str, skipped: Skipped) -> Found:
    """A checkpoint's own folder, or the newest one in a folder of checkpoints."""
    parent, _, folder = path.rstrip("/").rpartition("/")
    name = SaveName.parse(folder)
    if name is not None:
        storage = open_storage(parent or ("/" if path.startswith("/") else "."))
        if storage.list(folder):
            return look_into(storage, name)
        raise NotFound(f"there is no checkpoint at {path}.")
    found = next(checkpoints(open_storage(path), skipped), None)
    if found is None:
        raise NotFound(f"there is no whole checkpoint in {path}.")
    return found
