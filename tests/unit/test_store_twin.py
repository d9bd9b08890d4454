"""The store against a dumb twin: a dictionary and a list, for random transactions and restarts."""

import asyncio
import tempfile
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Change, Changes, Compare, Delete, Put

KEYS = st.sampled_from(["/a", "/a/b", "/a/c", "/b"])
PUTS = st.builds(Put, KEYS, st.binary(max_size=3))
OPERATIONS = st.lists(PUTS | st.builds(Delete, KEYS), min_size=1, max_size=4, unique_by=lambda operation: operation.key)
COMPARES = st.lists(st.tuples(KEYS, st.sampled_from(["as it is", "absent", "older"])), max_size=2)
STEPS = st.lists(st.tuples(COMPARES, OPERATIONS) | st.just("restart"), max_size=12)


@dataclass
class Twin:
    """What a store must be, without any of its care."""

    revision: int = 0
    keys: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)
    history: list[Changes] = field(default_factory=list)

    def modified(self, key: str) -> int:
        return self.keys[key][2] if key in self.keys else 0

    def transact(self, compares, operations) -> bool:
        if any(self.modified(compare.key) != compare.modified for compare in compares):
            return False
        changed = [operation for operation in operations if isinstance(operation, Put) or operation.key in self.keys]
        if changed:
            self.revision += 1
        for operation in changed:
            if isinstance(operation, Put):
                created = self.keys[operation.key][1] if operation.key in self.keys else self.revision
                self.keys[operation.key] = (operation.value, created, self.revision)
            else:
                del self.keys[operation.key]
        if changed:
            changes = (Change(one.key, one.value if isinstance(one, Put) else None) for one in changed)
            self.history.append(Changes(self.revision, tuple(sorted(changes, key=lambda change: change.key))))
        return True

    def compare(self, key: str, how: str) -> Compare:
        return Compare(key, {"as it is": self.modified(key), "absent": 0, "older": max(self.modified(key) - 1, 0)}[how])


async def play(steps, directory) -> None:
    store, twin = await open_store(f"embedded:{directory}"), Twin()
    for step in steps:
        if step == "restart":
            await store.close()
            store = await open_store(f"embedded:{directory}")
            continue
        compares, operations = [twin.compare(*compare) for compare in step[0]], step[1]
        outcome = await store.transact(compares, operations)
        assert outcome.succeeded == twin.transact(compares, operations)
        assert outcome.revision == twin.revision
    listing = await store.list("/")
    found = {entry.key: (entry.value, entry.created, entry.modified) for entry in listing.entries}
    assert (listing.revision, found) == (twin.revision, twin.keys)
    below = {key for key in twin.keys if key.startswith("/a/")}
    assert {entry.key for entry in (await store.list("/a/")).entries} == below
    async with store.watch("/", 0) as changes:
        assert [await anext(changes) for _ in twin.history] == twin.history
    await store.close()


@settings(max_examples=examples(40), deadline=None)
@given(STEPS)
def test_the_store_does_what_a_dictionary_and_a_list_would(steps) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(steps, directory))
