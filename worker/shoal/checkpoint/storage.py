"""Where checkpoints lie: a folder, or what fsspec knows by a URL (`s3://…`). Names are relative, with `/`.

Two kinds with one face. A folder is used through the operating system: files are created, never overwritten, flushed to
the disk, and read by ranges straight into the memory they are meant for. Everything else goes through fsspec, whose
libraries bring multi-part uploads. Every failure is one sentence (`StorageFailed`); what may pass is tried again, by
the driver or in retrying_storage.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shoal_protos.errors import ShoalError, UserError

from shoal.checkpoint.retrying_storage import RetryingStorage
from shoal.core.checkpoint_errors import StorageFailed, StorageFull, StrangeFile, TransientStorageFailure

Target = tuple[int, memoryview]
"""Where a range begins in the file, and the memory that it fills."""

WRITE_BYTES = 16 << 20
"""At once; a larger write would hold up others of the process for long."""
PAGE_BYTES = 4096
"""What is aligned to this, and as long, may go to a disk without a copy."""
MOST_BUFFERS = 512
"""Ranges that one call of the operating system fills."""
FETCH_BYTES = 256 << 20
"""What an object store's answers may take of memory before they are put in place."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LASTING = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EFBIG),
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE),
)
"""What the operating system says where the next try would fare alike."""
MISTAKES = (ArithmeticError, AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)
"""What a driver raises where it is used or configured wrongly."""


class Storage(Protocol):
    """A place for checkpoints. Raises `StorageFailed`, and `FileNotFoundError` where a file to be read is not there."""

    url: str

    def prepare(self) -> None:
        """Sees to it that the place is there and may be written."""

    def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        """Creates a file; returns its bytes. It is whole when this returns, and gone when it raises. `chunks`: `Chunks`
        where another try may go through them again.
        """

    def publish(self, name: str, content: bytes) -> None:
        """Creates a file that is whole or not there, whatever happens."""

    def read(self, name: str, most: int) -> bytes:
        """A whole file of at most so many bytes."""

    def read_ranges(self, name: str, targets: Sequence[Target]) -> None:
        """Fills all targets. Raises `EOFError` where the file is shorter."""

    def list(self, folder: str = "") -> dict[str, int | None]:
        """What lies directly in a folder: name → bytes, None for folders. Empty where the folder is not there."""

    def remove(self, name: str) -> None:
        """Nothing happens where it is not there."""

    def remove_folder(self, folder: str) -> None:
        """An empty one; one that is not empty stays."""


def open_storage(url: str) -> Storage:
    """The storage of a path or URL. Raises `UserError` where no such kind is known."""
    if url.startswith("file://"):
        return RetryingStorage(LocalStorage(Path(url.removeprefix("file://")).absolute()))
    if "://" not in url:
        return RetryingStorage(LocalStorage(Path(url).expanduser().absolute()))
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        kind = url.partition("://")[0]
        hint = 'install "shoal[s3]"' if kind in ("s3", "s3a") else "install its fsspec driver"
        raise UserError(f"{kind}:// needs a library that is not installed: {hint} ({error}).") from None
    except ValueError as error:
        raise UserError(f"{url} is not a path or URL for checkpoints: {error}.") from None
    storage = ObjectStorage(url.rstrip("/"), files, root)
    tries_again = getattr(files, "retries", 0)  # s3fs and gcsfs do
    return storage if tries_again else RetryingStorage(storage)


@contextmanager
def as_storage_error(doing: str, url: str) -> Iterator[None]:
    """Turn whatever a file system raises into a sentence; `FileNotFoundError` and `EOFError` pass."""
    try:
        yield
    except (FileNotFoundError, EOFError, ShoalError):
        raise
    except OSError as error:
        raise _kind_of(error)(f"cannot {doing} in {url}: {_meaning(error)}.") from error
    except Exception as error:  # an object store's library has its own tree of errors
        kind = StorageFailed if isinstance(error, MISTAKES) else TransientStorageFailure
        raise kind(f"cannot {doing} in {url}: {type(error).__name__}: {error}") from error


def _kind_of(error: OSError) -> type[StorageFailed]:
    if error.errno in NO_ROOM:
        return StorageFull
    lasting = error.errno in LASTING or isinstance(error, PermissionError | FileExistsError | NotADirectoryError)
    return StorageFailed if lasting else TransientStorageFailure


def _meaning(error: OSError) -> str:
    reason = (error.strerror or str(error)).rstrip(".")
    if error.errno in NO_ROOM:
        remedy = (
            "free some space, lower `shoal.checkpoint.keep` (there must be room for one more), or choose another place"
        )
        return f"{reason[0].lower()}{reason[1:]}; {remedy}"
    if error.errno == errno.EFBIG:
        return f"{reason[0].lower()}{reason[1:]}; raise the limit of file sizes (`ulimit -f`), or choose another place"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{reason[0].lower()}{reason[1:]}; give this user the right to write there, or choose another place"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file of that name is in the way; choose another place"
    return reason


class LocalStorage:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = str(root)

    def prepare(self) -> None:
        with as_storage_error("keep checkpoints", self.url):
            try:
                self._root.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # in /proc, or below a link to nowhere
                raise StorageFailed(f"cannot keep checkpoints in {self.url}: no folder can be made there.") from error
            if not os.access(self._root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        with as_storage_error(f"write {name}", self.url):
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                written = _write_past_the_cache(file, chunks)
                os.fsync(file)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
        return written

    def publish(self, name: str, content: bytes) -> None:
        path = self._root / name
        beside = f"{Path(name).parent}/.{path.name}.{secrets.token_hex(4)}"
        self.write(beside, [memoryview(content)])
        with as_storage_error(f"write {name}", self.url):
            try:
                (self._root / beside).rename(path)
            except OSError:
                (self._root / beside).unlink(missing_ok=True)
                raise
            for folder in (path.parent, self._root):
                _flush_folder(folder)

    def read(self, name: str, most: int) -> bytes:
        with as_storage_error(f"read {name}", self.url), self._opened(name) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise StrangeFile(f"{name} in {self.url} is larger than {most} bytes; it is not a file of Shoal.")
        return content

    def read_ranges(self, name: str, targets: Sequence[Target]) -> None:
        with as_storage_error(f"read {name}", self.url), self._opened(name) as file:
            for at, parts in _joined(targets):
                _read_all(file.fileno(), at, parts)

    def _opened(self, name: str) -> BinaryIO:
        """Open a plain file to read. Anything else could keep its reader waiting, or never end."""
        descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe's opens at once
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StrangeFile(f"{name} in {self.url} is not a plain file; it is not a file of Shoal.")
        return os.fdopen(descriptor, "rb")

    def list(self, folder: str = "") -> dict[str, int | None]:
        with as_storage_error("look for checkpoints", self.url):
            try:
                with os.scandir(self._root / folder) as entries:
                    return dict(filter(None, map(_with_size, entries)))
            except FileNotFoundError:
                return {}

    def remove(self, name: str) -> None:
        with as_storage_error(f"remove {name}", self.url):
            (self._root / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        with as_storage_error(f"remove {folder}", self.url):
            try:
                (self._root / folder).rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise


def _with_size(entry: os.DirEntry[str]) -> tuple[str, int | None] | None:
    """None where it is gone meanwhile, or a link to nothing: that says nothing of its neighbours."""
    try:
        return entry.name, None if entry.is_dir() else entry.stat().st_size
    except FileNotFoundError:
        return None


def _write_past_the_cache(file: int, chunks: Iterable[memoryview]) -> int:
    """Whole pages go to the disk without a copy in the page cache, which takes processor time, and the place of what
    training reads; the rest, and all of it where the file system cannot do that, as any file is written.
    """
    able, direct, written = True, False, 0
    for chunk in chunks:
        wanted = able and written % PAGE_BYTES == 0 and _is_whole_pages(chunk)
        if wanted != direct:
            able = _set_direct(file, wanted)
            direct = wanted and able
        try:
            written += _write_all(file, chunk)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            able = direct = False
            _set_direct(file, False)
            os.lseek(file, written, os.SEEK_SET)
            written += _write_all(file, chunk)
    return written


def _is_whole_pages(chunk: memoryview) -> bool:
    """In memory too."""
    if chunk.readonly or chunk.nbytes % PAGE_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(chunk)) % PAGE_BYTES == 0


def _set_direct(file: int, direct: bool) -> bool:
    """Whether the system, and the file's own, can."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)
    except OSError:
        return False
    return True


def _write_all(file: int, chunk: memoryview) -> int:
    left = chunk
    while left.nbytes:
        left = left[os.write(file, left[:WRITE_BYTES]) :]
    return chunk.nbytes


def _flush_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _joined(targets: Sequence[Target]) -> Iterator[tuple[int, list[memoryview]]]:
    """Ranges that follow each other in the file, as one read into several places."""
    begin, end, parts = 0, -1, list[memoryview]()
    for at, target in sorted(targets, key=lambda t: t[0]):
        if at != end or len(parts) == MOST_BUFFERS:
            if parts:
                yield begin, parts
            begin, parts = at, []
        parts.append(target)
        end = at + target.nbytes
    if parts:
        yield begin, parts


def _read_all(file: int, at: int, parts: list[memoryview]) -> None:
    while parts:
        count = os.preadv(file, parts, at)
        if not count:
            raise EOFError
        at += count
        while parts and count >= parts[0].nbytes:
            count -= parts.pop(0).nbytes
        if count:
            parts[0] = parts[0][count:]


class ObjectStorage:
    """Whatever fsspec knows; `files` is its file system, `root` the path in it."""

    def __init__(self, url: str, files: Any, root: str) -> None:
        self.url = url
        self._files, self._root = files, root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def prepare(self) -> None:
        self.list()

    def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        written = 0
        with as_storage_error(f"write {name}", self.url), self._bucket():
            file = self._files.open(self._path(name), "wb")
            try:
                for chunk in chunks:
                    for at in range(0, chunk.nbytes, WRITE_BYTES):
                        written += file.write(chunk[at : at + WRITE_BYTES])
                file.close()
            except BaseException:
                self._abandon(file, name)
                raise
        return written

    def _abandon(self, file: Any, name: str) -> None:
        """Gives up what was uploaded of a file, so that neither a half one appears nor its parts are paid for."""
        file.discard()
        if hasattr(file, "buffer"):
            file.closed = True  # fsspec's own files would upload the rest when they are closed
        else:
            self._files.rm_file(self._path(name))  # the kinds that write in place

    def publish(self, name: str, content: bytes) -> None:
        with as_storage_error(f"write {name}", self.url), self._bucket():
            self._files.pipe_file(self._path(name), content)

    def read(self, name: str, most: int) -> bytes:
        with as_storage_error(f"read {name}", self.url):
            content = bytes(self._files.cat_file(self._path(name), start=0, end=most + 1))
        if len(content) > most:
            raise StrangeFile(f"{name} in {self.url} is larger than {most} bytes; it is not a file of Shoal.")
        return content

    def read_ranges(self, name: str, targets: Sequence[Target]) -> None:
        batch: list[tuple[int, list[memoryview]]] = []
        for at, parts in _joined(targets):
            batch.append((at, parts))
            if sum(part.nbytes for _, some in batch for part in some) >= FETCH_BYTES:
                self._fetch(name, batch)
                batch = []
        if batch:
            self._fetch(name, batch)

    def _fetch(self, name: str, batch: list[tuple[int, list[memoryview]]]) -> None:
        starts = [at for at, _ in batch]
        stops = [at + sum(part.nbytes for part in parts) for at, parts in batch]
        with as_storage_error(f"read {name}", self.url):
            found = self._files.cat_ranges([self._path(name)] * len(batch), starts, stops, on_error="raise")
        for content, (at, parts) in zip(found, batch, strict=True):
            view, taken = memoryview(content), 0
            for part in parts:
                if taken + part.nbytes > view.nbytes:
                    raise EOFError(f"{name} ends before byte {at + taken + part.nbytes}")
                part[:] = view[taken : taken + part.nbytes]
                taken += part.nbytes

    def list(self, folder: str = "") -> dict[str, int | None]:
        path = self._path(folder)
        with as_storage_error("look for checkpoints", self.url), self._bucket():
            try:
                entries = self._files.ls(path, detail=True)
            except FileNotFoundError as error:
                if "specified bucket does not exist" in str(error):
                    raise
                return {}
        found = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries if entry["name"] != path}
        return {name: None if e["type"] == "directory" else int(e["size"]) for name, e in found.items() if name}

    def remove(self, name: str) -> None:
        with as_storage_error(f"remove {name}", self.url):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_folder(self, folder: str) -> None:
        """An object store has no folders; other kinds of fsspec may."""
        with as_storage_error(f"remove {folder}", self.url):
            if self._files.exists(self._path(folder)) and not self.list(folder):
                self._files.rmdir(self._path(folder))

    @contextmanager
    def _bucket(self) -> Iterator[None]:
        """Where writing or listing finds nothing, it is the bucket that is missing."""
        try:
            yield
        except FileNotFoundError as error:
            raise StorageFailed(f"{self.url} is not there: {error}. Create it, or choose another place.") from None
