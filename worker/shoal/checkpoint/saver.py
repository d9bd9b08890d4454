"""The thread that writes saves beside training, one at a time: this member's file, and the next act of its part.

The training thread calls `begin` at a boundary and `on_vote` after each vote. What follows from the votes is decided in
core/saving.py; an act is carried out by the thread whose file it waited for, or by a new one if it waited for the vote.
Retention follows a complete save. Training does not wait for this thread, nor the thread for training, unless the file
is written from what training holds (`write`). The leader's manifest has the script's states, which are taken later than
the blocks (`states`) and before the vote that decides upon it.

`write_frozen` writes the parameters that no optimizer changes into one file that all checkpoints of a path share, if it
is not there yet; so checkpoints of a mostly frozen model stay small. The file's name has their digest, and manifests
name the file, so that a checkpoint is whole without the script that built the model. The parameters are read one after
the other, twice; sharded ones come unit by unit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from shoal_protos.errors import ShoalError
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.checkpoint.catalogue import FROZEN, Keep, Ours, SaveName, delete, delete_rests, prune, withdraw
from shoal.checkpoint.manifest import FrozenEntry, Manifest, TensorEntry, checksum, safe_name
from shoal.checkpoint.model_export import Reading
from shoal.checkpoint.retrying_storage import Chunks
from shoal.checkpoint.snapshot import Arena, DataContent, TensorsAlone
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, NoStates, TakenStates, commit, head_entry, part_of, write_content
from shoal.core.checkpoint_errors import StorageFull
from shoal.core.container import CODES, Region, header
from shoal.core.saving import CompleteSave, SaveAct, SavePart, SavePartVote, SaveStatus, WithdrawSave, WriteSave
from shoal.process.device import HOST, Device
from shoal.process.host_memory import tensor_bytes
from shoal.state.training_state import digest_of

PATIENCE_SECONDS = 30.0
"""Wait for the part of a member that has left: its process ends once it has written it."""
LOOK_SECONDS = 0.05
NICE = 15
"""The writing thread steps back for the training threads of the machine: it takes what they leave idle, and a thirtieth
of what they do not."""

OF_STATES = "-states"
"""In the name of the file that has the tensors of the script's own states."""
NOT_YET = NoStates("this worker left before the script's own states could be taken for it")
"""They are taken once the script is through with the step."""

T = TypeVar("T")

log = get_logger("shoal.checkpoint")


@dataclass(frozen=True, slots=True)
class Lead:
    """What the leader of a save has beside its own part."""

    draft: Manifest
    """Without the script's own states."""
    frozen: Mapping[str, Tensor]
    """None where `write_frozen_now` has written them."""
    in_use: str
    """Folder of the checkpoint that training came from, which retention leaves alone; or empty."""


@dataclass(frozen=True, slots=True)
class SaveTask:
    """What this member writes of one save."""

    part: SavePart
    name: SaveName
    content: DataContent
    lead: Lead | None
    ours: Ours = field(default_factory=Ours)
    """Whose other saves in the place may be deleted."""


@dataclass(slots=True)
class SaveResult:
    """How the last save went, for people."""

    part: SavePart
    name: SaveName
    path: str
    manifest: Manifest | None = None
    """Set where it was completed here."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: copy, write, commit."""
    bytes: int = 0
    """Written by this worker."""


class Saver:
    """The thread that writes saves, and what it has come to."""

    def __init__(self, storage: Storage, keep: Keep, device: Device = HOST) -> None:
        self.storage, self._keep = storage, keep
        self.arena = Arena(device)
        self.outcome: SaveResult | None = None
        self._fresh: SaveResult | None = None
        """Not taken yet."""
        self._save: SaveTask | None = None
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._lock = threading.Lock()
        """Around all calls of the part."""
        self._whole: set[str] = set()
        """Folders that were seen to be whole checkpoints."""
        self._room = 0
        """So many more saves can be made before an old one may go: the place need not be looked through for them."""
        self._frozen: FrozenEntry | None = None
        self._written_now: FrozenEntry | None = None
        self.states: TakenStates | NoStates | None = None
        """The script's own, for the manifest of the save that this member leads, if it does; or why there are none."""

    # ---- on the training thread

    def reserve(self, count: int) -> None:
        """Takes memory for a snapshot of so many bytes beside training, so that the first save need not."""
        if not self.is_working:
            self._thread = threading.Thread(
                target=self.arena.reserve, args=(count,), name="shoal-save-memory", daemon=True
            )
            self._thread.start()

    @property
    def status(self) -> SaveStatus:
        with self._lock:
            return self.outcome.part.status if self.outcome is not None else SaveStatus.IDLE

    @property
    def is_working(self) -> bool:
        """Whether its thread has something to do without waiting for a vote."""
        return self._thread is not None and self._thread.is_alive()

    def ready(self) -> Arena:
        """The memory for the next snapshot. The save before must be over."""
        self.join()
        return self.arena

    def begin(self, save: SaveTask, copy_seconds: float) -> None:
        """Starts writing. The one before must be over."""
        self.join()
        self._save = save
        self._expect(save.part, save.name).seconds["copy"] = copy_seconds
        self._start(WriteSave())

    def write(self, save: SaveTask) -> None:
        """As `begin`, but it returns when the own file is written: training changes what that is written from."""
        self.join()
        self._save, began = save, time.monotonic()
        outcome = self._expect(save.part, save.name)
        self._follow(save, outcome, WriteSave())
        outcome.seconds["copy"] = time.monotonic() - began

    def write_frozen_now(
        self, name: SaveName, author: Author, ours: Ours, named: Mapping[str, Tensor], reading: Reading
    ) -> None:
        """Of frozen parameters that only the training thread can read: before the save `name` begins.

        Once in a process's life, as long as the file is there. Raises what `reading` and the storage raise.
        """
        known = self._written_now
        if known is None or self.storage.list().get(known.file) != known.bytes:
            self._written_now = self._making_room(
                name, ours, lambda: write_frozen(self.storage, named, author.incarnation, reading)
            )

    def refuse(self, part: SavePart, name: SaveName, why: str) -> None:
        """A save that this member cannot even begin."""
        part.refuse(why)
        self._save = None
        self._expect(part, name)

    def _expect(self, part: SavePart, name: SaveName) -> SaveResult:
        self._room = self._room if part.leads else 0  # another one leads, and knows better what is there
        self.states = NOT_YET if part.leads else None
        self.outcome = self._fresh = SaveResult(part, name, f"{self.storage.url}/{name.folder}")
        return self.outcome

    @property
    def lacks_states(self) -> bool:
        """Whether this member leads a save whose states were not taken yet."""
        return self.states is NOT_YET and self._save is not None and not self._save.part.is_over

    def may_retake(self, step: int) -> bool:
        """Whether it leads one of that step whose states were taken, and nothing is made of them yet."""
        save = self._save
        if save is None or not isinstance(self.states, TakenStates):
            return False
        with self._lock:
            return save.part.save.step == step and not (save.part.is_decided or save.part.is_over)

    def on_vote(self, vote: SavePartVote) -> None:
        """After a vote: see `SavePart.on_vote`."""
        if self._save is not None:
            with self._lock:
                act = self._save.part.on_vote(vote)
            self._start(act)

    def take_outcome(self) -> SaveResult | None:
        """How the save at hand went, once it is over; once."""
        with self._lock:
            if self._fresh is None or not self._fresh.part.is_over:
                return None
        outcome, self._fresh = self._fresh, None
        return outcome

    def close(self, patience_seconds: float) -> None:
        """Lets what has begun come to its end, for so long: all other members do the same now."""
        if self._save is not None:
            with self._lock:
                act = self._save.part.close()
            self._start(act)
        if self._thread is not None:
            self._thread.join(patience_seconds)
        if self.is_working:
            path = self.outcome.path if self.outcome is not None else self.storage.url
            log.error("save_given_up", checkpoint=path, means="a write does not come back; the process ends without it")

    @property
    def seconds_at_work(self) -> float:
        """For how long its thread has been at what it does; 0: it does nothing."""
        return time.monotonic() - self._began if self.is_working else 0.0

    def join(self) -> None:
        """Waits until the thread has nothing to do but wait for a vote."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self, act: SaveAct | None) -> None:
        if act is not None:
            self.join()
            self._began = time.monotonic()
            self._thread = threading.Thread(target=self._run, args=(self._save, self.outcome, act), name="shoal-save",
                                            daemon=True)  # fmt: skip
            self._thread.start()

    # ---- on the saving thread

    def _run(self, save: SaveTask, outcome: SaveResult, act: SaveAct | None) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._follow(save, outcome, act)

    # ---- on that one, or on the training thread where training waits

    def _follow(self, save: SaveTask, outcome: SaveResult, act: SaveAct | None) -> None:
        while act is not None:
            act = self._carry_out(save, outcome, act)

    def _carry_out(self, save: SaveTask, outcome: SaveResult, act: SaveAct) -> SaveAct | None:
        """Returns what follows."""
        try:
            match act:
                case WriteSave():
                    self._write(save, outcome)
                    with self._lock:
                        return save.part.on_written()
                case CompleteSave():
                    outcome.manifest = self._complete(save, outcome, act)
                    with self._lock:
                        save.part.on_completed()
                case WithdrawSave():
                    self._withdraw(save, outcome, act)
                    with self._lock:
                        save.part.on_withdrawn()
            return None
        except ShoalError as error:
            why = str(error)
        except Exception as error:  # whatever it is, training goes on and the failure is reported
            log.exception("save_broke", checkpoint=outcome.path)
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            return save.part.on_failure(why)

    def _write(self, save: SaveTask, outcome: SaveResult) -> None:
        """Writes this worker's own file; the leader writes frozen parameters too: nobody waits for them later."""
        began, folder, author = time.monotonic(), save.name.folder, Author.of(save.part.member)
        entry = self._making_room(
            save.name, save.ours, lambda: write_content(self.storage, folder, save.name.step, author, save.content)
        )
        outcome.bytes, outcome.seconds["write"] = entry.bytes, time.monotonic() - began
        if save.lead is not None:
            tensors = save.lead.frozen
            if tensors or self._written_now is None:
                self._frozen = self._making_room(save.name, save.ours, lambda: self._frozen_file(tensors, author))
            else:
                self._frozen = self._written_now

    def _making_room(self, name: SaveName, ours: Ours, write: Callable[[], T]) -> T:
        """Where there is no room for it, what older saves left goes, and it is tried once more."""
        try:
            return write()
        except StorageFull as error:
            rests = delete_rests(self.storage, name, ours)
            if not rests:
                raise
            log.warning("rests_deleted", checkpoint=name.folder, folders=len(rests), reason=str(error))
            return write()

    def _frozen_file(self, tensors: Mapping[str, Tensor], author: Author) -> FrozenEntry | None:
        """Digested once in a process's life."""
        known = self._frozen
        if known is not None and self.storage.list().get(known.file) == known.bytes:
            return known
        return write_frozen(self.storage, tensors, author.incarnation)

    def _withdraw(self, save: SaveTask, outcome: SaveResult, act: WithdrawSave) -> None:
        """The next save may need the room."""
        folder, self.states = save.name.folder, None
        if not save.part.is_over:
            log.error("save_failed", checkpoint=outcome.path, reason=save.part.failure)
        try:
            if act.everything:
                delete(self.storage, folder)
            else:
                withdraw(self.storage, folder, Author.of(save.part.member).file(save.name.step))
        except Exception as error:  # whatever it is, the save is over
            log.error("failed_save_not_deleted", checkpoint=folder, reason=str(error))

    def _complete(self, save: SaveTask, outcome: SaveResult, act: CompleteSave) -> Manifest:
        lead, states, self.states = save.lead, self.states, None
        assert lead is not None and states is not None
        if isinstance(states, NoStates):
            raise ShoalError(states.why)
        began = time.monotonic()
        self._wait_for_parts(save, act.gone)
        files = [Author.of(writer).file(save.name.step) for writer in save.part.save.writers]
        if states.tensors:
            name, author, content = save.name, Author.of(save.part.member), TensorsAlone(states.tensors)
            write = partial(write_content, self.storage, name.folder, name.step, author, content, OF_STATES)
            files.append(self._making_room(name, save.ours, write).name)
        draft = lead.draft.model_copy(update={"frozen": self._frozen, "verified": act.verified, "states": states.tree})
        manifest = self._making_room(save.name, save.ours, lambda: commit(self.storage, save.name.folder, draft, files))
        outcome.seconds["commit"] = time.monotonic() - began
        log.info("saved", checkpoint=outcome.path, step=manifest.step, bytes=manifest.data_bytes)
        self._prune(save.name, save.ours, lead.in_use)
        return manifest

    def _wait_for_parts(self, save: SaveTask, gone: frozenset[str]) -> None:
        """Of members that have left and write on until they end."""
        writers = [writer for writer in save.part.save.writers if writer.incarnation in gone]
        files = [part_of(Author.of(writer).file(save.name.step)) for writer in writers]
        pause, until = threading.Event(), time.monotonic() + PATIENCE_SECONDS
        while files and time.monotonic() < until:
            there = self.storage.list(save.name.folder)
            files = [file for file in files if file not in there]
            if files:
                pause.wait(LOOK_SECONDS)

    def _prune(self, done: SaveName, ours: Ours, in_use: str) -> None:
        """What cannot be deleted does not make the save a failed one."""
        self._whole.add(done.folder)
        self._room -= 1
        if self._room >= 0:
            return
        try:
            for gone in prune(self.storage, done, self._keep, ours, in_use, self._whole):
                log.info("checkpoint_deleted", step=gone.step, folder=gone.folder)
            self._room = max(0, self._keep.newest - len(self._whole))
        except ShoalError as error:
            log.error("checkpoints_not_deleted", reason=str(error))


def write_frozen(
    storage: Storage, named: Mapping[str, Tensor], incarnation: str, reading: Reading = iter
) -> FrozenEntry | None:
    """Writes the file where no whole one is there. None where nothing is frozen."""
    if not named:
        return None
    checksums: dict[str, str] = {}
    digest = digest_of(_noting_checksums(named, reading, checksums))
    regions, at = list[Region](), 0
    for name, tensor in named.items():
        regions.append(Region(name, tensor.dtype, tuple(tensor.shape), at))
        at += regions[-1].bytes
    head = header(regions, {"format": "pt", "shoal": "frozen parameters"})
    size, stem = len(head) + at, f"{FROZEN}{digest[:32]}"
    there = [name for name, found in storage.list().items() if name.startswith(stem) and found == size]
    file = there[0] if there else f"{stem}-{safe_name(incarnation)}.safetensors"
    if not there:
        storage.write(file, Chunks(partial(_stream, head, named, reading)))
    tensors = {
        region.name: TensorEntry(
            dtype=CODES[region.dtype],  # type: ignore[arg-type]
            shape=region.shape,
            at=region.at + len(head),
            checksum=checksums[region.name],
        )
        for region in regions
    }
    return FrozenEntry(file=file, bytes=size, head=head_entry(head), digest=digest, tensors=tensors)


def _noting_checksums(
    named: Mapping[str, Tensor], reading: Reading, found: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in zip(named, reading(list(named.values())), strict=True):
        copy = value.detach().to("cpu", copy=True)  # numpy pins what it looks at
        found[name] = checksum(tensor_bytes(copy)).hex()
        yield name, copy


def _stream(head: bytes, named: Mapping[str, Tensor], reading: Reading) -> Iterator[memoryview]:
    yield memoryview(head)
    for value in reading(list(named.values())):
        yield tensor_bytes(value.detach().to("cpu", copy=True))
