"""Which checkpoints a place holds, newest first, which of them is meant by `resume`, and which may go.

The directory alone is enough: every save has a folder of its own, and a folder with a sound manifest whose files are
all there in full size is a checkpoint. Others are skipped, each with a sentence that says why; what only reading can
tell (a changed bit) the reader tells. Where every folder with a manifest is skipped, there is not nothing to go on
from: that is an error (`NoneReadable`).

The newest few stay, every n-th step's stays, and the one in use stays; another run's are not touched, nor what cannot
be read: another version of Shoal may. Rests of older saves that were broken off go too. A checkpoint's manifest goes
first, so that what is left of it never looks like one: a kill at any instant leaves whole checkpoints and rests. Called
by the worker that has just completed a save (`prune`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_protos.errors import NotFound

from shoal.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST, Manifest, parse, safe_name
from shoal.checkpoint.reader import Reader
from shoal.checkpoint.storage import Storage, open_storage
from shoal.checkpoint.writer import part_of
from shoal.core.checkpoint_errors import CheckpointDamaged, CheckpointIncomplete, NoneReadable, StrangeFile
from shoal.core.manifest_parts import Branch, Lineage, is_given_up

FOLDER = re.compile(
    r"step-(?P<step>\d{12,18})-(?P<generation>\d{1,18})-(?P<save>\d{1,18})(-(?P<run>[A-Za-z0-9_]{1,64}))?-[A-Za-z0-9_]{1,64}"
)

Skipped = Callable[[str], None]
"""Called with a sentence for every folder that is not a checkpoint."""


@dataclass(frozen=True, slots=True, order=True)
class SaveName:
    """One save. Ordered by when it was made: generations only grow, and steps within one."""

    generation: int
    step: int
    save: int
    """Votes passed in the generation: tells two saves of one step apart."""
    folder: str
    run: str = ""
    """The uid of the job's run, as a part of a name: no manifest need be opened to tell whose it is."""

    @classmethod
    def of(cls, step: int, generation: int, save: int, incarnation: str, run: str = "") -> SaveName:
        """`incarnation`: of the worker that writes the manifest, so that no other job's folder is met."""
        mark = f"-{_mark(run)}" if run else ""
        folder = f"step-{step:012d}-{generation}-{save}{mark}-{safe_name(incarnation)}"
        return cls(generation, step, save, folder, _mark(run))

    @classmethod
    def parse(cls, folder: str) -> SaveName | None:
        """None where the folder is not that of a save."""
        match = FOLDER.fullmatch(folder)
        if match is None:
            return None
        return cls(int(match["generation"]), int(match["step"]), int(match["save"]), folder, match["run"] or "")

    def is_of(self, runs: Collection[str]) -> bool:
        """Whether one of these runs made it. What no run is named in is of `""`."""
        return self.run in {_mark(run) for run in runs}

    def __str__(self) -> str:
        return f"checkpoint of step {self.step}, generation {self.generation} ({self.folder})"


def _mark(run: str) -> str:
    return safe_name(run) if run else ""


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

    def reader(self, coordinate: int = 0) -> Reader:
        """Of what a coordinate of a cell has."""
        return Reader(self.storage, self.name.folder, self.manifest, coordinate)


def saves(storage: Storage) -> list[SaveName]:
    """All folders of saves, complete or not, newest first."""
    names = (SaveName.parse(name) for name, size in storage.list().items() if size is None)
    return sorted((name for name in names if name is not None), reverse=True)


def highest_generation(path: str) -> int:
    """Highest generation of all saves there, complete or not; 0 if there are none."""
    return max((name.generation for name in saves(open_storage(path))), default=0)


def look_into(storage: Storage, name: SaveName) -> Found:
    """Raises `CheckpointDamaged` where the folder holds no whole checkpoint."""
    where = f"{storage.url}/{name.folder}"
    try:
        content = storage.read(f"{name.folder}/{MANIFEST}", LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointIncomplete(
            f"{where} is incomplete: it has no {MANIFEST}. Its save is still running, or was interrupted."
        ) from None
    except StrangeFile as error:
        raise CheckpointDamaged(f"{where} is damaged: {error}") from None
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


@dataclass(frozen=True, slots=True)
class Own:
    """What a store knows of its job's saves: the run, and the generations that it has begun."""

    run: str
    generations: Collection[int]


def checkpoints(
    storage: Storage, skipped: Skipped, own: Own | None = None, unread: list[str] | None = None
) -> Iterator[Found]:
    """The whole ones, newest first; those of one job's alone where its store knows them. `unread`: is given a sentence
    for each that has a manifest and cannot be taken.
    """
    for name in saves(storage):
        where = f"{storage.url}/{name.folder}"
        if own is not None and not name.is_of((own.run, "")):
            continue
        if own is not None and name.generation not in own.generations:
            strange = f"{where} is of generation {name.generation}, which this job did not have."
            skipped(strange)
            if unread is not None and own.run and name.is_of((own.run,)) and MANIFEST in storage.list(name.folder):
                unread.append(strange)  # of this very run: its store is an older one
        else:
            try:
                yield look_into(storage, name)
            except CheckpointIncomplete as error:
                skipped(str(error))
            except CheckpointDamaged as error:
                skipped(str(error))
                if unread is not None:
                    unread.append(str(error))


def latest(
    storage: Storage,
    skipped: Skipped,
    own: Own | None = None,
    unreadable: Collection[str] = (),
    is_meant: Callable[[Found], bool] = lambda _: True,
) -> Found | None:
    """The newest that can be read, and that no newer one, readable or not, has given up; of those that are meant.

    Raises `NoneReadable` where there are some and none of them can be read.
    """
    lineage: list[Branch] = []
    unread: list[str] = []
    for one in checkpoints(storage, skipped, own, unread):
        if is_given_up(one.name.generation, one.name.step, lineage):
            skipped(f"{one.path} was given up: training went back to an earlier step and continued without it.")
        elif one.path not in unreadable:
            if is_meant(one):
                return one
        else:
            unread.append(f"{one.path} cannot be read.")
        lineage += one.manifest.lineage
    if unread:
        anew = "Only `resume: false` begins at step 0 beside them."
        raise NoneReadable(f"there are checkpoints in {storage.url}, and none can be read: {unread[0]} {anew}")
    return None


def resolve(
    path: str | None,
    resume: int | str | bool,
    skipped: Skipped,
    own: Own | None = None,
    unreadable: Collection[str] = (),
) -> Found | None:
    """The checkpoint that `resume` means: "latest", a step, a path or URL, or False; None where there is nothing.

    `path`: where this job keeps its own. A step or a path that is not there is an error (`NotFound`), and one that is
    named is taken whoever saved it. `unreadable`: paths that cannot be read; the latest is one of others, and where
    there are checkpoints and it is none of them, that is an error too (`NoneReadable`).
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
        return latest(storage, skipped, own, unreadable)
    for found in checkpoints(storage, skipped):
        if found.name.step == resume:
            return found
    there = sorted({name.step for name in saves(storage)})
    raise NotFound(f"{storage.url} has no complete checkpoint of step {resume}; there are {there or 'none'}.")


def places(path: str | None, resume: int | str | bool) -> tuple[str, ...]:
    """Where a job's checkpoints may lie by its config, as URLs."""
    named = (path, resume if isinstance(resume, str) and resume != "latest" else None)
    return tuple(open_storage(place).url for place in named if place is not None)


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
        raise NotFound(f"there is no complete checkpoint in {path}.")
    return found


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
