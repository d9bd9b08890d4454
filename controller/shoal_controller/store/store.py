"""The store protocol: what a controller must remember, as revisioned keys. Made for etcd's model, not SQLite's.

One revision per transaction, over the whole store. A key's `modified` is the revision that wrote it last; by comparing
it a controller notices that another one has written (fencing). Every implementation (`embedded.py`, `etcd_store.py`)
must pass `tests/unit/test_store_contract.py`; `open.py` picks one by its URL. Removing past changes is not here: in a
shared etcd that is its operator's business.

Helpers for any store: `made_once` gives all controllers the same random key, whose value is never logged because it may
be secret; `timing` reports how long each request took and whether it failed; `follow` keeps calling with all keys
below a prefix, also after the store has failed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import StoreError

Revision = int
"""Grows by one with every transaction that changes something; 0: the empty store."""

LeaseId = int
"""Names a lease; 0: none."""

MAX_VALUE_BYTES = 1 << 20
"""etcd refuses requests above 1.5 MiB; one value stays well below it."""

MAX_TRANSACTION_BYTES = 1 << 20
"""Most bytes of all values that a transaction writes."""

MAX_OPERATIONS = 128
"""etcd's own limit for one transaction."""


log = structlog.get_logger("shoal.store")


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it stands."""

    key: str
    value: bytes
    created: Revision
    modified: Revision
    lease: LeaseId = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries in the order of their keys, and the revision at which the list is true: watch from there."""

    revision: Revision
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """A transaction's condition: the key was last modified at this revision; 0: it does not exist."""

    key: str
    modified: Revision = 0


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: LeaseId = 0
    """The key goes when this lease does."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A key that does not exist is not an error."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a transaction: all of it or nothing."""

    succeeded: bool
    """False: a comparison did not hold, nothing was written."""
    revision: Revision
    """The store's revision afterwards."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key's change within a revision."""

    key: str
    value: bytes | None
    """None: deleted, or gone with its lease."""


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes of one revision under the watched prefix. A watch that broke goes on from `revision`."""

    revision: Revision
    changes: tuple[Change, ...]


class Lease(Protocol):
    """A lease that is kept alive within its context. Keys that are put with its id go when it does."""

    id: LeaseId
    seconds: float
    """What was granted, at least what was asked for: it lives so long after its last sign of life."""
    valid_until: float
    """By the event loop's clock, counted from before the store was asked: until then it surely lives. Whoever acts on
    the strength of it looks at the clock first, for this process may have been frozen.
    """
    lost: asyncio.Event
    """Set when it is over, or may be: it is not kept alive any longer."""


class Unfit(StoreError):
    """A request that no store can carry out, however often it is made. Nothing has changed."""


class Fenced(StoreError):
    """Another controller has written what one at a time may write. Nothing has changed."""


class Damaged(StoreError):
    """What lies in the store cannot be what was written there. No waiting mends it."""


class UnknownOutcome(StoreError):
    """The transaction was sent and not answered: it may have been carried out, or still be. Read to know."""

    problem_code = ErrorCode.OUTCOME_UNKNOWN


class Compacted(StoreError):
    """The watch asks for changes that the store no longer keeps."""

    def __init__(self, asked: Revision, oldest: Revision) -> None:
        super().__init__(
            f"the store no longer has the changes after revision {asked} (it keeps those after {oldest}). "
            "List the keys again and watch from the list's revision."
        )
        self.asked, self.oldest = asked, oldest


class LeaseGone(StoreError):
    """The lease has expired or was revoked; its keys are gone."""

    def __init__(self, lease: LeaseId) -> None:
        super().__init__(f"lease {lease} has expired or was revoked, and its keys with it. Ask for a new one.")


class NotLeading(StoreError):
    """This controller does not lead, and does what only a leader may do for nobody."""

    problem_code = ErrorCode.NOT_LEADING

    def __init__(self, sentence: str, leader: str = "") -> None:
        super().__init__(sentence)
        self.leader = leader
        """Where workers reach the one that leads; empty: not known."""


class Store(Protocol):
    """Every call ends: by its result or by a `StoreError`. After one that is not an `UnknownOutcome` surely nothing has
    happened."""

    async def get(self, key: str) -> Entry | None:
        """The key as it stands, None where it does not exist."""

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Listing:
        """The keys that begin with `prefix`, only those beyond the key `after`, at most `limit` (0: all). All as they
        were at one revision, however many pages a store makes of it."""

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """Carry out all operations, at least one, if every comparison holds. Durable when it returns. No key occurs
        twice."""

    def lease(self, seconds: float) -> AbstractAsyncContextManager[Lease]:
        """A new lease, kept alive within the context; at its end it is revoked, and its keys go. One that is lost goes
        by itself, in the store's own time."""

    def watch(self, prefix: str, after: Revision) -> AbstractAsyncContextManager[AsyncIterator[Changes]]:
        """All changes after that revision, one item per revision, in order, none missed, none twice; then those to
        come. It is established when the context is entered, and waits while the store is away. Iterating raises
        `Compacted` where the store no longer has them, or was restored from a backup, `StoreError` when the store
        closes; it ends with the context, also for whoever else reads from it."""

    async def close(self) -> None:
        """End watches and leases, and free what the store holds. Keys of leases go when their time is over."""


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Raises `Unfit` for what no store can carry out. Every implementation calls it first."""
    if not operations:
        raise Unfit("a transaction without operations changes nothing; read instead")
    written = [operation.key for operation in operations]
    for key in [*written, *(compare.key for compare in compares)]:
        check_key(key)
    if len(set(written)) != len(written):
        twice = next(key for key in written if written.count(key) > 1)
        raise Unfit(f"a transaction writes the key {twice} twice; once is allowed")
    if max(len(operations), len(compares)) > MAX_OPERATIONS:
        raise Unfit(
            f"a transaction has {len(operations)} operations and {len(compares)} comparisons; "
            f"at most {MAX_OPERATIONS} of each are allowed"
        )
    size = sum(len(operation.value) for operation in operations if isinstance(operation, Put))
    if size > MAX_TRANSACTION_BYTES:
        raise Unfit(f"a transaction writes {size} bytes; at most {MAX_TRANSACTION_BYTES} are allowed")
    for operation in operations:
        if isinstance(operation, Put) and len(operation.value) > MAX_VALUE_BYTES:
            raise Unfit(
                f"the value of {operation.key} has {len(operation.value)} bytes; at most {MAX_VALUE_BYTES} are allowed"
            )


def check_key(key: str) -> None:
    """Raises `Unfit` unless the key is a path of printable ASCII, so that every store orders keys alike."""
    if not key.startswith("/") or not key.isascii() or not key.isprintable() or len(key) > 512:
        raise Unfit(f"{key!r} is not a valid key; keys begin with / and are at most 512 printable ASCII characters")


async def made_once(store: Store, key: str, size: int) -> str:
    """The key's value, so many random bytes in hexadecimal digits. Raises `StoreError`; `Damaged` where no waiting
    helps.
    """
    await store.transact([Compare(key)], [Put(key, secrets.token_hex(size).encode())])
    found = await store.get(key)
    if found is None:
        raise Damaged(f"the store has no {key} though it was just written; it loses what it is given")
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * size), found.value):
        raise Damaged(
            f"the store's {key} is damaged ({len(found.value)} bytes; expected {2 * size} hexadecimal digits); restore "
            "the store from a backup"
        )
    return found.value.decode()


Timed = Callable[[str, float, bool], None]
"""Called with the kind of each request, the seconds that it took, and whether it failed."""


@contextmanager
def timing(kind: str, timed: Timed | None) -> Iterator[None]:
    """Times what is done within it, where anybody wants to know and it has a kind. Being cancelled is no failure."""
    began, failed = time.perf_counter(), False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        if timed is not None and kind:
            timed(kind, time.perf_counter() - began, failed)


PAUSE_SECONDS = 1.0
"""Between two attempts to watch a store that fails."""


async def follow(store: Store, prefix: str, found: Callable[[Mapping[str, bytes]], None]) -> None:
    """Call `found` with all keys below the prefix and their values: at once, and after every change. For ever."""
    while True:
        try:
            listing = await store.list(prefix)
            entries = {entry.key: entry.value for entry in listing.entries}
            found(entries)
            async with store.watch(prefix, listing.revision) as watch:
                async for changes in watch:
                    for change in changes.changes:
                        entries.pop(change.key, None)
                        if change.value is not None:
                            entries[change.key] = change.value
                    found(entries)
        except Compacted:
            continue
        except StoreError as error:
            log.warning("changes in the store are not heard of", prefix=prefix, error=str(error))
            await asyncio.sleep(PAUSE_SECONDS)
