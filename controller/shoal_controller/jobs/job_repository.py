"""A job's keys in the store (`records.py`). Only the shell reads and writes them.

Every transaction is guarded by the revision at which this controller wrote the head last. If another one has written
since, this one has lost its job: `Fenced`, and the shell stops. A transaction is bounded in bytes and operations:
events go first, each batch with a head that counts them, then records, which no head counts yet, then the head that
does. A store that fails is asked again until it answers; `trouble` says since when and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
from shoal_protos.errors import ShoalError, StoreError

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.machine.stored_form import changed_records, durable_from, state_of
from shoal_controller.jobs.records import (
    Head,
    JobEvent,
    RecordSet,
    Unreadable,
    audit_key,
    audit_prefix,
    event_key,
    event_number,
    event_prefix,
    head_key,
    packed,
    record_prefix,
    records_of,
    unpacked,
)
from shoal_controller.observe.recent import WriteSpeed
from shoal_controller.store.store import MAX_OPERATIONS, Compare, Delete, Entry, Fenced, Operation, Put, Store, Unfit

EVENTS_PER_TRANSACTION = 50
"""That leaves room for records."""

EVENT_BYTES = 256 << 10
"""Most bytes of one transaction's events."""

DELETED_PER_TRANSACTION = 100

BEGIN_SECONDS = 8.0
"""How long the store may take for a new job, for somebody waits for the answer."""

LONGEST_PAUSE_SECONDS = 2.0

log = structlog.get_logger("shoal.job_repository")


@dataclass(frozen=True, slots=True)
class Trouble:
    """The store does not take what is to be written."""

    since: float
    """Start by the event loop's clock."""
    why: str


class JobRepository:
    """One job's keys. One task writes them, another may drop events meanwhile; anyone may read."""

    def __init__(self, store: Store, head: Head, modified: int, records: RecordSet, durable: Durable) -> None:
        self._store = store
        self._head = head
        self.modified = modified
        """The store's revision of its last write."""
        self._records = records
        self.durable = durable
        """As it is in the store."""
        self._doubtful: set[bytes] = set()
        """Heads whose writing failed: nobody knows yet whether it was carried out all the same."""
        self._may_be_gone = False
        """Its head was to be deleted, and perhaps it was, though the store did not say so."""
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()
        self.closed = False
        self.speed = WriteSpeed(head.job)
        self.trouble: Trouble | None = None
        self.on_trouble: Callable[[], None] = lambda: None
        """Called when it begins."""
        self.on_events: Callable[[Sequence[JobEvent]], None] = lambda _: None
        """Called with events that were written."""

    @property
    def spec(self) -> JobSpec:
        return self.durable.spec

    @property
    def broken(self) -> str:
        return self._head.broken

    @property
    def has_newer_records(self) -> bool:
        """Whether records were found that its head does not count: of a change that did not, or has not yet, come true,
        or of a head that was written after this one was read.
        """
        return bool(self._records.undone)

    @property
    def _name(self) -> str:
        return self._head.job

    # ---- writing

    async def renew(self, durable: Durable, events: Sequence[JobEvent] = ()) -> None:
        """Begin the job, for the first time or again; an earlier run's events stay. A `StoreError` after
        `BEGIN_SECONDS`: then it is not known whether it has begun, and it may be begun again.
        """
        self._records = self._records.renewed()
        try:
            async with asyncio.timeout(BEGIN_SECONDS):
                changed = changed_records(None, durable)
                since = self._records.number + 1
                await self._write(events, changed, since=since, broken="", forgotten=False, state=state_of(durable))
        except TimeoutError as error:
            why = self.trouble.why if self.trouble is not None else "it does not answer"
            raise StoreError(
                f"job {self._name} could not be written within {BEGIN_SECONDS:g} s: {why}. Submit it again later"
            ) from error
        self.durable = durable

    async def write(self, events: Sequence[JobEvent], durable: Durable | None = None, broken: str = "") -> None:
        """Make events, and the state where given, durable: all before it returns, in this order."""
        *first, last = _batches(events)
        for batch in first:
            await self._write(batch)
        durable = durable or self.durable
        changed = changed_records(self.durable, durable)
        await self._write(last, changed, state=state_of(durable), broken=broken or self.broken)
        self.durable = durable

    @property
    def last_event(self) -> int:
        """Number of the newest one; 0: there is none yet."""
        return self._head.last_event

    @property
    def event_bytes(self) -> int:
        return self._head.event_bytes

    @property
    def event_count(self) -> int:
        return self._head.last_event - self._head.first_event + 1

    @property
    def may_drop_events(self) -> bool:
        """Whether there are any, and nothing stands in the way."""
        return self.event_count > 0 and not (self.closed or self._doubtful)

    async def drop_events(self, count: int) -> None:
        """The oldest ones."""
        async with self._writing:
            if not self.may_drop_events:
                return
            first = self._head.first_event
            prefix, before = event_prefix(self._name), event_key(self._name, first - 1)
            entries = (await self._store.list(prefix, after=before, limit=count)).entries
            oldest = [entry for entry in entries if event_number(entry.key) < first + count]
            begin = min(first + count, self._head.last_event + 1)
            left = self._head.event_bytes - sum(len(entry.value) for entry in oldest)
            if begin > self._head.last_event:
                left = 0  # whatever a damaged head says: what it has too many, others' events would go for
            head = replace(self._head, first_event=begin, event_bytes=max(0, left))
            await self._change(head, [Delete(entry.key) for entry in oldest], {})

    @property
    def audit_bytes(self) -> int:
        return self._head.audit_bytes

    @property
    def may_drop_audit(self) -> bool:
        return self.audit_bytes > 0 and not (self.closed or self._doubtful)

    async def drop_audit(self, count: int) -> None:
        """The oldest entries of the audit."""
        async with self._writing:
            if not self.may_drop_audit:
                return
            entries = (await self._store.list(audit_prefix(self._name), limit=count)).entries
            left = self._head.audit_bytes - sum(len(entry.value) for entry in entries)
            head = replace(self._head, audit_bytes=max(0, left) if entries else 0)
            await self._change(head, [Delete(entry.key) for entry in entries], {})

    async def forget(self) -> None:
        """Remove the job and all that is kept of it. First the head says so, then everything goes, and the head last:
        whoever is killed on the way leaves what the next one can go on with, and an attempt that seemed to fail may be
        made again.
        """
        await self._write(forgotten=True)
        for prefix in (event_prefix(self._name), audit_prefix(self._name), record_prefix(self._name)):
            while entries := (await self._store.list(prefix, limit=DELETED_PER_TRANSACTION)).entries:
                await self._guarded([Delete(entry.key) for entry in entries])
        self._may_be_gone = True
        await self._guarded([Delete(head_key(self._name))])
        self.close()

    async def _guarded(self, operations: Sequence[Operation]) -> None:
        """A transaction that leaves the head as it is."""
        while not (await self._store.transact([self._guard], operations)).succeeded:
            await self._adopt_head()

    @property
    def _guard(self) -> Compare:
        return Compare(head_key(self._name), self.modified)

    async def _write(
        self, events: Sequence[JobEvent] = (), changed: Mapping[str, str | None] | None = None, **fields: Any
    ) -> None:
        """Write events, records, and fields of the head."""
        async with self._writing:
            head = replace(self._head, **fields)
            numbered = [replace(event, revision=number) for number, event in enumerate(events, head.last_event + 1)]
            puts = [Put(_key_of(self._name, event), event.encoded()) for event in numbered]
            sizes = {put.key: len(put.value) for put in puts}
            audit = sum(size for key, size in sizes.items() if key.startswith(audit_prefix(self._name)))
            head = replace(
                head,
                last_event=head.last_event + len(puts),
                event_bytes=head.event_bytes + sum(sizes.values()) - audit,
                audit_bytes=head.audit_bytes + audit,
            )
            await self._change(head, puts, changed or {})
        if events:
            self._news.set()
            self._news = asyncio.Event()
            self.on_events(numbered)

    async def _change(self, head: Head, operations: Sequence[Operation], changed: Mapping[str, str | None]) -> None:
        """Write the head, with these operations; records that do not fit before. See [Note: the state is last]."""
        values = {name: None if text is None else packed(text) for name, text in changed.items()}
        write = self._records.write(values, MAX_OPERATIONS - 1 - len(operations))
        self._records = write.begun
        for transaction in write.ahead:
            await self._insist(partial(self._guarded, transaction))
        head = replace(head, number=write.number, records=len(write.done.keys))
        self.modified = await self._commit(head, [*operations, *write.last])
        self._head, self._records = head, write.done

    async def _commit(self, head: Head, operations: Sequence[Operation]) -> int:
        """The revision of the transaction."""
        key, value = head_key(self._name), head.encoded()
        revision = 0

        async def attempt() -> None:
            nonlocal revision
            with self.speed.measured():
                outcome = await self._store.transact([self._guard], [Put(key, value), *operations])
            revision = outcome.revision if outcome.succeeded else await self._adopt_head(value)

        while not revision:
            self._doubtful.add(value)
            await self._insist(attempt)
        self._doubtful.clear()
        self._may_be_gone = False
        return revision

    async def _adopt_head(self, value: bytes = b"") -> int:
        """Somebody has written the head. An attempt of our own that seemed to fail had been carried out: its revision,
        or 0 where it was another than that of `value`: then it is written over. So is one that was deleted by an
        attempt to forget the job.
        """
        found = await self._store.get(head_key(self._name))
        if found is None and self._may_be_gone:
            self.modified = 0
            return 0
        if found is None or found.value not in self._doubtful:
            raise _fenced(self._name)
        self.modified = found.modified
        return found.modified if found.value == value else 0

    async def _insist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Try it until the store answers."""
        loop, pause = asyncio.get_running_loop(), 0.05
        since = loop.time()
        while True:
            try:
                await attempt()
            except (Unfit, Fenced):
                raise
            except StoreError as error:
                log.warning("the store failed, trying again", job=self._name, error=str(error), pause_seconds=pause)
                began = self.trouble is None
                self.trouble = Trouble(since if self.trouble is None else self.trouble.since, str(error))
                if began:
                    self.on_trouble()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self.trouble = None
                return

    # ---- reading

    async def events(self, after: int, limit: int) -> list[JobEvent]:
        """The events beyond number `after`, oldest first, those of the audit among them, at most `limit` (0: all).

        None beyond the last that was there before the first look: between two looks others may be written.
        """
        last = self._head.last_event
        found: dict[int, bytes] = {}
        looks = [(event_prefix(self._name), event_key(self._name, after))]
        if self.audit_bytes:
            looks.append((audit_prefix(self._name), audit_key(self._name, after)))
        for prefix, begin in looks:
            listing = await self._store.list(prefix, after=begin, limit=limit)
            found |= {event_number(entry.key): entry.value for entry in listing.entries}
        numbers = [number for number in sorted(found) if number <= last][: limit or None]
        return [JobEvent.decoded(found[number], number) for number in numbers]

    async def more_events(self, after: int) -> None:
        """Returns when there are events beyond number `after`, or when there will be none any more."""
        while self._head.last_event <= after and not self.closed:
            await self._news.wait()

    def close(self) -> None:
        """Nothing more will be written: whoever waits for events may go."""
        self.closed = True
        self._news.set()


@dataclass(frozen=True, slots=True)
class Stored:
    """One job of the store."""

    repository: JobRepository
    durable: Durable
    unreadable: str
    """Why there is no state: a sentence. Then what is durable has but a name, and nothing is to be written."""
    forgotten: bool
    """An earlier life has not forgotten it whole: to be done by whoever may write."""


def new_repository(store: Store, spec: JobSpec, writer: str) -> JobRepository:
    """The records of a job that the store does not have yet; `renew` writes them."""
    return JobRepository(store, Head(spec.job, writer), 0, RecordSet(spec.job), Durable(spec, wanted=spec.wanted))


async def stored_jobs(store: Store, writer: str) -> list[Stored]:
    """Every job in the store. What their repositories write from now on is written by `writer`."""
    heads = (await store.list("/jobs/")).entries
    return [job for head in heads if (job := await _whole(store, head, writer)) is not None]


async def _whole(store: Store, entry: Entry, writer: str) -> Stored | None:
    """The job with this head, or with the one that was written while it was read: a leader that still writes, or whose
    last transaction arrives after its death, is not fenced off from one who only looks. None: it is gone meanwhile.
    """
    while True:
        job = await _stored(store, entry, writer)
        if not (job.unreadable or job.repository.has_newer_records):
            return job
        now = await store.get(entry.key)
        if now is None or now.modified == entry.modified:
            return job if now is not None else None
        entry = now


async def _stored(store: Store, entry: Entry, writer: str) -> Stored:
    job = entry.key.removeprefix("/jobs/")
    head, records = Head(job, writer), RecordSet(job)
    durable, why = Durable(JobSpec(job, wanted=1), wanted=1), ""
    try:
        head = replace(Head.decoded(entry.value, job), writer=writer)
        if not head.forgotten:
            records, durable = await _stored_records(store, head)
    except Unreadable as error:
        why = str(error)
    repository = JobRepository(store, head, entry.modified, records, durable)
    return Stored(repository, durable, why, head.forgotten)


async def _stored_records(store: Store, head: Head) -> tuple[RecordSet, Durable]:
    """Raises `Unreadable`."""
    values = {entry.key: entry.value for entry in (await store.list(record_prefix(head.job))).entries}
    records, packed_texts = records_of(head.job, values, head.number, head.since)
    if len(packed_texts) != head.records:
        raise Unreadable(f"its state in the store is damaged ({len(packed_texts)} of {head.records} records are there)")
    texts = {name: unpacked(name, value) for name, value in packed_texts.items()}
    try:
        durable = durable_from(head.state, texts)
        if durable.spec.job != head.job:
            raise ValueError(f"its spec is that of job {durable.spec.job!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ShoalError) as error:
        raise Unreadable(f"its state in the store is damaged, or of another Shoal ({error})") from error
    return records, durable


def _key_of(job: str, event: JobEvent) -> str:
    key = audit_key if event.kind == EventKind.AUDIT else event_key
    return key(job, event.revision)


def _batches(events: Sequence[JobEvent]) -> Iterator[list[JobEvent]]:
    """What fits into a transaction, in order; at least one batch."""
    batch: list[JobEvent] = []
    size = 0
    for event in events:
        length = len(event.encoded())
        if batch and (len(batch) == EVENTS_PER_TRANSACTION or size + length > EVENT_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(event)
        size += length
    yield batch


def _fenced(job: str) -> Fenced:
    return Fenced(f"job {job} was written by another controller; this one decides nothing more, so that only one does")
