"""The etcd store, `etcd://…`: the `Store` protocol over `etcd/client.py`, every key below the URL's prefix.

Any number of controllers share it. It is checked before use: what waiting cannot mend (a version, a password, a missing
right) is a `UserError`; a cluster that cannot be reached, or is full, is logged once and waited for.

`EtcdUrl` is `etcd://[USER@]HOST:PORT[,HOST:PORT…]/PREFIX`. `ps`, logs and errors show it, so a password in it is
refused and not repeated; `EtcdAccess` has the password and the certificates.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from pydantic import SecretStr
from shoal_protos.addresses import is_connectable
from shoal_protos.errors import StoreError, UserError
from shoal_protos.pem import read_pem

from shoal_controller.etcd import errors
from shoal_controller.etcd.client import EtcdClient, delete, modified_at, put
from shoal_controller.etcd.cluster import Login
from shoal_controller.etcd.endpoint import Tls
from shoal_controller.etcd.etcd_pb2 import Event, KeyValue
from shoal_controller.etcd.watching import Revision as EtcdRevision
from shoal_controller.process.renewed_files import RenewedFiles, load_pair
from shoal_controller.process.tasks import Endable, end_task, guarded, only_logged
from shoal_controller.store.store import (
    Change,
    Changes,
    Compacted,
    Compare,
    Entry,
    Lease,
    LeaseGone,
    Listing,
    Operation,
    Outcome,
    Put,
    Revision,
    Timed,
    UnknownOutcome,
    check_key,
    check_transaction,
    timing,
)

OLDEST_VERSION = (3, 4)
"""Of etcd: it splits large watch responses, which 3.3 does not."""

PAUSE_SECONDS = 1.0
"""Before a cluster that cannot be reached is asked again."""

RENEWED_SECONDS = 30.0
"""How often it is looked whether certificates were renewed."""

log = structlog.get_logger("shoal.store")


class EtcdStore:
    """One prefix of one cluster. Made by `open`, ended by `close`."""

    def __init__(self, client: EtcdClient, url: EtcdUrl, timed: Timed | None) -> None:
        self._client = client
        self._url = url
        self._timed = timed
        self._unreachable: set[str] = set()
        """Endpoints of which that has been said."""
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: EtcdUrl, access: EtcdAccess, timed: Timed | None = None) -> EtcdStore:
        """Returns once it can be read and written. A `UserError` says why it never will be."""
        files = _files(access)
        client = EtcdClient(url.addresses, files.made if files is not None else None, _login(url, access))
        store = cls(client, url, timed)
        if files is not None:
            store._renewing = guarded("certificates of the store", store._renew(files), only_logged)
        try:
            await store._reach()
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._translated("get"):
            _, found = await self._client.range(self._name(key), b"", 1)
        return self._entry(found[0]) if found else None

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Listing:
        check_key(prefix)
        first = self._name(prefix) if after < prefix else self._name(after) + b"\0"
        with self._translated("list"):
            revision, found = await self._client.range(first, self._end_of(prefix), limit)
        return Listing(revision, tuple(map(self._entry, found)))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        check_transaction(compares, operations)
        guards = [modified_at(self._name(one.key), one.modified) for one in compares]
        writes = [
            put(self._name(one.key), one.value, one.lease) if isinstance(one, Put) else delete(self._name(one.key))
            for one in operations
        ]
        leases = [one.lease for one in operations if isinstance(one, Put) and one.lease]
        with self._translated("transact"):
            try:
                answer = await self._client.transact(guards, writes)
            except errors.LeaseNotFound:
                raise LeaseGone(leases[0]) from None
        return Outcome(answer.succeeded, answer.header.revision)

    @asynccontextmanager
    async def lease(self, seconds: float) -> AsyncIterator[Lease]:
        with self._translated("grant"):
            context = self._client.lease(seconds)
            granted = await context.__aenter__()
        try:
            yield granted
        finally:
            await context.__aexit__(None, None, None)

    @asynccontextmanager
    async def watch(self, prefix: str, after: Revision) -> AsyncIterator[AsyncIterator[Changes]]:
        check_key(prefix)
        with self._translated("watch", after):
            context = self._client.watch(self._name(prefix), self._end_of(prefix), after)
            revisions = await context.__aenter__()
        try:
            changes = Endable(self._changes(revisions, after))
            try:
                yield changes
            finally:
                await changes.end()
        finally:
            await context.__aexit__(None, None, None)

    async def close(self) -> None:
        if self._renewing is not None:
            await end_task(self._renewing)
        await self._client.close()

    async def _renew(self, files: RenewedFiles[Tls]) -> None:
        """● A certificate counts for new connections: whoever showed the old one for ever would be refused on the first
        day after its last, when the connection breaks that was made with it.
        """
        while True:
            await asyncio.sleep(RENEWED_SECONDS)
            if (tls := files.newer()) is not None:
                self._client.renew(tls)

    # ---- inside

    async def _changes(self, revisions: AsyncIterator[EtcdRevision], after: Revision) -> AsyncGenerator[Changes]:
        with self._translated("", after):
            async for one in revisions:
                changes = (self._change(event) for event in one.events)
                yield Changes(one.revision, tuple(sorted(changes, key=lambda change: change.key)))

    def _name(self, key: str) -> bytes:
        return f"{self._url.prefix}{key}".encode("ascii")

    def _end_of(self, prefix: str) -> bytes:
        """The first key beyond all keys that begin with `prefix` (they are printable ASCII)."""
        return self._name(prefix) + b"\x7f"

    def _key(self, name: bytes) -> str:
        return name.decode("ascii").removeprefix(self._url.prefix)

    def _entry(self, found: KeyValue) -> Entry:
        return Entry(self._key(found.key), found.value, found.create_revision, found.mod_revision, found.lease)

    def _change(self, event: Event) -> Change:
        return Change(self._key(event.kv.key), event.kv.value if event.type == Event.PUT else None)

    @contextmanager
    def _translated(self, kind: str, after: Revision = 0) -> Iterator[None]:
        """Time it where it has a kind, and raise what is wrong as the store's errors."""
        try:
            with timing(kind, self._timed):
                yield
        except errors.UnknownOutcome as error:
            raise UnknownOutcome(f"the store {self._url} did not answer: {error}") from error
        except errors.Compacted as error:
            raise Compacted(after, error.oldest) from error
        except errors.Closed as error:
            raise StoreError(f"the store {self._url} is closed") from error
        except errors.EtcdError as error:
            raise StoreError(f"the store {self._url} cannot be read or written: {error}") from error

    # ---- before it is used

    async def _reach(self) -> None:
        waiting = False
        while True:
            try:
                return await self._look()
            except errors.EtcdError as error:
                if isinstance(error, errors.Rejected) and not isinstance(error, errors.Exhausted):
                    raise UserError(f"store {self._url}: {error}") from error
                if not waiting:
                    log.warning(f"the store {self._url} cannot be used yet, waiting for it", error=str(error))
                waiting = True
                await asyncio.sleep(PAUSE_SECONDS)

    async def _look(self) -> None:
        """Raises `Rejected` for what no waiting mends, another `EtcdError` where it cannot be told yet."""
        versions = await self._client.versions()
        for address, version in versions.items():
            if isinstance(version, str):
                _check_version(address, version)
            elif isinstance(version, errors.Rejected):
                raise version
        absent = {address: str(why) for address, why in versions.items() if not isinstance(why, str)}
        if len(absent) == len(versions):
            raise errors.Unavailable("; ".join(absent.values()))
        for address, why in absent.items():
            if address not in self._unreachable:
                log.warning("an endpoint of the store cannot be reached, going on with the others", error=why)
            self._unreachable.add(address)
        await self._check_rights()

    async def _check_rights(self) -> None:
        """Read below the prefix, and try what could write there but never does."""
        key = self._name("/rights")
        try:
            await self._client.range(self._name("/"), self._end_of("/"), 1)
            await self._client.transact([modified_at(key, -1)], [put(key, b"")])
        except errors.Denied as error:
            if "permission denied" not in str(error):
                raise
            raise errors.Denied(
                f"{error}; the user needs a role that may read and write all keys with the prefix {self._url.prefix}/"
            ) from error


def _check_version(address: str, version: str) -> None:
    parts = version.split(".")[:2]
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise errors.Rejected(f"etcd at {address} has version {version!r}; expected {oldest} or newer")


def _files(access: EtcdAccess) -> RenewedFiles[Tls] | None:
    """None: no TLS."""
    if access.authorities is None:
        if access.certificate or access.key:
            raise UserError(
                "SHOAL_ETCD_CERTIFICATE and SHOAL_ETCD_KEY need SHOAL_ETCD_CA, the authorities of the servers"
            )
        return None
    if (access.certificate is None) != (access.key is None):
        raise UserError("SHOAL_ETCD_CERTIFICATE and SHOAL_ETCD_KEY go together; only one of them is set")
    named = (access.authorities, access.certificate, access.key)
    return RenewedFiles([file for file in named if file is not None], partial(_tls, access, access.authorities))


def _tls(access: EtcdAccess, authorities_file: Path) -> Tls:
    authorities = read_pem("SHOAL_ETCD_CA", authorities_file)
    if access.certificate is None or access.key is None:
        return Tls(authorities)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # gRPC would take any pair, and say nothing
    load_pair(context, ("SHOAL_ETCD_CERTIFICATE", access.certificate), ("SHOAL_ETCD_KEY", access.key))
    return Tls(authorities, access.certificate.read_bytes(), access.key.read_bytes())


def _login(url: EtcdUrl, access: EtcdAccess) -> Login | None:
    if bool(url.user) != bool(access.password):
        missing = "SHOAL_ETCD_PASSWORD is not set" if url.user else "the URL names no user, though there is a password"
        raise UserError(f"store {url}: {missing}; a user needs both")
    return Login(url.user, access.password.get_secret_value()) if access.password else None


FORM = "etcd://[USER@]HOST:PORT,HOST:PORT/PREFIX"
PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
LONGEST_PREFIX = 128


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """A cluster, as whom it is asked, and the prefix of all keys."""

    addresses: tuple[str, ...]
    user: str
    """Empty: nobody in particular."""
    prefix: str

    def __str__(self) -> str:
        return f"etcd://{','.join(self.addresses)}{self.prefix}"


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """`SHOAL_ETCD_…`: files and the password with which etcd is asked."""

    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    password: SecretStr | None = None


def parsed_etcd_url(url: str) -> EtcdUrl:
    """Raises `UserError` with what is wrong."""
    rest, _, query = url.removeprefix("etcd://").partition("?")
    if query:
        raise UserError("the store's URL has a query (what comes after its `?`), which means nothing; leave it out")
    user, separator, place = rest.rpartition("@")
    if ":" in user:
        raise UserError("the store's URL has a password in it, where everybody can read it; set SHOAL_ETCD_PASSWORD")
    if separator and not user:
        raise UserError(f"store etcd://@{place} has an empty user; expected {FORM}")
    hosts, _, path = place.partition("/")
    prefix = f"/{path}"
    shown = f"store etcd://{place}"
    addresses = tuple(hosts.split(","))
    for address in addresses:
        if not is_connectable(address):
            raise UserError(f"{shown}: {address!r} is not a valid address (expected HOST:PORT); expected {FORM}")
    if not PREFIX.fullmatch(prefix) or len(prefix) > LONGEST_PREFIX:
        raise UserError(
            f"{shown}: {prefix!r} is not a valid prefix of keys; expected a path such as /shoal, of at most "
            f"{LONGEST_PREFIX} letters, digits, '.', '_', '-' and '/', without an empty part"
        )
    return EtcdUrl(addresses, user, prefix)
