"""A job's records in the store: what its keys are, which values can be read, and in which transactions they change.

    /jobs/NAME                            the head: the small state, which events are kept; in every transaction
    /records/NAME/workers/w7/NUMBER/PART  a record (`stored_form.py`), as the change of that number wrote it
    /events/NAME/0000000000000042
    /audit/NAME/0000000000000043          an event that is kept longest: numbered with the others

[Note: the state is last] The head has the number of the last change, and that alone makes a change true: a record with
a higher number was never written as far as anyone knows, and of those that count the highest is the record. A
record that this version cannot read is left as it is: nothing of it is guessed, dropped or written again.

A change that fits is one transaction: new records, the deletion of those that they replace, and the head. One that does
not is written ahead of its head under keys of its own, so that nothing is overwritten; a record that is to go gets an
empty one in its place. A controller that is killed on the way has written records that no reader believes.
`job_repository.py` carries the transactions out; no I/O here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from shoal_protos.errors import StoreError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.store.store import Delete, Operation, Put

FORMAT = 6
"""Format of the records that this code writes: a higher one than any before it that reads them otherwise."""

OLDEST_FORMAT = 5
"""Of those that it reads: every one from here to `FORMAT`."""
RECORD_BYTES = 512 << 10
"""Most bytes of a key's value, and of the records in one transaction."""

LATEST = 253_402_300_800.0
"""The year 10000, in seconds since the epoch."""

MOST_MESSAGE_CHARACTERS = 1 << 16
"""Most characters of an event's sentence; what is longer is cut."""

MOST_REASON_CHARACTERS = 2000
"""Most characters of why a job cannot go on: that is in every write from then on."""


class Unreadable(StoreError):
    """A record of one job that this version cannot read. Other jobs are not harmed by it."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One entry of a job's history, as REST gives it."""

    time: float
    kind: str
    """An `EventKind`, perhaps of another version."""
    generation: int
    worker: str
    message: str
    data: Mapping[str, object] = field(default_factory=dict)
    revision: int = 0
    """Its number in the job, from 1 on; given when it is written."""

    def encoded(self) -> bytes:
        fields = asdict(self)
        if len(self.message) > MOST_MESSAGE_CHARACTERS:
            fields["message"] = f"{self.message[:MOST_MESSAGE_CHARACTERS]}… ({len(self.message)} characters)"
        return json.dumps(fields).encode()

    @classmethod
    def decoded(cls, value: bytes, number: int) -> JobEvent:
        """The event of that number; one that cannot be read is an event that says so, and hides no other."""
        try:
            event = cls(**json.loads(value))
            event._check(number)
        except (ValueError, TypeError, RecursionError) as error:
            sentence = f"event {number} cannot be read: its record in the store is damaged ({error})"
            return cls(0.0, EventKind.UNREADABLE_EVENT, 0, "", sentence, revision=number)
        return event

    def _check(self, number: int) -> None:
        """Raises `ValueError` naming a field that REST could not give."""
        right = {
            "time": type(self.time) in (int, float) and 0 <= self.time < LATEST,
            "kind": isinstance(self.kind, str),
            "generation": type(self.generation) is int and 0 <= self.generation < 1 << 62,
            "worker": isinstance(self.worker, str),
            "message": isinstance(self.message, str),
            "data": isinstance(self.data, dict),
            "revision": self.revision == number,
        }
        for name, is_right in right.items():
            if not is_right:
                raise ValueError(f"its {name} is {str(getattr(self, name))[:30]!r}")
        json.dumps(asdict(self), ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Head:
    """The key that every transaction writes which makes something true. See [Note: the state is last]."""

    job: str
    writer: str
    """The controller's life that wrote it."""
    number: int = 0
    """Number of the last change; no other attempt at a change has it."""
    since: int = 0
    """Number of the change that began this run of the job: records of earlier ones are not part of it."""
    records: int = 0
    """How many records there are."""
    first_event: int = 1
    last_event: int = 0
    event_bytes: int = 0
    """Of all events from the first to the last but those of the audit."""
    audit_bytes: int = 0
    broken: str = ""
    """Why the job cannot go on, where the machine itself failed."""
    forgotten: bool = False
    """The job is over and all that is kept of it is being removed."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What `stored_form.state_of` gave."""

    def encoded(self) -> bytes:
        head = {one.name: getattr(self, one.name) for one in fields(self)}
        by = {"format": FORMAT, "release": RELEASE}
        return json.dumps(head | {"broken": self.broken[:MOST_REASON_CHARACTERS]} | by).encode()

    def check(self, job: str) -> None:
        """Raises `ValueError` for a field that is none: one damaged record must not keep a controller from serving."""
        if self.job != job:  # it would be written where another job's lies
            raise ValueError(f"its job is {self.job!r}")
        for name in ("number", "since", "records", "first_event", "last_event", "event_bytes", "audit_bytes"):
            number = getattr(self, name)
            if type(number) is not int or not 0 <= number < 1 << 62:
                raise ValueError(f"its {name} is {str(number)[:30]}")
        for name, kind in (("broken", str), ("forgotten", bool), ("state", dict)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"its {name} is {str(getattr(self, name))[:30]!r}")

    @classmethod
    def decoded(cls, value: bytes, job: str) -> Head:
        """The head of this job. Raises `Unreadable`."""
        try:
            found = json.loads(value)
            number, release = found.pop("format", None), found.pop("release", "")
            if number not in range(OLDEST_FORMAT, FORMAT + 1):
                raise Unreadable(
                    f"its record in the store has format {str(number)[:30]}, written by {of_shoal(str(release)[:60])}; "
                    f"this is {of_shoal(RELEASE)}, which reads {OLDEST_FORMAT} to {FORMAT}. Install that release again"
                )
            head = cls(**found)
            head.check(job)
            return head
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable(f"its record in the store is damaged, or of another Shoal ({error})") from error


def head_key(job: str) -> str:
    return f"/jobs/{job}"


def record_prefix(job: str) -> str:
    return f"/records/{job}/"


def record_key(job: str, name: str, number: int, part: int = 0) -> str:
    """The key of a part of a record, as the change of that number wrote it."""
    return f"{record_prefix(job)}{name}/{number:016}/{part:04}"


def parsed_key(job: str, key: str) -> tuple[str, int]:
    """Name and number of what `record_key` made. Raises `Unreadable`."""
    name, _, rest = key.removeprefix(record_prefix(job)).rpartition("/")
    name, _, number = name.rpartition("/")
    if not (name and number.isdecimal() and rest.isdecimal()):
        raise Unreadable(f"{key} is not a Shoal key")
    return name, int(number)


def event_prefix(job: str) -> str:
    return f"/events/{job}/"


def event_key(job: str, number: int) -> str:
    return f"{event_prefix(job)}{number:016}"


def audit_prefix(job: str) -> str:
    return f"/audit/{job}/"


def audit_key(job: str, number: int) -> str:
    return f"{audit_prefix(job)}{number:016}"


def event_number(key: str) -> int:
    """The inverse of `event_key` and of `audit_key`."""
    return int(key.rpartition("/")[2])


def packed(text: str) -> bytes:
    """A record as it lies in the store: plans for many workers are long and repeat themselves."""
    return zlib.compress(text.encode(), 1)


def unpacked(name: str, value: bytes) -> str:
    """The inverse of `packed`; raises `Unreadable`."""
    try:
        return zlib.decompress(value).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise Unreadable(f"its record {name} in the store is damaged ({len(value)} bytes: {error})") from error


@dataclass(frozen=True, slots=True)
class Write:
    """A change as transactions: those `ahead`, one after the other, then `last` together with the head."""

    number: int
    ahead: tuple[tuple[Operation, ...], ...]
    last: tuple[Operation, ...]
    begun: RecordSet
    """What may lie there from the first transaction on, until the head does."""
    done: RecordSet
    """What lies there then."""


@dataclass(frozen=True, slots=True)
class RecordSet:
    """The records of one job. Replaced whole by every change."""

    job: str
    number: int = 0
    """The highest number that any change, or attempt at one, was given."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of every record that counts: the keys of its parts, by its name."""
    undone: tuple[str, ...] = ()
    """Keys that a change has written which never came true. They go before the next one does, or they would be its."""
    leftovers: tuple[str, ...] = ()
    """Keys that do not count, and go when there is room: the oldest first, for an empty record hides an older one."""

    def renewed(self) -> RecordSet:
        """For a new run of the job. No earlier record counts once its head is there."""
        counted = [key for keys in self.keys.values() for key in keys]
        return replace(self, keys={}, undone=(), leftovers=(*self.leftovers, *self.undone, *counted))

    def write(self, changed: Mapping[str, bytes | None], room: int) -> Write:
        """Write these records, and remove those that are None. `room`: most operations of a transaction."""
        number = self.number + 1
        puts = {name: self._puts(name, number, value) for name, value in changed.items() if value is not None}
        written = [put for several in puts.values() for put in several]
        replaced = [key for name in changed for key in self.keys.get(name, ())]
        removed = [name for name, value in changed.items() if value is None and name in self.keys]
        hidden = self._leftovers_of(removed)
        last: list[Operation] = []
        ahead: list[Operation] = []
        if len(written) + len(replaced) + len(hidden) <= room and _size(written) <= RECORD_BYTES:
            last += [*written, *map(Delete, [*replaced, *hidden])]
            leftovers = tuple(key for key in self.leftovers if key not in hidden)
        else:
            empty = [Put(record_key(self.job, name, number), b"") for name in removed]
            ahead += [*written, *empty]
            leftovers = (*self.leftovers, *replaced, *(put.key for put in empty))
        swept = leftovers[: room - len(last)]
        kept = {name: keys for name, keys in self.keys.items() if name not in removed}
        keys = {**kept, **{name: tuple(put.key for put in several) for name, several in puts.items()}}
        return Write(
            number,
            tuple(_batches([*map(Delete, self.undone), *ahead], room)),
            (*last, *map(Delete, swept)),
            begun=replace(self, number=number, undone=(*self.undone, *(operation.key for operation in ahead))),
            done=RecordSet(self.job, number, keys, (), leftovers[len(swept) :]),
        )

    def _leftovers_of(self, removed: Iterable[str]) -> set[str]:
        """Older records of these, which would count again if nothing took their place."""
        names = set(removed)
        return {key for key in self.leftovers if names and parsed_key(self.job, key)[0] in names}

    def _puts(self, name: str, number: int, value: bytes) -> list[Put]:
        parts = range(0, len(value), RECORD_BYTES)
        return [
            Put(record_key(self.job, name, number, part), value[begin : begin + RECORD_BYTES])
            for part, begin in enumerate(parts)
        ]


def records_of(job: str, entries: Mapping[str, bytes], number: int, since: int) -> tuple[RecordSet, dict[str, bytes]]:
    """What lies there under a head with these numbers, and the records that count. Raises `Unreadable`."""
    keys: dict[str, tuple[str, ...]] = {}
    undone: list[str] = []
    leftovers: list[str] = []
    highest = number
    for (name, at), several in groupby(sorted(entries), lambda key: parsed_key(job, key)):
        highest = max(highest, at)
        if at > number:
            undone += several
        elif at < since:
            leftovers += several
        else:
            leftovers += keys.get(name, ())
            keys[name] = tuple(several)
    values = {name: b"".join(entries[key] for key in several) for name, several in keys.items()}
    leftovers += [key for name, value in values.items() if not value for key in keys[name]]
    counted = {name: several for name, several in keys.items() if values[name]}
    found = RecordSet(job, highest, counted, tuple(undone), tuple(leftovers))
    return found, {name: value for name, value in values.items() if value}


def _size(puts: Iterable[Operation]) -> int:
    return sum(len(put.value) for put in puts if isinstance(put, Put))


def _batches(operations: Iterable[Operation], room: int) -> Iterator[tuple[Operation, ...]]:
    """What fits into a transaction, in order."""
    batch: list[Operation] = []
    for operation in operations:
        if batch and (len(batch) == room or _size([*batch, operation]) > RECORD_BYTES):
            yield tuple(batch)
            batch = []
        batch.append(operation)
    if batch:
        yield tuple(batch)
