"""The records and logs of a job's processes, which the next controller finds them by.

A record is `WORKER.json`. It is written when the process has started and again when it has ended, replaced whole, and
removed when the job has been told of the end. An invalid record counts as missing, because its worker says hello
itself. Called by `local.py`, in threads; `ownership.py` says whose the processes are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from shoal_controller.process.owner import Owner
from shoal_controller.process.private_files import for_this_user, write_private

log = structlog.get_logger("shoal.launcher")

LOG_BYTES = 64 << 20
"""Most bytes of a worker's log; so much more is kept of what was before."""
ENDED_LOGS = 50
"""Logs of workers that have ended: the last ones stay, beside those of workers that failed …"""
ENDED_LOG_BYTES = 1 << 30
"""… and so many bytes of a job's."""
ORDINARY_ENDS = (0, -signal.SIGTERM, -signal.SIGKILL)
"""Statuses of workers that end, or are ended, as workers come and go."""
TAIL_LINES = 20
TAIL_BYTES = 8192


def boot_id() -> str:
    """Start times count from the boot, so they mean something only with it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What is remembered of one process."""

    worker: str
    pid: int
    started_at: float
    boot: str
    log_offset: int
    """Where this process's output begins in the log."""
    ended: bool = False
    code: int | None = None
    run: str = ""
    """The job's that it was started for. Empty: it was found without a record, and its environment says it."""
    owner: Owner | None = None
    """Whose worker it is. None: an older version's record does not say it."""

    @classmethod
    def read(cls, content: bytes) -> ProcessRecord:
        """Raises `ValueError`, `TypeError` or `AttributeError` for what is no record."""
        fields = json.loads(content)
        owner = fields.pop("owner", None)
        return cls(**fields, owner=None if owner is None else Owner(**owner))

    def end(self, code: int | None) -> ProcessRecord:
        return replace(self, ended=True, code=code)


class ProcessRecords:
    """The records and logs of one job."""

    def __init__(self, folder: Path, logs: Path | None = None) -> None:
        """`logs`: the folder of the logs, where it is another one."""
        self.folder, self.logs = folder, logs or folder

    def log(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"

    def write(self, record: ProcessRecord) -> None:
        """Raises `OSError`."""
        path = self._path(record.worker)
        draft = path.with_suffix(".json.new")
        write_private(draft, json.dumps(asdict(record)))
        draft.replace(path)

    def remove(self, worker: str) -> None:
        self._path(worker).unlink(missing_ok=True)

    def clear(self, spared: Collection[str] = ()) -> None:
        """Remove all but those of these workers, whatever they say. Raises `OSError`."""
        for path in self._files():
            if path.stem not in spared:
                path.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[ProcessRecord]:
        """What is no record is removed. What cannot be read now (too many open files, a disk that fails) may well be
        one: its process must not be forgotten. Raises `OSError`.
        """
        for path in self._files():
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # the job has heard of the end meanwhile
                continue
            try:
                record = ProcessRecord.read(content)
            except (ValueError, TypeError, AttributeError) as error:
                log.warning("a worker's record is none", path=str(path), error=str(error))
                path.unlink(missing_ok=True)
                continue
            yield record

    def _files(self) -> list[Path]:
        try:  # not `Path.glob`, which may find nothing where a folder cannot be read
            return sorted(path for path in self.folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []

    def rotate(self, worker: str) -> bool:
        """Move what a large log holds to `WORKER.log.1` and empty it; whether it was large. Raises `OSError`.

        Its process writes by appending, so it goes on at the beginning. What it writes between the copy and the
        truncation is lost: a few lines of 64 MiB.
        """
        log = self.log(worker)
        if not log.exists() or log.stat().st_size < LOG_BYTES:
            return False
        draft = log.with_suffix(".log.new")
        try:
            with log.open("rb") as source, open(draft, "wb", opener=for_this_user) as copy:
                shutil.copyfileobj(source, copy)
            draft.replace(log.with_suffix(".log.1"))
        except OSError:  # no room for two: better an empty log than a full disk
            draft.unlink(missing_ok=True)
        os.truncate(log, 0)
        return True

    def note_end(self, ended: ProcessRecord) -> None:
        """Remember that a worker failed, for as long as its log is there. Raises `OSError`."""
        if ended.code is not None and ended.code not in ORDINARY_ENDS:
            write_private(self._mark(ended.worker), f"{ended.code}\n")

    def prune(self, others: Collection[str]) -> None:
        """Remove logs of workers that have ended: all but the last ones and those of workers that failed, and of these
        the oldest where they are too large together. `others`: workers whose logs are not looked at. Raises `OSError`.
        """
        ended = [(file.stat(), file) for file in self.logs.glob("*.log") if file.stem not in others]
        kept_bytes = 0
        for number, (stat, file) in enumerate(sorted(ended, key=lambda one: one[0].st_mtime, reverse=True)):
            before = file.with_suffix(".log.1")
            size = stat.st_size + (before.stat().st_size if before.exists() else 0)
            is_wanted = number < ENDED_LOGS or self._mark(file.stem).exists()
            if is_wanted and kept_bytes + size <= ENDED_LOG_BYTES:
                kept_bytes += size
                continue
            for one in (file, before, self._mark(file.stem)):
                one.unlink(missing_ok=True)

    def tail(self, record: ProcessRecord) -> str:
        """The last lines that the process wrote."""
        try:
            with self.log(record.worker).open("rb") as output:
                end = output.seek(0, 2)
                begin = record.log_offset if record.log_offset <= end else 0  # it was emptied meanwhile
                output.seek(max(begin, end - TAIL_BYTES))
                lines = output.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(the log cannot be read: {error})"
        return "\n".join(lines[-TAIL_LINES:])

    def _mark(self, worker: str) -> Path:
        """Stands for a failure."""
        return self.folder / f"{worker}.failed"

    def _path(self, worker: str) -> Path:
        return self.folder / f"{worker}.json"
