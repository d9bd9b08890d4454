"""The file in which a worker keeps optimizer state: without a name, its space reserved before anything needs it.

It is private to one process and worth nothing after it (mirrors have theirs), so nothing is synced, and no later
process can find it: it has no name from its first moment on. Read and written at pages of `PAGE_BYTES`, past the
system's cache where the filesystem can do that: else the cache would take the memory that offload is to save.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from pathlib import Path

from shoal_protos.errors import ShoalError, UserError
from shoal_protos.runs import NO_BLOCKS, Runs, Span
from shoal_protos.training_log import get_logger

PAGE_BYTES = 4096
"""What direct reads and writes are aligned to, in the file and in memory."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""Filesystems that are no disk."""
KEY = "`zero_optimization.offload_optimizer.nvme_path`"
NO_ROOM = {
    errno.ENOSPC: ("has {left:,} bytes left", "make room"),
    errno.EDQUOT: ("has a quota that is used up", "have it raised"),
    errno.EFBIG: ("takes no file of that size from this process", "raise its limit (`ulimit -f`)"),
}
"""What the system says where a file cannot become larger: what is so of the folder, and what would help."""

Pages = tuple[Span, ...]
"""Pages of the file, in the order of what lies in them."""

log = get_logger("shoal.offload")
_opened: weakref.WeakSet[StateFile] = weakref.WeakSet()


class OffloadFailed(ShoalError):
    """The file of optimizer state cannot be read or written any more."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class StateFile:
    """One worker's. Any thread may read and write; the training thread alone takes pages and gives them back."""

    def __init__(self, folder: str, direct: bool = True) -> None:
        """Raises `UserError` for a folder that is none, or that nothing can be written to."""
        if not hasattr(os, "posix_fallocate"):
            raise UserError("optimizer state in files needs Linux: this system cannot reserve space for a file.")
        self.folder = folder
        self._fd = _nameless(folder)
        self._close = weakref.finalize(self, os.close, self._fd)
        _opened.add(self)
        self._pages, self._free = 0, NO_BLOCKS
        self.reserve(PAGE_BYTES)
        refusal = self._go_direct() if direct else "it was asked for"
        self.is_direct = not refusal
        _tell_of(folder, refusal)

    def _go_direct(self) -> str:
        """Past the system's cache from now on; returns why not, where it cannot be."""
        page = mmap.mmap(-1, PAGE_BYTES)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
            os.pwritev(self._fd, [page], 0)
            os.preadv(self._fd, [page], 0)
        except OSError as error:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return f"{folder_type(self.folder) or 'its filesystem'} takes no direct reads and writes: {error.strerror}"
        return "" if hasattr(os, "O_DIRECT") else "this system has no direct reads and writes"

    # ---- space

    @property
    def reserved_bytes(self) -> int:
        """What it takes on the disk."""
        return self._pages * PAGE_BYTES

    def reserve(self, count: int) -> None:
        """So many bytes in all, used and free. Raises `OffloadFailed` where the disk has no room for them."""
        missing = -(-count // PAGE_BYTES) - self._pages
        if missing <= 0:
            return
        try:
            os.posix_fallocate(self._fd, self._pages * PAGE_BYTES, missing * PAGE_BYTES)
        except OSError as error:
            raise self._no_room(missing * PAGE_BYTES, error) from error
        self._free |= Runs(((self._pages, self._pages + missing),))
        self._pages += missing

    def _no_room(self, missing: int, error: OSError) -> OffloadFailed:
        if error.errno not in NO_ROOM:
            return self._failure("extended", error)
        there = os.fstatvfs(self._fd)  # the folder may be gone by now; the file is not
        found, remedy = NO_ROOM[error.errno]
        return OffloadFailed(
            f"{self.folder} {found.format(left=there.f_bavail * there.f_frsize)}, and the optimizer state that this "
            f"worker is to keep there needs {missing:,} more; {remedy}, name another folder in {KEY}, or use more "
            "workers."
        )

    def take(self, count: int) -> Pages:
        """Pages for so many bytes: in one piece where there is one, of what is reserved where that is enough."""
        pages = -(-count // PAGE_BYTES)
        if pages > len(self._free):
            self.reserve((self._pages + pages - len(self._free)) * PAGE_BYTES)
        whole = next((start for start, stop in self._free.spans if stop - start >= pages), None)
        found = self._free.first(pages) if whole is None else Runs(((whole, whole + pages),))
        self._free -= found
        return found.spans

    def give_back(self, pages: Runs) -> None:
        """They may be taken again; the disk keeps them reserved."""
        self._free |= pages

    # ---- bytes

    def read(self, at: int, target: memoryview) -> None:
        """Fills the target, from byte `at` on. Raises `OffloadFailed`."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], at + done)
            except OSError as error:
                raise self._failure("read", error) from error
            if not count:
                raise OffloadFailed(f"the file of optimizer state in {self.folder} is cut short at byte {at + done}.")
            done += count

    def write(self, at: int, source: memoryview) -> None:
        """Writes all of it, from byte `at` on. Raises `OffloadFailed`."""
        done = 0
        while done < len(source):
            try:
                done += os.pwritev(self._fd, [source[done:]], at + done)
            except OSError as error:
                raise self._failure("written", error) from error

    def _failure(self, verb: str, error: OSError) -> OffloadFailed:
        return OffloadFailed(f"the file of optimizer state in {self.folder} cannot be {verb}: {error.strerror}.")

    def close(self) -> None:
        """Its space is the disk's again. Idempotent."""
        self._close()


def _nameless(folder: str) -> int:
    """The descriptor of a new file that has no name. Raises `UserError`."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="shoal-", buffering=0) as file:
            return os.dup(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{KEY} is {folder}, which is not a folder here; name one on a local disk.") from None
    except OSError as error:
        raise UserError(
            f"{KEY} is {folder}, where no file can be made: {error.strerror}; name a folder that workers may write to."
        ) from None


def _tell_of(folder: str, refusal: str) -> None:
    """What the user should know of the place."""
    kind = folder_type(folder)
    if kind in IN_MEMORY:
        log.warning("offload_to_memory", path=folder, filesystem=kind,
                    means=f"{folder} is no disk: its files take memory, and offload saves none")  # fmt: skip
    elif refusal:
        log.info("offload_buffered", path=folder, reason=refusal)


def folder_type(folder: str) -> str:
    """The filesystem's name, such as ext4; empty where the system does not say."""
    device = Path(folder).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    kinds = [mount.partition(" - ")[2].split()[0] for mount in mounts if mount.split()[2] == number]
    return kinds[-1] if kinds else ""


def let_go_of_files() -> None:
    """In a forked child (a data loader's worker): else it would keep the disk's space when its parent is killed."""
    for file in list(_opened):
        file.close()


os.register_at_fork(after_in_child=let_go_of_files)
