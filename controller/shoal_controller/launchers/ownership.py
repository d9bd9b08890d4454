"""Whose the living workers are that records in a data folder name: nobody's process is taken for one's own in a copy.

A record names the store of the controller that wrote it, by what a copy, a backup or a second mount of a folder has
not: where the folder lies, and which file its lock is. `server.py` asks `claim` before it leads, with the store's lock
held; the local launcher takes what it says. No process is ended here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from shoal_protos.errors import UserError

from shoal_controller.launchers.process import Process
from shoal_controller.launchers.process_records import ProcessRecord, ProcessRecords, boot_id
from shoal_controller.process.owner import Owner

log = structlog.get_logger("shoal.launcher")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a controller may take for its own of those before it."""

    owner: Owner = field(default_factory=lambda: Owner(""))
    """Who it is."""
    others: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Of each job and run whose workers another controller has: whose they are."""
    lost_port: int = 0
    """Where workers of an earlier controller look for it, and somebody else listens."""
    held: tuple[int, ...] = ()
    """Descriptors of the locks of stores whose workers were taken over: while they are open, none of them is led."""

    def not_ours(self, records: ProcessRecords, writing_here: bool = False) -> set[str]:
        """● Workers that live and that another controller has started: nothing here ends them or forgets them.

        `writing_here`: only those whose log is in this very place, not in a folder that this one is a copy of.
        """
        living = (left for left in _living(records) if left.record.owner != self.owner)
        return {
            left.record.worker for left in living if not writing_here or left.output == records.log(left.record.worker)
        }


@dataclass(frozen=True, slots=True)
class LeftWorker:
    """A record whose process lives, and which this controller has not written."""

    job: str
    run: str
    records: ProcessRecords
    record: ProcessRecord
    output: Path
    """Where the process writes to; no file of that name where it was moved or deleted."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether what it belongs to is still where it was: then it is a copy that lies here."""
        return self.output.exists() if self.record.owner is None else self.record.owner.is_in_place

    @property
    def owner(self) -> str:
        return f"that writes to {self.output}" if self.record.owner is None else f"of {self.record.owner.folder}"

    def __str__(self) -> str:
        return f"{self.record.worker} of job {self.job} (pid {self.record.pid})"


def claim(folder: Path, logs: Path | None, owner: Owner, adopt: bool, lost_port: int = 0) -> Claim:
    """Look through a data folder. `adopt`: what others have left is taken over, and its records say so from then on.

    Raises `UserError` where others' workers are led, or nothing shows whose they are and they are not to be taken over.
    """
    ours, foreign = [], []
    for found in _all_living(folder, logs):
        if found.record.owner is None and _writes_here(found):  # an older version's record names no owner
            ours.append(found)
        elif found.record.owner != owner:
            foreign.append(found)
    held: tuple[int, ...] = ()
    others: dict[tuple[str, str], str] = {}
    if adopt:
        held = _taken_over(foreign, owner)
        ours += foreign
    else:
        others = _left_alone(foreign, owner)
    for found in ours:
        found.records.write(replace(found.record, owner=owner))
    return Claim(owner, others, lost_port, held)


def _all_living(folder: Path, logs: Path | None) -> Iterator[LeftWorker]:
    jobs = folder / "jobs"
    for job in sorted(jobs.iterdir()) if jobs.is_dir() else ():
        yield from _living(ProcessRecords(job, logs / job.name if logs is not None else None))


def _living(records: ProcessRecords) -> Iterator[LeftWorker]:
    """Of one job."""
    boot = boot_id()
    for record in records:
        process = Process.find(record.pid, record.started_at) if not record.ended and record.boot == boot else None
        if process is not None:
            run, output = record.run or process.variable("SHOAL_RUN"), process.output()
            process.release()
            yield LeftWorker(records.folder.name, run, records, record, output)


def _writes_here(found: LeftWorker) -> bool:
    """Whether the very file is its log that this folder has for it."""
    try:
        return found.records.log(found.record.worker).samefile(f"/proc/{found.record.pid}/fd/1")
    except OSError:
        return False


def _left_alone(foreign: list[LeftWorker], owner: Owner) -> dict[tuple[str, str], str]:
    """Those of other folders. Raises `UserError` where a folder was moved, or a backup was put in its place."""
    unproven = [found for found in foreign if not found.is_elsewhere or _is_same_lock(found.record.owner, owner)]
    if unproven:
        pids = " ".join(str(found.record.pid) for found in unproven)
        raise UserError(
            f"worker {', '.join(map(str, unproven))} lives, and nothing shows that it belongs to the store "
            f"{owner.folder}: it was started by the controller {unproven[0].owner}, and that folder was moved, mounted "
            f"elsewhere or replaced by a backup. To take it over, use --adopt; to begin without it: kill -9 {pids}"
        )
    others: dict[tuple[str, str], str] = {}
    for found in foreign:
        whose = (
            f"the workers of job {found.job} belong to the controller {found.owner} and are left alone; to take them "
            "over here, end that controller and use --adopt"
        )
        if (found.job, found.run) not in others:
            log.warning(whose, worker=found.record.worker, pid=found.record.pid)
        others[found.job, found.run] = whose
    return others


def _taken_over(foreign: list[LeftWorker], owner: Owner) -> tuple[int, ...]:
    """The locks of the stores that had them, where these are elsewhere. Raises `UserError` where one of them is led."""
    held: dict[Owner, int] = {}
    try:
        for found in foreign:
            theirs = found.record.owner
            if _is_same_lock(theirs, owner) or theirs in held:
                continue
            if found.is_elsewhere and theirs is not None and theirs.inode:
                held[theirs] = theirs.hold()
            elif found.is_elsewhere or (theirs is not None and theirs.is_held):
                raise BlockingIOError
    except OSError:
        for descriptor in held.values():
            os.close(descriptor)
        raise UserError(
            f"--adopt cannot take over worker {found}: it belongs to the controller {found.owner}, which may lead it; "
            "end that controller first, or leave --adopt out"
        ) from None
    return tuple(held.values())


def _is_same_lock(theirs: Owner | None, owner: Owner) -> bool:
    """Whether it is the very file whose lock this controller holds, under another name: nobody else can lead them."""
    return theirs is not None and theirs.inode > 0 and (theirs.device, theirs.inode) == (owner.device, owner.inode)
