"""The end of a worker's log, read from this machine's disk. ● Nothing but logs of local workers of that job is read.

A worker's record says where its log is; that is believed only where it is a plain file in the job's own folder, among
the controller's data or where it was told to keep logs (`--log-dir`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shoal_protos.errors import NotFound

from shoal_controller.core.machine.spec import WorkerView

LOG_BYTES, MOST_LOG_BYTES = 16 << 10, 64 << 10
"""What is read where nobody says otherwise, and at most."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log."""

    path: str
    size: int
    begin: int
    text: str


def read_log(folders: Collection[Path], worker: WorkerView, count: int) -> LogTail:
    """Its last `count` bytes; where that cuts a character, from the next one on. Raises `NotFound`.

    `folders`: those of its job, where logs may be.
    """
    path = _path_of(folders, worker)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NotFound(f"the log of {worker.worker} at {path} is not a plain file")
            begin = max(0, status.st_size - count)
            file.seek(begin)
            data = file.read(count)
    except OSError as error:
        raise NotFound(f"the log of {worker.worker} at {path} cannot be read: {error.strerror}") from error
    cut = _bytes_of_a_cut_character(data) if begin else 0
    return LogTail(str(path), status.st_size, begin + cut, data[cut:].decode(errors="replace"))


def log_folders(data: Path | None, logs: Path | None, job: str) -> list[Path]:
    """Where logs of a job's local workers may be, `data` and `logs` being the controller's folders."""
    return [*([data / "jobs" / job] if data is not None else []), *([logs / job] if logs is not None else [])]


def _path_of(folders: Collection[Path], worker: WorkerView) -> Path:
    if worker.pod:
        raise NotFound(f"{worker.worker} runs in the pod {worker.pod}, which has its log: kubectl logs {worker.pod}")
    if not worker.log:
        raise NotFound(f"{worker.worker} was not started by this controller: its log is where it was started")
    path = Path(worker.log)
    if path.parent not in folders:
        raise NotFound(f"the log of {worker.worker} is {path} on {worker.host or 'its host'}, not on this machine")
    return path


def _bytes_of_a_cut_character(data: bytes) -> int:
    """How many bytes at the beginning are the rest of a character of UTF-8."""
    return next((at for at, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
