"""A job's records in the store (`records.py`). Only the shell reads and writes them.

Every transaction is guarded by the revision at which this controller wrote the head last. If another one has written
since, this one has lost its job: `Fenced`, and the shell stops. A transaction is bounded in bytes: events go first,
each batch with a head that counts them, then a large state's parts, which nothing names yet, then the head that does.
A store that fails is asked again until it answers; `trouble` says since when and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import structlog
from shoal_protos.errors import StoreError

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.records import (
    Head,
    JobEvent,
    Unreadable,
    event_key,
    event_number,
    head_key,
    packed,
    part_key,
    state_key,
    unpacked,
)
from shoal_controller.store.store import Compare, Delete, Operation, Put, Store, Unfit

EVENTS_KEPT = 10_000
"""Per job; the oldest go first."""

EVENTS_PER_TRANSACTION = 50
"""With as many deletions and two records it stays below a transaction's limit."""

EVENT_BYTES = 256 << 10
"""Most bytes of one transaction's events."""

PART_BYTES = 512 << 10
"""Most bytes of a state in one transaction; what is larger is written in parts."""

LEFTOVERS_PER_TRANSACTION = 16

LISTED_PARTS = 4
"""Read at a time: a part is half a megabyte."""

BEGIN_SECONDS = 8.0
"""How long the store may take for a new job, for somebody waits for the answer."""

LONGEST_PAUSE_SECONDS = 2.0

log = structlog.get_logger("shoal.job_repository")


class Fenced(StoreError):
    """Another controller has written a job of this one's."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The store does not take what is to be written."""

    since: float
    """Start by the event loop's clock."""
    why: str


class JobRepository:
    """One job's records. One task writes; anyone may read."""

    def __init__(self, store: Store, head: Head, modified: int, leftovers: Collection[str] = ()) -> None:
        self._store = store
        self._head = head
        self.modified = modified
        """The store's revision of its last write."""
        self._leftovers = set(leftovers)
        """Keys of parts that no head names: an earlier life was killed between them and their head."""
        self._doubtful: set[bytes] = set()
        """Heads whose writing failed: nobody knows yet whether it was carried out all the same."""
        self._news = asyncio.Event()
        self.closed = False
        self.trouble: Trouble | None = None
        self.on_trouble: Callable[[], None] = lambda: None
        """Called when it begins."""

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
        """Begin the job, for the first time or again; an earlier run's events stay. A `StoreError` after
        `BEGIN_SECONDS`: then it is not known whether it has begun, and it may be begun again.
        """
        try:
            async with asyncio.timeout(BEGIN_SECONDS):
                await self._write(replace(self._head, spec=spec, broken=""), (), durable)
        except TimeoutError as error:
            why = self.trouble.why if self.trouble is not None else "it does not answer"
            raise StoreError(
                f"job {spec.job} could not be written within {BEGIN_SECONDS:g} s: {why}. Submit it again later"
            ) from error

    async def write(self, events: Sequence[JobEvent], durable: str | None = None, broken: str = "") -> None:
        """Make events, and the state where given, durable: all before it returns, in this order."""
        *first, last = _batches(events)
        for batch in first:
            await self._write(self._head, batch, None)
        await self._write(replace(self._head, broken=broken or self.broken), last, durable)

    async def write_step(self, step: int) -> None:
        """Make the step that people are shown durable: with the head, which every transaction writes."""
        await self._write(replace(self._head, step=step), (), None)

    async def forget(self) -> None:
        """Remove the job and all that is kept of it, its head last, so that it can be forgotten after a kill, too."""
        for prefix in (f"/events/{self._name}/", f"{state_key(self._name)}/"):
            while entries := (await self._store.list(prefix, limit=EVENTS_PER_TRANSACTION)).entries:
                await self._guarded([Delete(entry.key) for entry in entries])
        await self._guarded([Delete(head_key(self._name)), Delete(state_key(self._name))])
        self.close()

    async def _guarded(self, operations: Sequence[Operation]) -> None:
        """A transaction that leaves the head as it is."""
        if not (await self._store.transact([self._guard], operations)).succeeded:
            raise _fenced(self._name)

    @property
    def _guard(self) -> Compare:
        return Compare(head_key(self._name), self.modified)

    async def _write(self, head: Head, events: Sequence[JobEvent], durable: str | None) -> None:
        last = head.last_event + len(events)
        first = min(max(head.first_event, last - EVENTS_KEPT + 1), head.first_event + EVENTS_PER_TRANSACTION)
        numbered = [replace(event, revision=head.last_event + 1 + index) for index, event in enumerate(events)]
        operations: list[Operation] = [
            Put(event_key(self._name, event.revision), event.encoded()) for event in numbered
        ]
        operations += [Delete(event_key(self._name, number)) for number in range(head.first_event, first)]
        head = replace(head, writes=head.writes + 1, first_event=first, last_event=last)
        if durable is not None:
            head, entries = await self._state(replace(head, step=None), packed(durable))
            operations += entries
        operations += self._swept(head)
        self.modified = await self._commit(head, operations)
        self._head = head
        if events:
            self._news.set()
            self._news = asyncio.Event()

    async def _state(self, head: Head, state: bytes) -> tuple[Head, list[Operation]]:
        """The head that names the state, and what is to be written with it; parts are written before."""
        before = [Delete(part_key(self._name, self._head.state, part)) for part in range(self._head.parts)]
        if len(state) <= PART_BYTES:
            return replace(head, state=0, parts=0), [Put(state_key(self._name), state), *before]
        parts = [state[begin : begin + PART_BYTES] for begin in range(0, len(state), PART_BYTES)]
        for number, part in enumerate(parts):
            entry = Put(part_key(self._name, head.writes, number), part)
            await self._insist(lambda entry=entry: self._guarded([entry]))  # type: ignore[misc]
        return replace(head, state=head.writes, parts=len(parts)), [Delete(state_key(self._name)), *before]

    def _swept(self, head: Head) -> list[Operation]:
        """Some of what an earlier life left behind; not what `head` names, for writes are numbered on from there."""
        self._leftovers -= set(_state_keys(head))
        swept = sorted(self._leftovers)[:LEFTOVERS_PER_TRANSACTION]
        self._leftovers -= set(swept)
        return [Delete(key) for key in swept]

    async def _commit(self, head: Head, operations: Sequence[Operation]) -> int:
        """The revision of the transaction."""
        key, value = head_key(self._name), head.encoded()
        revision = 0

        async def attempt() -> None:
            nonlocal revision
            outcome = await self._store.transact([self._guard], [Put(key, value), *operations])
            revision = outcome.revision if outcome.succeeded else await self._found(key, value)

        while not revision:
            self._doubtful.add(value)
            await self._insist(attempt)
        self._doubtful.clear()
        return revision

    async def _found(self, key: str, value: bytes) -> int:
        """Somebody has written the head. An attempt of our own that seemed to fail had been carried out: its revision,
        or 0 where it was an earlier write's, over which this one is made once more.
        """
        found = await self._store.get(key)
        if found is None or found.value not in self._doubtful:
            raise _fenced(self._name)
        self.modified = found.modified
        return found.modified if found.value == value else 0

    async def _insist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Try it until the store answers."""
        loop, pause = asyncio.get_running_loop(), 0.05
        while True:
            try:
                await attempt()
            except (Unfit, Fenced):
                raise
            except StoreError as error:
                log.warning("the store failed, trying again", job=self._name, error=str(error), pause_seconds=pause)
                began = self.trouble is None
                self.trouble = Trouble(loop.time() if self.trouble is None else self.trouble.since, str(error))
                if began:
                    self.on_trouble()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self.trouble = None
                return

    # ---- reading

    async def events(self, after: int, limit: int) -> list[JobEvent]:
        """The events beyond number `after`, oldest first."""
        listing = await self._store.list(f"/events/{self._name}/", after=event_key(self._name, after), limit=limit)
        return [JobEvent.decoded(entry.value, event_number(entry.key)) for entry in listing.entries]

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
    state: str
    unreadable: str
    """Why there is no state: a sentence. Then the repository's spec is but a name, and nothing is to be written."""


def new_repository(store: Store, spec: JobSpec, writer: str) -> JobRepository:
    """The records of a job that the store does not have yet; `renew` writes them."""
    return JobRepository(store, Head(spec, writer), 0)


async def stored_jobs(store: Store, writer: str) -> list[Stored]:
    """Every job in the store. What their ledgers write from now on is written by `writer`."""
    found = []
    for entry in (await store.list("/jobs/")).entries:
        job = entry.key.removeprefix("/jobs/")
        try:
            head = replace(Head.decoded(entry.value, job), writer=writer)
            state, leftovers = await _stored_state(store, head), await _leftovers(store, head)
            found.append(Stored(JobRepository(store, head, entry.modified, leftovers), state, ""))
        except Unreadable as error:
            repository = JobRepository(store, Head(JobSpec(job, wanted=1), writer), entry.modified)
            found.append(Stored(repository, "", str(error)))
    return found


async def _stored_state(store: Store, head: Head) -> str:
    entries = [await store.get(key) for key in _state_keys(head)]
    return unpacked(b"".join(entry.value for entry in entries if entry is not None))


def _state_keys(head: Head) -> list[str]:
    """Where the state lies that a head names."""
    job = head.spec.job
    return [part_key(job, head.state, part) for part in range(head.parts)] if head.parts else [state_key(job)]


async def _leftovers(store: Store, head: Head) -> set[str]:
    """The keys of parts that the head does not name."""
    found: set[str] = set()
    prefix, last = f"{state_key(head.spec.job)}/", ""
    while entries := (await store.list(prefix, after=last, limit=LISTED_PARTS)).entries:
        found.update(entry.key for entry in entries)
        last = entries[-1].key
    return found - set(_state_keys(head))


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
    return Fenced(f"job {job} was written by another controller; this one stops, so that only one decides")
