"""One save at a time, on a thread beside training: write the own file; the leader then completes or gives up the save.

The training thread calls `begin` at a boundary and `on_vote` after each vote; what stands in between is `status`, which
every ballot says, so that all decide alike. The leader (rank 0 when the save began) writes the manifest once no other
member is writing any more; a member that is gone may have written its part all the same, so the disk decides. Retention
follows. Nothing here waits for training, and training for nothing here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from shoal_protos.errors import ShoalError
from torch import Tensor

from shoal.checkpoint.catalogue import SaveName
from shoal.checkpoint.commit import commit
from shoal.checkpoint.errors import CheckpointDamaged, StorageFull
from shoal.checkpoint.frozen import write_frozen
from shoal.checkpoint.manifest import FileEntry, FrozenEntry, Manifest
from shoal.checkpoint.retention import Keep, Ours, delete, delete_rests, prune, withdraw
from shoal.checkpoint.snapshot import Arena, Snapshot
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, part_of, write_snapshot
from shoal.logs import get_logger

PATIENCE_SECONDS = 30.0
"""Wait for the part of a member that has left: its process ends once it has written it."""
LOOK_SECONDS = 0.05
NICE = 15
"""The writing thread steps back for the training threads of the machine: it takes what they leave idle, and a thirtieth
of what they do not."""

T = TypeVar("T")

log = get_logger("shoal.checkpoint")


class SaveStatus(StrEnum):
    """A member's part in a save, as its ballot gives it."""

    IDLE = ""
    WRITING = "writing"
    WRITTEN = "written"
    """The own part; the manifest is not there yet, as far as this member knows."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lead:
    """What the leader of a save has beside its own part."""

    draft: Manifest
    buffers: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    in_use: str
    """Folder of the checkpoint that training came from, which retention leaves alone; or empty."""


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One save as one member sees it. `members[0]` leads."""

    name: SaveName
    author: Author
    members: tuple[Author, ...]
    snapshot: Snapshot
    lead: Lead | None
    ours: Ours = field(default_factory=Ours)
    """Whose other saves in the place may be deleted."""


@dataclass(slots=True)
class SaveResult:
    """How the last save went, for people."""

    name: SaveName
    path: str
    manifest: Manifest | None = None
    """Set where it was completed here."""
    verified: bool = False
    """Whether all copies of what is saved agreed."""
    failure: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: copy, write, commit."""
    bytes: int = 0
    """Written by this worker."""


class Saver:
    """The thread that writes saves, and what it has come to."""

    def __init__(self, storage: Storage, keep: Keep) -> None:
        self.storage, self._keep = storage, keep
        self.arena = Arena()
        self.outcome: SaveResult | None = None
        self._fresh: SaveResult | None = None
        """Not taken yet."""
        self._save: SaveTask | None = None
        self._status = SaveStatus.IDLE
        self._thread: threading.Thread | None = None
        self._verdict = threading.Event()
        self._gone: frozenset[str] = frozenset()
        """Whose parts may still come, though they take part in votes no more."""
        self._give_up = ""
        self._verified = False
        self._leader_has_begun = False
        self._frozen: FrozenEntry | None = None

    # ---- on the training thread

    def reserve(self, count: int) -> None:
        """Takes memory for a snapshot of so many bytes beside training, so that the first save need not."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self.arena.reserve, args=(count,), name="shoal-save-memory", daemon=True
            )
            self._thread.start()

    @property
    def status(self) -> SaveStatus:
        return self._status

    @property
    def leads(self) -> bool:
        """Whether this member leads the save at hand."""
        return self._save is not None and self._save.lead is not None

    def ready(self) -> Arena:
        """The memory for the next snapshot. The save before must be over."""
        self._join()
        return self.arena

    def begin(self, save: SaveTask, copy_seconds: float) -> None:
        """Starts writing. The one before must be over."""
        self._join()
        self._save, self._status = save, SaveStatus.WRITING
        self._verdict.clear()
        self._give_up, self._gone, self._leader_has_begun, self._verified = "", frozenset(), False, False
        self.outcome = SaveResult(save.name, f"{self.storage.url}/{save.name.folder}", seconds={"copy": copy_seconds})
        self._fresh = self.outcome
        self._thread = threading.Thread(target=self._run, args=(save,), name="shoal-save", daemon=True)
        self._thread.start()

    def on_vote(self, ballots: Mapping[str, str], planned: bool = True, sound: bool | None = False) -> None:
        """After a vote: the status of each present member, by incarnation. `planned`: who is not present has
        left by a planned change, and its process writes on; otherwise it is dead. `sound`: whether all copies of what
        is saved agree; None: they are still being compared.
        """
        save = self._save
        if save is None or self._status is SaveStatus.IDLE:
            return
        if save.lead is not None:
            self._decide(save, ballots, planned, sound)
        elif ballots.get(save.members[0].incarnation) == SaveStatus.WRITING:
            self._leader_has_begun = True
        elif self._status is not SaveStatus.WRITING:
            self._settle(save, ballots.get(save.members[0].incarnation), bool(sound))

    def _decide(self, save: SaveTask, ballots: Mapping[str, str], planned: bool, sound: bool | None) -> None:
        """The leader: complete it, give it up, or wait for another vote."""
        if self._verdict.is_set():
            return
        others = {author.incarnation: author for author in save.members[1:]}
        statuses = {incarnation: ballots[incarnation] for incarnation in others if incarnation in ballots}
        if SaveStatus.WRITING in statuses.values() or sound is None:
            return
        failed = [others[incarnation].worker for incarnation, status in statuses.items() if status == SaveStatus.FAILED]
        if failed:
            self._give_up = f"{', '.join(failed)} could not write"
        self._gone = frozenset(others.keys() - statuses.keys()) if planned else frozenset()
        self._verified = sound
        self._verdict.set()

    def _settle(self, save: SaveTask, status: str | None, sound: bool) -> None:
        """Another member: the leader is through, or gone. One that is gone may have completed it all the same."""
        assert self.outcome is not None
        leader, self.outcome.verified = save.members[0].worker, sound
        if status is None:
            self.outcome.failure = f"{leader}, which led it, is gone"
        elif not self.outcome.failure and not (self._leader_has_begun and status != SaveStatus.FAILED):
            reason = (
                "which led it, says that it failed" if self._leader_has_begun else "which was to lead it, did not begin"
            )
            self.outcome.failure = f"{leader}, {reason}"
            self._join()
            self._thread = threading.Thread(target=self._withdraw, args=(save,), name="shoal-save", daemon=True)
            self._thread.start()
        self._save, self._status = None, SaveStatus.IDLE

    def refuse(self, name: SaveName, why: str) -> None:
        """A save that this member cannot even begin."""
        self._save, self._status = None, SaveStatus.FAILED
        self._fresh = SaveResult(name, f"{self.storage.url}/{name.folder}", failure=why)

    def take_outcome(self) -> SaveResult | None:
        """How the save at hand went, once it is over; once."""
        over = self._save is None or (
            self._save.lead is not None and self._status in (SaveStatus.IDLE, SaveStatus.FAILED)
        )
        if not over:
            return None
        outcome, self._fresh = self._fresh, None
        return outcome

    def close(self) -> None:
        """Lets what has begun come to its end: all other members do the same now."""
        save = self._save
        if save is not None and save.lead is not None and not self._verdict.is_set():
            self._gone = frozenset(author.incarnation for author in save.members[1:])
            self._verdict.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ---- on the saving thread

    def _run(self, save: SaveTask) -> None:
        assert self.outcome is not None
        outcome = self.outcome
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            began = time.monotonic()
            entry = self._making_room(save, lambda: self._write(save))
            outcome.bytes, outcome.seconds["write"] = entry.bytes, time.monotonic() - began
            if save.lead is None:
                self._status = SaveStatus.WRITTEN
                return
            outcome.manifest, outcome.verified = self._complete(save, save.lead, outcome), self._verified
            self._status = SaveStatus.IDLE
        except ShoalError as error:
            self._fail(save, outcome, str(error))
        except Exception as error:  # whatever it is, training goes on and the failure is reported
            log.exception("save_broke", checkpoint=outcome.path)
            self._fail(save, outcome, f"{type(error).__name__}: {error}")

    def _write(self, save: SaveTask) -> FileEntry:
        return write_snapshot(self.storage, save.name.folder, save.name.step, save.author, save.snapshot)

    def _making_room(self, save: SaveTask, write: Callable[[], T]) -> T:
        """Where there is no room for it, what older saves left goes, and it is tried once more."""
        try:
            return write()
        except StorageFull as error:
            rests = delete_rests(self.storage, save.name, save.ours)
            if not rests:
                raise
            log.warning("rests_deleted", checkpoint=save.name.folder, folders=len(rests), reason=str(error))
            return write()

    def _fail(self, save: SaveTask, outcome: SaveResult, why: str) -> None:
        """What was written is given back before anybody knows of it: the next save may need the room."""
        outcome.failure = why
        log.error("save_failed", checkpoint=outcome.path, reason=why)
        self._withdraw(save)
        self._status = SaveStatus.FAILED

    def _withdraw(self, save: SaveTask) -> None:
        """The own part; the leader, once nobody writes any more, takes all that is there."""
        try:
            if save.lead is not None and self._verdict.is_set():
                delete(self.storage, save.name.folder)
            else:
                withdraw(self.storage, save.name.folder, save.author.file(save.name.step))
        except ShoalError as error:
            log.error("failed_save_not_deleted", checkpoint=save.name.folder, reason=str(error))

    def _complete(self, save: SaveTask, lead: Lead, outcome: SaveResult) -> Manifest:
        frozen = self._making_room(save, lambda: self._frozen_file(lead, save.author))
        self._verdict.wait()
        began = time.monotonic()
        if self._give_up:
            raise CheckpointDamaged(f"the save was given up: {self._give_up}.")
        self._wait_for_parts(save)
        draft = lead.draft.model_copy(update={"frozen": frozen, "verified": self._verified})
        files = [author.file(save.name.step) for author in save.members]
        manifest = self._making_room(save, lambda: commit(self.storage, save.name.folder, draft, files, lead.buffers))
        outcome.seconds["commit"] = time.monotonic() - began
        log.info("saved", checkpoint=outcome.path, step=manifest.step, bytes=manifest.data_bytes)
        self._prune(save.name, save.ours, lead.in_use)
        return manifest

    def _frozen_file(self, lead: Lead, author: Author) -> FrozenEntry | None:
        """Digested once in a process's life."""
        known = self._frozen
        if known is None or self.storage.list().get(known.file) != known.bytes:
            self._frozen = write_frozen(self.storage, lead.frozen, author.incarnation)
        return self._frozen

    def _prune(self, done: SaveName, ours: Ours, in_use: str) -> None:
        """What cannot be deleted does not make the save a failed one."""
        try:
            for gone in prune(self.storage, done, self._keep, ours, in_use):
                log.info("checkpoint_deleted", step=gone.step, folder=gone.folder)
        except ShoalError as error:
            log.error("checkpoints_not_deleted", reason=str(error))

    def _wait_for_parts(self, save: SaveTask) -> None:
        """Wait for the parts of members that have left and write on until they end."""
        files = [part_of(a.file(save.name.step)) for a in save.members if a.incarnation in self._gone]
        pause, until = threading.Event(), time.monotonic() + PATIENCE_SECONDS
        while files and time.monotonic() < until:
            there = self.storage.list(save.name.folder)
            files = [file for file in files if file not in there]
            if files:
                pause.wait(LOOK_SECONDS)
