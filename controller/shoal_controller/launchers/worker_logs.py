"""What workers print, as REST shows it: the end of a log, or all of it as it grows.

`WorkerLogs` is what the API asks (`api/log_routes.py`). `LogFiles` has the logs of this machine's workers: only plain
files in the job's own folder below the controller's data or below `--log-dir`; a path in a worker's record is not
trusted beyond that. Those of pods are in `kubernetes/pod_logs.py`.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from shoal_protos.errors import NotFound

from shoal_controller.core.machine.spec import WorkerView

PART_BYTES = 16 << 10
"""Most bytes of a part of a log."""
LOOK_SECONDS = 0.25
"""How often it is looked whether a file has grown."""

IsOver = Callable[[], bool]
"""Whether a worker prints nothing more."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log."""

    path: str
    text: str
    size: int | None
    """Bytes of all of it; None: not known."""
    begin: int | None
    """Where in it the text begins; None: not known, but not at its beginning."""

    @classmethod
    def cut(cls, path: str, data: bytes, begin: int, is_known: bool = True) -> Self:
        """`data` from byte `begin` on; where that cuts a character, from the next one on."""
        left = _bytes_of_a_cut_character(data) if begin or not is_known else 0
        text = data[left:].decode(errors="replace")
        return cls(path, text, begin + len(data) if is_known else None, begin + left if is_known else None)


class WorkerLogs(Protocol):
    """Logs of the workers of one kind of launcher."""

    async def read(self, job: str, worker: WorkerView, count: int) -> LogTail:
        """Return the last `count` bytes, 1 to 65,536, of a worker's log. Raises `NotFound`, and `PeerError` where
        the machine or cluster that has it does not answer.
        """

    async def stream(self, job: str, worker: WorkerView, is_over: IsOver | None) -> AsyncGenerator[bytes]:
        """Return the parts of a worker's log from its beginning; with `is_over`, what comes until then. Raises as
        `read` does, also later: the next part may not be there.
        """


class LogFiles:
    """`WorkerLogs` of local workers."""

    def __init__(self, data: Path | None, logs: Path | None) -> None:
        """The controller's folders; None: there is none."""
        self._data, self._logs = data, logs

    async def read(self, job: str, worker: WorkerView, count: int) -> LogTail:
        path = self._path_of(job, worker)

        def end() -> LogTail:
            with _opened(path, worker) as file:
                begin = max(0, os.fstat(file.fileno()).st_size - count)
                file.seek(begin)
                return LogTail.cut(str(path), file.read(count), begin)

        return await asyncio.to_thread(end)

    async def stream(self, job: str, worker: WorkerView, is_over: IsOver | None) -> AsyncGenerator[bytes]:
        path = self._path_of(job, worker)
        return _parts(await asyncio.to_thread(_opened, path, worker), is_over)

    def _path_of(self, job: str, worker: WorkerView) -> Path:
        if not worker.log:
            raise NotFound(f"{worker.worker} was not started by this controller: its log is where it was started")
        path = Path(worker.log)
        if path.parent not in self._folders(job):
            raise NotFound(f"the log of {worker.worker} is {path} on {worker.host or 'its host'}, not on this machine")
        return path

    def _folders(self, job: str) -> Sequence[Path]:
        below = (self._data / "jobs" if self._data is not None else None, self._logs)
        return [folder / job for folder in below if folder is not None]


def _opened(path: Path, worker: WorkerView) -> BinaryIO:
    """Raises `NotFound`."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise NotFound(f"the log of {worker.worker} at {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotFound(f"the log of {worker.worker} at {path} is not a plain file")
    return file


async def _parts(file: BinaryIO, is_over: IsOver | None) -> AsyncGenerator[bytes]:
    """A file that was emptied is read from its beginning."""
    with closing(file):
        while True:
            ends = is_over is None or is_over()  # asked before the read: what comes until then is read
            if _size(file) < file.tell():
                file.seek(0)
            while file.tell() < _size(file) and (part := await asyncio.to_thread(file.read, PART_BYTES)):
                yield part
            if ends:
                return
            await asyncio.sleep(LOOK_SECONDS)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _bytes_of_a_cut_character(data: bytes) -> int:
    """How many bytes at the beginning are the rest of a character of UTF-8."""
    return next((at for at, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
