"""What a job's keys in the store are, and which of their values can be read.

    /jobs/NAME                            the head: the small state, which events are kept; in every transaction
    /records/NAME/workers/w7/NUMBER/PART  a record (`stored_form.py`), as the change of that number wrote it
    /events/NAME/0000000000000042
    /audit/NAME/0000000000000043          an event that is kept longest: numbered with the others

[Note: the state is last] The head has the number of the last change, and that alone makes a change true: a record with
a higher number was never written as far as anyone knows, and of those that count the highest is the record
(`record_set.py`). A record that this version cannot read is left as it is: nothing of it is guessed, dropped or written
again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shoal_protos.errors import StoreError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

from shoal_controller.core.machine.event_kind import EventKind

FORMAT = 6
"""Format of the records that this code writes: a higher one than any before it that reads them otherwise."""

OLDEST_FORMAT = 5
"""Of those that it reads: every one from here to `FORMAT`."""

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
