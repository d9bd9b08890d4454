"""Which records of a job lie in the store, and in which transactions a change of them is written.

See [Note: the state is last] in `records.py`. A change that fits is one transaction: new records, the deletion of those
that they replace, and the head. One that does not is written ahead of its head under keys of its own, so that nothing
is overwritten; a record that is to go gets an empty one in its place. Whoever is killed on the way has written what
nobody believes. `job_repository.py` carries the transactions out; no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from shoal_controller.jobs.records import parsed_key, record_key
from shoal_controller.store.store import Delete, Operation, Put

RECORD_BYTES = 512 << 10
"""Most bytes of a key's value, and of the records in one transaction."""


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
