"""A job's pages in the store: its head, its durable state, its event history. Only the shell reads and writes them.

    /jobs/NAME                   head: the spec, which events are kept, who wrote it last; in every transaction
    /durable/NAME                what the machine must remember
    /events/NAME/0000000000000042

Every transaction is guarded by the revision at which this controller wrote the head last. If another one has written
since, this one has lost its job: `Fenced`, and the shell stops.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import structlog
from shoal_protos.errors import StoreError

from shoal_controller.core.spec import JobSpec
from shoal_controller.store.store import Compare, Delete, Operation, Put, Store, Unfit

EVENTS_KEPT = 10_000
"""Per job; the oldest go first."""

EVENTS_PER_TRANSACTION = 50
"""With as many deletions and two pages it stays below a transaction's limit."""

WRITE_SECONDS = 30.0
"""How long a store may fail before this controller gives up; training goes on without it."""

LONGEST_PAUSE_SECONDS = 2.0

log = structlog.get_logger("shoal.ledger")


class Fenced(StoreError):
    """Another controller has written a job of this one's."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One entry of a job's history, as REST gives it."""

    time: float
    kind: str
    generation: int
    worker: str
    message: str
    data: Mapping[str, object] = field(default_factory=dict)
    revision: int = 0
    """Its number in the job, from 1 on; given when it is written."""


@dataclass(frozen=True, slots=True)
class Head:
    """The page that every transaction writes."""

    spec: JobSpec
    writer: str
    """The controller's life that wrote it."""
    writes: int = 0
    """With `writer` it tells one write from any other."""
    first_event: int = 1
    last_event: int = 0
    broken: str = ""
    """Why the job cannot go on, where the machine itself failed."""
    step: int | None = None
    """The step that people are shown, where it is newer than the durable state's."""

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, value: bytes) -> Head:
        """A `StoreError` for bytes that are no head."""
        try:
            fields = json.loads(value)
            spec = fields.pop("spec")
            return cls(spec=JobSpec(**spec | {"command": tuple(spec["command"])}), **fields)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"a job's record in the store is damaged ({error!r}): {value[:200]!r}") from error


class Ledger:
    """One job's pages. One task writes; anyone may read."""

    def __init__(self, store: Store, head: Head, modified: int) -> None:
        self._store = store
        self._head = head
        self.modified = modified
        """The store's revision of its last write."""
        self._news = asyncio.Event()
        self.closed = False

    @property
    def spec(self) -> JobSpec:
        return self._head.spec

    @property
    def broken(self) -> str:
        return self._head.broken

    @property
    def step(self) -> int | None:
        """The step that was written since the durable state was."""
        return self._head.step

    @property
    def _name(self) -> str:
        return self._head.spec.job

    # ---- writing

    async def renew(self, spec: JobSpec, durable: str) -> None:
        """Begin the job, for the first time or again; an earlier run's events stay."""
        await self._write(replace(self._head, spec=spec, broken=""), (), durable)

    async def write(self, events: Sequence[JobEvent], durable: str | None = None, broken: str = "") -> None:
        """Make events, and the state where given, durable: all before it returns, in this order."""
        while len(events) > EVENTS_PER_TRANSACTION:
            await self._write(self._head, events[:EVENTS_PER_TRANSACTION], None)
            events = events[EVENTS_PER_TRANSACTION:]
        await self._write(replace(self._head, broken=broken or self.broken), events, durable)

    async def write_step(self, step: int) -> None:
        """Make the step that people are shown durable: with the head, which every transaction writes."""
        await self._write(replace(self._head, step=step), (), None)

    async def forget(self) -> None:
        """Remove the job and all that is kept of it; its events first, so that no half of them is left for another."""
        while entries := (await self._store.list(f"/events/{self._name}/", limit=EVENTS_PER_TRANSACTION)).entries:
            await self._guarded([Delete(entry.key) for entry in entries])
        await self._guarded([Delete(f"/jobs/{self._name}"), Delete(f"/durable/{self._name}")])
        self.close()

    async def _guarded(self, operations: Sequence[Operation]) -> None:
        if not (await self._store.transact([Compare(f"/jobs/{self._name}", self.modified)], operations)).succeeded:
            raise _fenced(self._name)

    async def _write(self, head: Head, events: Sequence[JobEvent], durable: str | None) -> None:
        last = head.last_event + len(events)
        first = min(max(head.first_event, last - EVENTS_KEPT + 1), head.first_event + EVENTS_PER_TRANSACTION)
        numbered = [replace(event, revision=head.last_event + 1 + index) for index, event in enumerate(events)]
        operations: list[Operation] = [
            Put(_event_key(self._name, event.revision), _encoded(event)) for event in numbered
        ]
        operations += [Delete(_event_key(self._name, number)) for number in range(head.first_event, first)]
        if durable is not None:
            head = replace(head, step=None)
            operations.append(Put(f"/durable/{self._name}", packed(durable)))
        head = replace(head, writes=head.writes + 1, first_event=first, last_event=last)
        self.modified = await self._commit(head, operations)
        self._head = head
        if events:
            self._news.set()
            self._news = asyncio.Event()

    async def _commit(self, head: Head, operations: Sequence[Operation]) -> int:
        """The revision of the transaction. A store that fails is asked again for `WRITE_SECONDS`."""
        key, value = f"/jobs/{self._name}", head.encoded()
        loop, pause, doubtful = asyncio.get_running_loop(), 0.05, False
        deadline = loop.time() + WRITE_SECONDS
        while True:
            try:
                outcome = await self._store.transact([Compare(key, self.modified)], [Put(key, value), *operations])
                if outcome.succeeded:
                    return outcome.revision
                found = await self._store.get(key)
            except Unfit:
                raise
            except StoreError as error:
                if loop.time() + pause > deadline:
                    raise
                log.warning("the store failed, trying again", job=self._name, error=str(error), pause_seconds=pause)
                doubtful = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                if doubtful and found is not None and found.value == value:
                    return found.modified  # an attempt that seemed to fail had been carried out
                raise _fenced(self._name)

    # ---- reading

    async def events(self, after: int, limit: int) -> list[JobEvent]:
        """The events beyond number `after`, oldest first."""
        listing = await self._store.list(f"/events/{self._name}/", after=_event_key(self._name, after), limit=limit)
        return [JobEvent(**json.loads(entry.value)) for entry in listing.entries]

    async def more_events(self, after: int) -> None:
        """Returns when there are events beyond number `after`, or when there will be none any more."""
        while self._head.last_event <= after and not self.closed:
            await self._news.wait()

    def close(self) -> None:
        """Nothing more will be written: whoever waits for events may go."""
        self.closed = True
        self._news.set()


def new_ledger(store: Store, spec: JobSpec, writer: str) -> Ledger:
    """The pages of a job that the store does not have yet; `renew` writes them."""
    return Ledger(store, Head(spec, writer), 0)


async def stored_ledgers(store: Store, writer: str) -> list[tuple[Ledger, bytes]]:
    """Every job in the store with its packed state. What they write from now on is written by `writer`."""
    heads = (await store.list("/jobs/")).entries
    states = {entry.key.removeprefix("/durable/"): entry.value for entry in (await store.list("/durable/")).entries}
    found = []
    for entry in heads:
        head = replace(Head.decoded(entry.value), writer=writer)
        found.append((Ledger(store, head, entry.modified), states.get(head.spec.job, b"")))
    return found


def packed(durable: str) -> bytes:
    """A state as it lies in the store: plans for many workers are long and repeat themselves."""
    return zlib.compress(durable.encode(), 1)


def unpacked(value: bytes) -> str:
    """The inverse of `packed`; a `StoreError` for bytes that are none."""
    try:
        return zlib.decompress(value).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise StoreError(f"its state in the store is damaged ({len(value)} bytes: {error})") from error


def _fenced(job: str) -> Fenced:
    return Fenced(f"job {job} was written by another controller; this one stops, so that only one decides")


def _event_key(job: str, number: int) -> str:
    return f"/events/{job}/{number:016}"


def _encoded(event: JobEvent) -> bytes:
    return json.dumps(asdict(event)).encode()
