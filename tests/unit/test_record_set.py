"""How a change of records is written: wherever it is cut off, the next life finds all of it or nothing."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal_controller.jobs import records
from shoal_controller.jobs.records import RecordSet, Unreadable, Write, record_key, records_of
from shoal_controller.store.store import MAX_OPERATIONS, Operation, Put, check_transaction

NAMES = st.sampled_from(["spec", "workers/w1", "workers/w1-a", "workers/w10", "plans/7"])
Act = tuple[dict[str, bytes | None], int, int | None, bool]
CHANGES = st.dictionaries(NAMES, st.none() | st.binary(min_size=1, max_size=9))
ACTS = st.lists(st.tuples(CHANGES, st.integers(1, 6), st.none() | st.integers(0, 12), st.booleans()), max_size=12)
"""Each: what changes, how many operations a transaction has, after how many transactions the controller is killed
(None: it lives on), and whether a new run of the job begins."""


THREE: dict[str, bytes | None] = {"plans/7": b"1", "workers/w1": b"2", "spec": b"3"}

HEAD = Put("/jobs/job", b"head")
ROOM = MAX_OPERATIONS - 1
"""Operations of a transaction besides the head."""


class Store:
    """Keys, and the numbers of the head."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.number = self.since = 0

    def finish(self, write: Write) -> None:
        """The last transaction, which has the head in it."""
        check_transaction([], [HEAD, *write.last])
        self._carry_out(write.last)

    def transact(self, operations: Sequence[Operation]) -> None:
        check_transaction([], operations)
        self._carry_out(operations)

    def _carry_out(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Put):
                self.keys[operation.key] = operation.value
            else:
                self.keys.pop(operation.key, None)

    def read(self) -> tuple[RecordSet, dict[str, bytes]]:
        """What another life of the controller finds."""
        return records_of("job", self.keys, self.number, self.since)


@rule(
    "A change that needs several transactions is true when the last one, which has the head, is stored: records "
    "with a higher number than the head's do not count, and are removed before the next change",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.jobs.records", "        if at > number:\n", "        if at > 1 << 60:\n"),
        Edit(
            "shoal_controller.jobs.records",
            "_batches([*map(Delete, self.undone), *ahead], room)",
            "_batches(ahead, room)",
        ),
        Edit(
            "shoal_controller.jobs.records",
            "        hidden = self._leftovers_of(removed)\n",
            "        hidden: set[str] = set()\n",
        ),
    ],
)
@holds("What is deleted from the")
@example([(THREE, 6, None, False), (THREE, 1, None, False), ({"spec": None}, 1, None, False)])
@example([(THREE, 6, None, False), (dict.fromkeys(THREE), 2, None, False), ({}, 1, None, False)])
@given(ACTS)
def test_wherever_a_change_is_cut_off_the_next_life_finds_what_was_before_or_after(acts: list[Act]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "RECORD_BYTES", 4)
        live(acts)


def live(acts: list[Act]) -> None:
    store, records, expected = Store(), RecordSet("job"), dict[str, bytes]()
    for changed, room, killed_after, renews in acts:
        records = records.renewed() if renews else records
        write = records.write(changed, room)
        alive = killed_after is None or killed_after > len(write.ahead)
        for transaction in write.ahead[:killed_after]:
            store.transact(transaction)
            assert store.read()[1] == expected, "nothing of it is true yet"
        if alive:
            store.finish(write)
            store.number, store.since = write.number, write.number if renews else store.since
            kept = {} if renews else expected
            expected = {name: value for name, value in {**kept, **changed}.items() if value is not None}
            records = write.done
        assert store.read()[1] == expected
        if killed_after is not None:
            records, _ = store.read()
    check_tidied(store, records, expected)


def check_tidied(store: Store, records: RecordSet, expected: dict[str, bytes]) -> None:
    """With time, all goes that does not count."""
    for _ in range(3):
        write = records.write({}, ROOM)
        for transaction in write.ahead:
            store.transact(transaction)
        store.finish(write)
        store.number, records = write.number, write.done
    assert store.read()[1] == expected
    assert set(store.keys) == {key for keys in records.keys.values() for key in keys}


@holds("A change that needs several")
def test_an_attempt_that_was_given_up_is_undone_before_the_next_change_is_true() -> None:
    store = Store()
    write = RecordSet("job").write({"a": b"1", "b": b"2", "c": b"3"}, room=2)
    store.transact(write.ahead[0])
    second = write.begun.write({"a": b"4"}, room=2)
    for transaction in second.ahead:
        store.transact(transaction)
    store.finish(second)
    store.number = second.number
    assert store.read()[1] == {"a": b"4"}


def test_a_change_that_fits_is_one_transaction_and_leaves_nothing_behind() -> None:
    store, records = Store(), RecordSet("job")
    for value in (b"1", b"2", b"3"):
        write = records.write({"workers/w1": value, "workers/w2": b"same" if value == b"1" else None}, ROOM)
        assert not write.ahead
        store.finish(write)
        store.number, records = write.number, write.done
    assert list(store.keys.values()) == [b"3"]


@rule(
    "A transaction is bounded in bytes and operations; anything larger is split, with the head last",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.jobs.job_repository", "EVENT_BYTES = 256 << 10", "EVENT_BYTES = 256 << 20"),
        Edit("shoal_controller.jobs.records", "RECORD_BYTES = 512 << 10", "RECORD_BYTES = 512 << 20"),
    ],
)
def test_no_transaction_of_a_change_is_larger_than_a_store_takes() -> None:
    changed = {f"workers/w{number}": bytes(10_000) for number in range(1000)} | {"plans/1": bytes(3_000_000)}
    write = RecordSet("job").write(changed, ROOM)
    for transaction in (*write.ahead, [HEAD, *write.last]):
        check_transaction([], transaction)
    assert len(write.ahead) > 20 and len(write.done.keys) == 1001


@pytest.mark.parametrize("key", ["/records/job/spec", "/records/job/spec/12/x", "/records/job//1/2"])
def test_a_key_that_nobody_wrote_is_not_guessed(key: str) -> None:
    with pytest.raises(Unreadable, match="is not a Shoal key"):
        records_of("job", {record_key("job", "spec", 1): b"1", key: b"1"}, 1, 0)
