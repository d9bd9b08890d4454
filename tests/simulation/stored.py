"""The store of a simulated controller: keys, changed by transactions, between any two of which the controller may die.

The transactions are those of the real `RecordSet`, made so small that many a change needs several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.stored_form import changed_records, durable_from, state_of
from shoal_controller.jobs import records
from shoal_controller.store.store import Operation, Put

HEAD = "head"


class StoredJob:
    """What the store has of the job, and what a controller's life knows of it."""

    def __init__(self, room: int) -> None:
        self.room = room
        """How many operations a transaction with the head may have."""
        self.keys: dict[str, bytes] = {}
        self._records = records.RecordSet("job")
        self._durable: Durable | None = None

    def write(self, durable: Durable) -> list[Callable[[], None]]:
        """The transactions of a change, to be carried out in this order; the last one makes it true."""
        changed = changed_records(self._durable, durable)
        write = self._records.write({name: text and text.encode() for name, text in changed.items()}, self.room)
        head = Put(HEAD, json.dumps({"number": write.number, "state": state_of(durable)}).encode())

        def make_true() -> None:
            self._carry_out((*write.last, head))
            self._records, self._durable = write.done, durable

        return [*(partial(self._carry_out, transaction) for transaction in write.ahead), make_true]

    def read(self) -> Durable:
        """What another life of the controller finds."""
        head = json.loads(self.keys[HEAD])
        stored = {key: value for key, value in self.keys.items() if key != HEAD}
        self._records, values = records.records_of("job", stored, head["number"], 0)
        self._durable = durable_from(head["state"], {name: value.decode() for name, value in values.items()})
        return self._durable

    def copy(self) -> StoredJob:
        """A backup of it as it is now."""
        copied = StoredJob(self.room)
        copied.keys, copied._records, copied._durable = dict(self.keys), self._records, self._durable
        return copied

    def _carry_out(self, transaction: Sequence[Operation]) -> None:
        for operation in transaction:
            if isinstance(operation, Put):
                self.keys[operation.key] = operation.value
            else:
                self.keys.pop(operation.key, None)
