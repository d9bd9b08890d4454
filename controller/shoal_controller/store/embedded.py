"""The embedded store, `embedded:DIR`: SQLite behind the `Store` protocol, for one controller on one machine.

All work with files is done in one thread of its own (`database.py`), so the event loop never waits for a disk. A lock
on `DIR/lock` keeps a second controller out; it goes with the process, however that ends. So do leases: those that lie
there when the store is opened are over.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

import structlog
from shoal_protos.errors import StoreError
from shoal_protos.living_runs import LOCK

from shoal_controller.process.private_files import for_this_user, make_private_folder
from shoal_controller.process.tasks import Endable, end_task, guarded
from shoal_controller.store.database import Database
from shoal_controller.store.store import (
    Changes,
    Compare,
    Entry,
    Lease,
    LeaseId,
    Listing,
    Operation,
    Outcome,
    Revision,
    Timed,
    UnknownOutcome,
    check_key,
    check_transaction,
    timing,
)

FILE = "store.db"
"""In a store's folder."""

REQUEST_SECONDS = 10.0
"""How long a request may take before the disk counts as stuck."""

ABANDON_SECONDS = 1.0
"""How long the one who asked waits for the files of an opening that failed to be let go."""

SIGNS_OF_LIFE = 3
"""In the time of a lease."""

AGAIN_SECONDS = 1.0
"""After so long the end of a lease that could not be written is tried again."""

WATCH_REVISIONS = 64
"""How many revisions a watch reads at a time."""

Given = ParamSpec("Given")
Result = TypeVar("Result")
log = structlog.get_logger("shoal.store")


@dataclass(slots=True)
class HeldLease:
    """A lease of this process, which is the only one that has the store."""

    id: LeaseId
    seconds: float
    valid_until: float
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class EmbeddedStore:
    """One open store directory. Made by `open`, ended by `close`."""

    def __init__(self, directory: Path, lock: IO[str], timed: Timed | None) -> None:
        self.directory = directory
        self._lock = lock
        self._timed = timed
        self._thread = ThreadPoolExecutor(1, "shoal-store")
        self._loop = asyncio.get_running_loop()
        self._database: Database | None = None
        self._refusal: StoreError | None = None
        self._revision: Revision = 0
        self._news = asyncio.Event()
        self._expiry: dict[LeaseId, float] = {}
        self._held: dict[LeaseId, HeldLease] = {}
        self._granted = asyncio.Event()
        self._expirer: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, directory: Path, timed: Timed | None = None) -> EmbeddedStore:
        """Open or create it. A `StoreError` says who holds it or what is wrong with it."""
        store = cls(directory, _lock(directory), timed)
        try:
            await store._run("open", store._open)
        except BaseException:
            await store._abandon()
            raise
        store._expirer = guarded("store-leases", store._expire(), store._leases_failed)
        return store

    async def get(self, key: str) -> Entry | None:
        check_key(key)
        return await self._run("get", self._tables.get, key)

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Listing:
        check_key(prefix)
        return await self._run("list", self._tables.list, prefix, after, limit)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        check_transaction(compares, operations)
        return await self._run("transact", self._transact, compares, operations)

    @asynccontextmanager
    async def lease(self, seconds: float) -> AsyncIterator[Lease]:
        asked = self._loop.time()
        held = HeldLease(await self._run("grant", self._tables.grant, seconds), seconds, asked + seconds)
        self._held[held.id], self._expiry[held.id] = held, held.valid_until
        self._granted.set()
        keeping = guarded(f"lease {held.id}", self._keep(held), self._leases_failed)
        try:
            yield held
        finally:
            await end_task(keeping)
            if not held.lost.is_set():
                held.lost.set()
                held.valid_until = self._expiry[held.id] = min(held.valid_until, self._loop.time())
                await self._revoke(held.id)

    @asynccontextmanager
    async def watch(self, prefix: str, after: Revision) -> AsyncIterator[AsyncIterator[Changes]]:
        check_key(prefix)
        changes = Endable(self._changes(prefix, after))
        try:
            yield changes
        finally:
            await changes.end()

    async def close(self) -> None:
        if self._expirer is None:
            return
        await end_task(self._expirer)
        self._expirer = None
        try:
            if self._database is not None:
                await self._in_thread("close", self._database.close)
        finally:
            self._refuse(StoreError(f"the store {self.directory} is closed"))
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._lock.close()

    # ---- in the store's thread

    def _open(self) -> None:
        self._database = Database(self.directory / FILE)
        self._revision = self._database.list("/", "", 1).revision
        self._expiry = dict.fromkeys(self._database.leases(), self._loop.time())

    def _let_go(self) -> None:
        try:
            if self._database is not None:
                self._database.close()
        finally:
            self._lock.close()

    def _transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        outcome = self._tables.transact(compares, operations)
        self._loop.call_soon_threadsafe(self._advanced, outcome.revision)
        return outcome

    def _delete_lease(self, lease: LeaseId) -> None:
        self._loop.call_soon_threadsafe(self._advanced, self._tables.revoke(lease))

    # ---- in the event loop

    async def _abandon(self) -> None:
        """Of an opening that failed. One that was cancelled or took too long goes on in the thread, with the lock, and
        what it opens is closed there.
        """
        try:
            await asyncio.wait([self._loop.run_in_executor(self._thread, self._let_go)], timeout=ABANDON_SECONDS)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, kind: str, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """Do it in the store's thread, unless the store is closed or broken."""
        if self._refusal is not None:
            raise self._refusal
        return await self._in_thread(kind, lambda: work(*given, **named))

    async def _in_thread(self, kind: str, work: Callable[[], Result]) -> Result:
        with timing(kind, self._timed):
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    return await self._loop.run_in_executor(self._thread, work)
            except TimeoutError as error:
                raise UnknownOutcome(
                    f"the store {self.directory} did not answer within {REQUEST_SECONDS:g} s (request: {kind}); "
                    "is its disk stuck?"
                ) from error

    @property
    def _tables(self) -> Database:
        if self._refusal is not None or self._database is None:
            raise self._refusal or StoreError(f"the store {self.directory} is not open")
        return self._database

    def _refuse(self, error: StoreError) -> None:
        """From now on every request and watch gets this error."""
        self._refusal = self._refusal or error
        self._news.set()
        for held in self._held.values():
            held.lost.set()

    def _advanced(self, revision: Revision) -> None:
        """Wakes the watches; also for transactions whose caller has gone away meanwhile."""
        self._revision = max(self._revision, revision)
        self._news.set()
        self._news = asyncio.Event()

    async def _changes(self, prefix: str, after: Revision) -> AsyncGenerator[Changes]:
        while True:
            found, after = await self._run("watch", self._tables.changes, prefix, after, WATCH_REVISIONS)
            for changes in found:
                yield changes
            while self._revision <= after and self._refusal is None:
                await self._news.wait()

    async def _keep(self, held: HeldLease) -> None:
        """Signs of life, until the lease is over or this process was away for too long."""
        while not held.lost.is_set():
            await asyncio.sleep(held.seconds / SIGNS_OF_LIFE)
            if self._loop.time() >= held.valid_until:
                held.lost.set()
            else:
                held.valid_until = self._expiry[held.id] = self._loop.time() + held.seconds

    async def _revoke(self, lease: LeaseId) -> None:
        """End it; what the store does not take now is tried again."""
        if (held := self._held.get(lease)) is not None:
            held.lost.set()
        try:
            await self._run("revoke", self._delete_lease, lease)
        except StoreError as error:
            log.warning("a lease could not be ended yet", lease=lease, error=str(error))
            self._expiry[lease] = self._loop.time() + AGAIN_SECONDS
            self._granted.set()
        else:
            self._expiry.pop(lease, None)
            self._held.pop(lease, None)

    async def _expire(self) -> None:
        """Ends each lease when its time is up, for as long as the store is open."""
        while self._refusal is None:
            self._granted.clear()
            due = min(self._expiry.values(), default=None)
            if due is None:
                await self._granted.wait()
            elif (left := due - self._loop.time()) > 0:
                await _sleep_or(self._granted, left)
            else:
                lease = min(self._expiry, key=self._expiry.__getitem__)
                log.info("a lease has expired", lease=lease)
                await self._revoke(lease)

    def _leases_failed(self, error: BaseException) -> None:
        """Without it keys would outlive their leases: whoever relies on the store must hear of it."""
        self._refuse(StoreError(f"the store {self.directory} can no longer expire leases: {error}"))


async def _sleep_or(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _lock(directory: Path) -> IO[str]:
    """The exclusive hold on the directory, with this process's name in it."""
    try:
        make_private_folder(directory)
        lock = os.fdopen(for_this_user(str(directory / LOCK), os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")
    except FileExistsError as error:
        raise StoreError(
            f"the store {directory} cannot be opened: it is a file; expected a folder, which is made if need be."
        ) from error
    except OSError as error:
        raise StoreError(f"the store {directory} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "its name is not written yet"
        lock.close()
        raise StoreError(
            f"the store {directory} is held by another controller ({holder}); "
            "stop that one first or give another --store."
        ) from error
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on host {socket.gethostname()}")
    lock.flush()
    return lock
