"""What a job's records in the store are made of: its head, its packed state, its events; and which of them can be read.

    /jobs/NAME                   head: the spec, which events are kept, who wrote it last; in every transaction
    /durable/NAME                what the machine must remember
    /durable/NAME/WRITE/PART     the same in parts, where it is larger than one transaction; the head names the write
    /events/NAME/0000000000000042

A record that this version cannot read is left as it is: nothing of it is guessed, dropped or written again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from shoal_protos.errors import StoreError

from shoal_controller.core.machine.codec import restored
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.spec import JobSpec

FORMAT = 3
"""Format of the records that this code reads and writes."""

MOST_PARTS = 1 << 12
"""Of a state: two gigabytes."""

LATEST = 253_402_300_800.0
"""The year 10000, in seconds since the epoch."""

MOST_MESSAGE_CHARACTERS = 1 << 16
"""Most characters of an event's sentence; what is longer is cut."""


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
    """The record that every transaction writes."""

    spec: JobSpec
    writer: str
    """The controller's life that wrote it."""
    writes: int = 0
    """Number of the write; with `writer` it tells one write from any other."""
    first_event: int = 1
    last_event: int = 0
    broken: str = ""
    """Why the job cannot go on, where the machine itself failed."""
    step: int | None = None
    """The step that people are shown, where it is newer than the durable state's."""
    state: int = 0
    """The write that the durable state's parts belong to."""
    parts: int = 0
    """How many there are; 0: the state is in one piece."""
    format: int = FORMAT

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def check(self) -> None:
        """Raises `ValueError` for a number that is none: one damaged record must not keep a controller from serving."""
        numbers = {name: getattr(self, name) for name in ("writes", "first_event", "last_event", "state", "parts")}
        for name, number in {**numbers, "step": self.step or 0}.items():
            if type(number) is not int or not 0 <= number < (MOST_PARTS if name == "parts" else 1 << 62):
                raise ValueError(f"its {name} is {str(number)[:30]}")

    @classmethod
    def decoded(cls, value: bytes, job: str) -> Head:
        """The head of this job. Raises `Unreadable`."""
        try:
            fields = json.loads(value)
            if (found := fields.get("format")) != FORMAT:
                raise Unreadable(
                    f"its record in the store has format {found}, written by another version of Shoal; this one reads "
                    f"{FORMAT}. Install that version again"
                )
            spec = fields.pop("spec")
            head = cls(spec=restored(JobSpec, spec), **fields)
            if head.spec.job != job:  # it would be written where another job's lies
                raise ValueError(f"its job is {head.spec.job!r}")
            head.check()
            return head
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unreadable(f"its record in the store is damaged, or of another Shoal ({error})") from error


def head_key(job: str) -> str:
    return f"/jobs/{job}"


def state_key(job: str) -> str:
    return f"/durable/{job}"


def part_key(job: str, write: int, part: int) -> str:
    return f"/durable/{job}/{write:016}/{part:04}"


def event_key(job: str, number: int) -> str:
    return f"/events/{job}/{number:016}"


def event_number(key: str) -> int:
    """The inverse of `event_key`."""
    return int(key.rpartition("/")[2])


def packed(durable: str) -> bytes:
    """A state as it lies in the store: plans for many workers are long and repeat themselves."""
    return zlib.compress(durable.encode(), 1)


def unpacked(value: bytes) -> str:
    """The inverse of `packed`; raises `Unreadable`."""
    try:
        return zlib.decompress(value).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise Unreadable(f"its state in the store is damaged ({len(value)} bytes: {error})") from error
