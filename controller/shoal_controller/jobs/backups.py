"""Backups of a store as one file, and their way back into an empty store, of either kind.

    {"shoal_backup": 1, "release": "0.1.0", "records": 6, "time": …, "tokens": false}
    {"key": "/jobs/train", "value": "…base64…"}
    {"keys": 17}

The file is gzip of such lines. It has all keys of one revision but those of a lease, of the election and of the secret
that controllers share, which the next ones make anew, and without `tokens` those of named tokens. `/restoring` is in
the store until all of them are: no controller starts before. `cli/backups.py` calls this.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import re
import time
import zlib
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
from shoal_protos.errors import StoreError, UserError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal, shown

from shoal_controller.access.token_register import PREFIX as TOKENS
from shoal_controller.jobs.records import FORMAT as RECORDS
from shoal_controller.jobs.records import OLDEST_FORMAT as OLDEST_RECORDS
from shoal_controller.process.private_files import for_this_user
from shoal_controller.store.etcd_store import EtcdAccess
from shoal_controller.store.open import all_entries, open_store
from shoal_controller.store.store import (
    MAX_OPERATIONS,
    MAX_TRANSACTION_BYTES,
    Compare,
    Damaged,
    Delete,
    Entry,
    Put,
    Store,
)

VERSION = 1
"""Of the file's form."""
NOT_KEPT = ("/controllers/", "/forwarding", "/ready")
"""Prefixes of keys that the next controllers make for themselves."""
HEADS = "/jobs/"
RESTORING = "/restoring"
"""There from before the first key of a restore until after its last one. No controller starts on such a store."""
HALF = "a restore into this store is under way, or was interrupted: repeat it, or take another store"
LIMIT_SECONDS = 60.0
"""How long a store may take to answer at all."""
PAUSE_SECONDS = 1.0
"""Before a store that has failed is asked again."""
NAME = r"shoal-\d{8}T\d{6}Z\.gz"
"""Of a file in a folder, by the time of its backup."""
DRAFT = rf"\.{NAME}\.\d+\.new"
"""Of what a backup is written to first: one that was killed has left it."""
DRAFT_SECONDS = 3600.0
"""From this age on a draft is left over: a backup takes less."""
LATEST = 253_402_300_800.0
"""End of the year 9999, in seconds since the epoch: no backup is of a later time."""

T = TypeVar("T")

log = structlog.get_logger("shoal.store")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a backup has."""

    jobs: int
    tokens: int
    time: float
    """When it was taken, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Backup:
    """All keys of a backup, heads of jobs last."""

    head: dict[str, Any]
    keys: tuple[tuple[str, bytes], ...]

    @property
    def kept(self) -> Kept:
        jobs = sum(key.startswith(HEADS) for key, _ in self.keys)
        tokens = sum(key.startswith(TOKENS) for key, _ in self.keys)
        return Kept(jobs, tokens, float(self.head["time"]))


def backup_of(entries: Sequence[Entry], tokens: bool, now: float) -> Backup:
    """Return the backup of a store whose keys these are, all of one revision. `now`: seconds since the epoch. Raises
    `UserError` for a store that has not been restored wholly.
    """
    if any(one.key == RESTORING for one in entries):
        raise UserError(HALF)
    unwanted = (*NOT_KEPT, *(() if tokens else (TOKENS,)))
    kept = [(one.key, one.value) for one in entries if not one.lease and not one.key.startswith(unwanted)]
    head = {"shoal_backup": VERSION, "release": RELEASE, "records": RECORDS, "time": now, "tokens": tokens}
    return Backup(head, tuple(sorted(kept, key=lambda one: (one[0].startswith(HEADS), one[0]))))


def write_backup(backup: Backup, file: Path) -> None:
    """Write all of it or nothing, for this user alone. Raises `UserError` where the file is there or cannot be."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        if file.exists():
            raise UserError(f"{file} is there already; name another file, or remove it")
        try:
            with open(draft, "wb", opener=for_this_user) as opened:
                with gzip.GzipFile(fileobj=opened, mode="wb", filename="", mtime=0) as packed:
                    for line in _lines(backup):
                        packed.write(json.dumps(line).encode() + b"\n")
                opened.flush()
                os.fsync(opened.fileno())
            draft.rename(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the backup cannot be written to {file}: {error.strerror}") from error


def write_into_folder(backup: Backup, folder: Path, keep: int | None) -> Path:
    """Return the file that was written, named by the time. Of those that are so named the newest stay, `keep` of them
    with the new one (None: all), and no old draft does. Raises `UserError`.
    """
    file = folder / time.strftime("shoal-%Y%m%dT%H%M%SZ.gz", time.gmtime(backup.kept.time))
    write_backup(backup, file)
    try:
        there = sorted(folder.iterdir())
        others = [one for one in there if re.fullmatch(NAME, one.name) and one != file]
        drafts = [one for one in there if re.fullmatch(DRAFT, one.name)]
        before = time.time() - DRAFT_SECONDS
        unwanted = others[: len(others) + 1 - keep] if keep is not None and keep <= len(others) else []
        for old in [*unwanted, *(one for one in drafts if one.stat().st_mtime < before)]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{file} is written, but old backups beside it cannot be deleted: {error.strerror}") from error
    return file


def _lines(backup: Backup) -> Iterator[dict[str, Any]]:
    yield backup.head
    for key, value in backup.keys:
        yield {"key": key, "value": base64.b64encode(value).decode()}
    yield {"keys": len(backup.keys)}


def read_backup(file: Path) -> Backup:
    """Raises `UserError` for what is no whole backup, or one that this release cannot read."""
    try:
        with gzip.open(file, "rb") as packed:
            lines = (json.loads(line) for line in packed)
            head = next(lines, None)
            if not isinstance(head, dict) or "shoal_backup" not in head:
                raise UserError(f"{file} is no backup of Shoal; expected a file of `shoal backup`")
            _check_versions(head, file)
            *found, last = lines
            keys = tuple((str(one["key"]), base64.b64decode(one["value"], validate=True)) for one in found)
            if type(head["time"]) not in (int, float) or not 0 <= head["time"] < LATEST:
                raise ValueError(f"`time` is {shown(head['time'])}, not seconds since the epoch")
            if last != {"keys": len(keys)}:
                raise ValueError("lines are missing")
            return Backup(head, keys)
    except gzip.BadGzipFile as error:
        raise UserError(f"{file} is no backup of Shoal; expected a file of `shoal backup`") from error
    except OSError as error:
        raise UserError(f"the backup {file} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise UserError(f"{file} is no backup of Shoal: its JSON is nested too deeply") from error
    except (ValueError, TypeError, KeyError, EOFError, zlib.error) as error:
        raise UserError(f"the backup {file} is damaged ({error}); restore another one") from error


def _check_versions(head: dict[str, Any], file: Path) -> None:
    by = f"{file} was written by {of_shoal(str(head.get('release')))}"
    if head["shoal_backup"] != VERSION:
        raise UserError(
            f"{by} as a backup of version {head['shoal_backup']}; this is {of_shoal(RELEASE)}, which reads {VERSION}. "
            "Restore it with that release"
        )
    records = head.get("records")
    if type(records) is not int or not OLDEST_RECORDS <= records <= RECORDS:
        raise UserError(
            f"{by} with records of format {records}; this is {of_shoal(RELEASE)}, which reads {OLDEST_RECORDS} to "
            f"{RECORDS}. Restore it with that release"
        )


async def check_restored(store: Store, patient: bool) -> None:
    """For a controller that starts. Raises `UserError` for a store that has not been restored wholly. `patient`: a
    store that is away is waited for; else raises `StoreError`.
    """
    while True:
        try:
            if await store.get(RESTORING) is not None:
                raise UserError(HALF)
            return
        except Damaged:
            raise
        except StoreError as error:
            if not patient:
                raise
            log.warning("it is not known yet whether the store is whole", why=str(error))
            await asyncio.sleep(PAUSE_SECONDS)


async def take_backup(url: str, etcd: EtcdAccess, tokens: bool) -> Backup:
    """The backup of the store of a URL, as it is now, beside its controllers. Raises as `all_entries` does, and
    `UserError` for a store that does not answer, or that has not been restored wholly.
    """
    entries = await _in_time(url, all_entries(url, etcd))
    return backup_of(entries, tokens, time.time())


async def restore_into(url: str, etcd: EtcdAccess, backup: Backup) -> None:
    """`restore` into the store of a URL. Raises as `open_store` does, and `UserError` for one that does not answer."""
    store = await _in_time(url, open_store(url, None, etcd))
    try:
        await restore(store, backup)
    finally:
        await store.close()


async def _in_time(url: str, answer: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await answer
    except TimeoutError:
        raise UserError(f"the store {url} has not answered for {LIMIT_SECONDS:g} s") from None


async def restore(store: Store, backup: Backup) -> None:
    """Put it into an empty store. Raises `UserError` for one that is in use: nothing has changed. Where it was
    interrupted, the same restore goes on, unless another program has written to the store since.
    """
    there = {one.key: one for one in (await store.list("/")).entries}
    marked = there.pop(RESTORING, None)
    if marked is not None and marked.value != _mark(backup):
        raise UserError("another backup is being restored into this store; go on with that one, or take an empty store")
    restored = dict(backup.keys) if marked is not None else {}
    if foreign := next((key for key, one in there.items() if restored.get(key) != one.value), None):
        raise UserError(
            f"the store is in use: it has keys such as {foreign}; end its controllers, and restore into an empty store"
        )
    if marked is None:
        await store.transact([Compare(RESTORING)], [Put(RESTORING, _mark(backup))])
    marked = await store.get(RESTORING)
    if marked is None:
        raise StoreError("the store forgets what was written to it")
    for puts in _transactions(backup.keys):
        if not (await store.transact([Compare(RESTORING, marked.modified)], puts)).succeeded:
            raise StoreError("another restore into this store is under way; nothing more was written")
    await store.transact([Compare(RESTORING, marked.modified)], [Delete(RESTORING)])


def _mark(backup: Backup) -> bytes:
    return json.dumps(backup.head, sort_keys=True).encode()


def _transactions(keys: Sequence[tuple[str, bytes]]) -> Iterator[list[Put]]:
    """In the order of the backup, each as large as a store takes."""
    puts: list[Put] = []
    size = 0
    for key, value in keys:
        if puts and (len(puts) == MAX_OPERATIONS or size + len(value) > MAX_TRANSACTION_BYTES):
            yield puts
            puts, size = [], 0
        puts.append(Put(key, value))
        size += len(value)
    if puts:
        yield puts
