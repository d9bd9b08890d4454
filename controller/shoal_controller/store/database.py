"""The embedded store's tables: revisioned keys in SQLite, each method one transaction. Blocking; one thread calls it.

`keys` is what is, `history` what changed (for watches), `facts` three numbers. Write-ahead log and
`synchronous=FULL`: what a method has returned from survives kill -9 and a power cut. Nothing asynchronous comes in.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from shoal_protos.errors import StoreError, UserError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

from shoal_controller.store.store import (
    Change,
    Changes,
    Compacted,
    Compare,
    Delete,
    Entry,
    LeaseGone,
    LeaseId,
    Listing,
    Operation,
    Outcome,
    Put,
    Revision,
)

FORMAT = 1
"""`user_version` of the files that this code reads and writes."""

SHOAL = 0x53484F41
"""`application_id`: tells a Shoal store from any other SQLite file."""

LOG_BYTES = 4 << 20
"""Size of the write-ahead log's file, once it has been carried over."""

HISTORY_REVISIONS = 256
"""At least so many past revisions are kept for watches, at most twice as many."""

TABLES = """
CREATE TABLE keys (key TEXT PRIMARY KEY, value BLOB NOT NULL, created INTEGER NOT NULL, modified INTEGER NOT NULL,
                   lease INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX keys_of_lease ON keys (lease) WHERE lease != 0;
CREATE TABLE history (revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, PRIMARY KEY (revision, key))
                     WITHOUT ROWID;
CREATE TABLE leases (lease INTEGER PRIMARY KEY, seconds REAL NOT NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO facts VALUES ('revision', 0), ('compacted', 0), ('leases', 0);
"""


class Database:
    """Every method either returns, and then it is durable, or raises `StoreError`, and then nothing has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # a job's env may hold secrets
        with self._translated():
            self._sql = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            try:
                self._prepare()
                self._files = self._places()
            except BaseException:
                self._sql.close()
                raise

    def _prepare(self) -> None:
        tables = self._number("PRAGMA schema_version")
        if tables:
            _check_marks(self._sql, self.path)
        if not self._number("PRAGMA auto_vacuum"):
            self._sql.execute("PRAGMA auto_vacuum=FULL")  # what a transaction frees goes back to the disk
            self._sql.execute("VACUUM")  # or it would not count where there are tables
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute(f"PRAGMA journal_size_limit={LOG_BYTES}")
        self._sql.execute("PRAGMA synchronous=FULL")
        if not tables:
            marks = f"PRAGMA application_id={SHOAL}; PRAGMA user_version={FORMAT};"
            self._sql.executescript(f"BEGIN IMMEDIATE; {TABLES} {marks} COMMIT;")
        self._fact("revision")  # now the write-ahead log is there

    def _places(self) -> dict[Path, os.stat_result | None]:
        """The files that are written to, as they lie there now. SQLite goes on with what is deleted beneath it."""
        return {path: _stat(path) for path in (self.path, self.path.with_name(f"{self.path.name}-wal"))}

    def _check_files(self) -> None:
        for path, now in self._places().items():
            then = self._files[path]
            if then is not None and (now is None or not os.path.samestat(now, then)):
                raise StoreError(
                    f"the store's file {path} was {'deleted' if now is None else 'replaced'} while it is in use, and "
                    "what is written now would be lost. Put it back, or stop this controller (workers train on) and "
                    "restore the store"
                )

    def close(self) -> None:
        with self._translated():
            self._sql.close()

    # ---- reading

    def get(self, key: str) -> Entry | None:
        with self._reading():
            row = self._sql.execute("SELECT key, value, created, modified, lease FROM keys WHERE key = ?", (key,))
            found = row.fetchone()
        return None if found is None else Entry(*found)

    def list(self, prefix: str, after: str, limit: int) -> Listing:
        query = (
            "SELECT key, value, created, modified, lease FROM keys WHERE key >= ? AND key < ? AND key > ? "
            "ORDER BY key LIMIT ?"
        )
        with self._reading():
            rows = self._sql.execute(query, (prefix, end_of(prefix), after, limit or -1)).fetchall()
            return Listing(self._fact("revision"), tuple(Entry(*row) for row in rows))

    def changes(self, prefix: str, after: Revision, limit: int) -> tuple[tuple[Changes, ...], Revision]:
        """The changes of the next `limit` revisions under the prefix, and the revision up to which that is all."""
        query = (  # with names: of numbers, ?1, Python 3.12.1 warns
            "SELECT revision, key, value FROM history WHERE revision IN (SELECT DISTINCT revision FROM history "
            "WHERE revision > :after AND key >= :first AND key < :end ORDER BY revision LIMIT :limit) "
            "AND key >= :first AND key < :end "
            "ORDER BY revision, key"
        )
        with self._reading():
            if after < (compacted := self._fact("compacted")):
                raise Compacted(after, compacted)
            within = {"after": after, "first": prefix, "end": end_of(prefix), "limit": limit}
            rows = self._sql.execute(query, within).fetchall()
            revision = self._fact("revision")
        grouped: dict[Revision, list[Change]] = {}
        for at, key, value in rows:
            grouped.setdefault(at, []).append(Change(key, value))
        found = tuple(Changes(at, tuple(changes)) for at, changes in grouped.items())
        return found, (found[-1].revision if len(found) == limit else max(after, revision))

    def leases(self) -> tuple[LeaseId, ...]:
        with self._reading():
            return tuple(lease for (lease,) in self._sql.execute("SELECT lease FROM leases").fetchall())

    # ---- writing

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        with self._writing():
            revision = self._fact("revision")
            if not all(self._modified(compare.key) == compare.modified for compare in compares):
                return Outcome(False, revision)
            leases = {operation.lease for operation in operations if isinstance(operation, Put) and operation.lease}
            for lease in leases:
                self._check_lease(lease)
            return Outcome(True, self._write(revision, operations))

    def grant(self, seconds: float) -> LeaseId:
        with self._writing():
            lease = self._fact("leases") + 1
            self._set_fact("leases", lease)
            self._sql.execute("INSERT INTO leases VALUES (?, ?)", (lease, seconds))
            return lease

    def revoke(self, lease: LeaseId) -> Revision:
        """Ends the lease, deletes its keys, returns the store's revision."""
        with self._writing():
            self._sql.execute("DELETE FROM leases WHERE lease = ?", (lease,))
            keys = self._sql.execute("SELECT key FROM keys WHERE lease = ?", (lease,)).fetchall()
            return self._write(self._fact("revision"), [Delete(key) for (key,) in keys])

    # ---- within a transaction

    def _write(self, revision: Revision, operations: Sequence[Operation]) -> Revision:
        """Carries the operations out at the next revision; nothing to change takes no revision."""
        effective = [
            operation for operation in operations if isinstance(operation, Put) or self._modified(operation.key)
        ]
        if not effective:
            return revision
        revision += 1
        for operation in effective:
            value = operation.value if isinstance(operation, Put) else None
            self._sql.execute("INSERT INTO history VALUES (?, ?, ?)", (revision, operation.key, value))
            if isinstance(operation, Put):
                self._sql.execute(
                    "INSERT INTO keys VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE "
                    "SET value = excluded.value, modified = excluded.modified, lease = excluded.lease",
                    (operation.key, operation.value, revision, revision, operation.lease),
                )
            else:
                self._sql.execute("DELETE FROM keys WHERE key = ?", (operation.key,))
        self._set_fact("revision", revision)
        if revision - self._fact("compacted") >= 2 * HISTORY_REVISIONS:
            self._compact(revision - HISTORY_REVISIONS)
        return revision

    def _compact(self, revision: Revision) -> None:
        if revision > self._fact("compacted"):
            self._sql.execute("DELETE FROM history WHERE revision <= ?", (revision,))
            self._set_fact("compacted", revision)

    def _check_lease(self, lease: LeaseId) -> None:
        if self._sql.execute("SELECT 1 FROM leases WHERE lease = ?", (lease,)).fetchone() is None:
            raise LeaseGone(lease)

    def _modified(self, key: str) -> Revision:
        row = self._sql.execute("SELECT modified FROM keys WHERE key = ?", (key,)).fetchone()
        return int(row[0]) if row else 0

    def _fact(self, name: str) -> int:
        return int(self._sql.execute("SELECT number FROM facts WHERE name = ?", (name,)).fetchone()[0])

    def _set_fact(self, name: str, number: int) -> None:
        self._sql.execute("UPDATE facts SET number = ? WHERE name = ?", (number, name))

    def _number(self, query: str) -> int:
        return int(self._sql.execute(query).fetchone()[0])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._transaction("BEGIN"):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._transaction("BEGIN IMMEDIATE"):
            yield
            self._check_files()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._translated():
            self._sql.execute(begin)
            try:
                yield
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the store {self.path} cannot be read or written: {error}") from error


def read_beside(path: Path) -> tuple[Entry, ...]:
    """All keys as they are at this moment, while another process may have the store. Raises `UserError` where there is
    none, and `StoreError`.
    """
    if not path.is_file():
        raise UserError(f"there is no store at {path.parent}: it has no {path.name}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as sql:
            _check_marks(sql, path)
            rows = sql.execute("SELECT key, value, created, modified, lease FROM keys ORDER BY key").fetchall()
            return tuple(Entry(*row) for row in rows)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the store {path} cannot be read: {error}") from error


def _check_marks(sql: sqlite3.Connection, path: Path) -> None:
    """Raises `StoreError` for a file of another program, or of a later format."""
    if sql.execute("PRAGMA application_id").fetchone()[0] != SHOAL:
        raise StoreError(f"{path} is a database of another program, not a Shoal store. Give another --store.")
    if (version := sql.execute("PRAGMA user_version").fetchone()[0]) > FORMAT:
        raise StoreError(
            f"the store {path} has format {version}, written by a newer shoal; this is {of_shoal(RELEASE)}, "
            f"which reads {FORMAT}. Install the newer release or give another --store."
        )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def end_of(prefix: str) -> str:
    """The first key beyond all keys that begin with `prefix` (keys are printable ASCII)."""
    return prefix + "\x7f"
