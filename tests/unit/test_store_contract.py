"""The contract of `Store`: every implementation passes all of this, unchanged.

A new implementation is one more entry of `STORES`. What only the embedded one promises (locks, files, kill -9) is in
`test_store_embedded.py`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from asynchronous import asynchronous
from shoal_controller.store.open import open_store
from shoal_controller.store.store import (
    MAX_OPERATIONS,
    MAX_VALUE_BYTES,
    Change,
    Changes,
    Compacted,
    Compare,
    Delete,
    LeaseGone,
    Put,
    Store,
)
from shoal_protos.errors import StoreError


@asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[Store]:
    store = await open_store(f"embedded:{directory}")
    try:
        yield store
    finally:
        await store.close()


STORES: dict[str, Callable[[Path], AbstractAsyncContextManager[Store]]] = {"embedded": embedded}


def contract(test):
    """Run the test once with every kind of store; its first parameter is an open, empty one."""

    async def with_store(kind, tmp_path, **given):
        async with STORES[kind](tmp_path / "store") as store:
            await test(store, **given)

    with_store.__name__, parameters = test.__name__, list(inspect.signature(test).parameters.values())[1:]
    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("kind", "tmp_path")]
    with_store.__signature__ = inspect.Signature(own + parameters)
    return pytest.mark.parametrize("kind", sorted(STORES))(asynchronous(with_store))


@contract
async def test_a_key_that_was_never_written_is_none(store):
    assert await store.get("/nothing") is None


@contract
async def test_a_written_key_has_its_value_and_the_revisions_that_made_it(store):
    first = await store.transact([], [Put("/a", b"1")])
    await store.transact([], [Put("/b", b"x")])
    third = await store.transact([], [Put("/a", b"2")])
    entry = await store.get("/a")
    assert (entry.value, entry.created, entry.modified) == (b"2", first.revision, third.revision)
    assert first.revision < third.revision


@contract
async def test_a_key_written_again_after_its_deletion_is_a_new_one(store):
    await store.transact([], [Put("/a", b"1")])
    await store.transact([], [Delete("/a")])
    again = await store.transact([], [Put("/a", b"2")])
    assert (await store.get("/a")).created == again.revision


@contract
async def test_any_bytes_come_back_as_they_were(store):
    value = bytes(range(256)) * 16
    await store.transact([], [Put("/a", value), Put("/empty", b"")])
    assert (await store.get("/a")).value == value
    assert (await store.get("/empty")).value == b""


@contract
async def test_a_list_has_the_keys_of_its_prefix_in_order_and_no_others(store):
    await store.transact([], [Put(key, b"") for key in ("/jobs/b", "/jobs/a", "/jobs", "/jobs0", "/jobz/a", "/jobs/~")])
    listing = await store.list("/jobs/")
    assert [entry.key for entry in listing.entries] == ["/jobs/a", "/jobs/b", "/jobs/~"]


@contract
async def test_a_list_can_be_read_in_pages(store):
    await store.transact([], [Put(f"/n/{number:02}", b"") for number in range(10)])
    pages, after = [], ""
    while (page := await store.list("/n/", after=after, limit=4)).entries:
        pages.append(len(page.entries))
        after = page.entries[-1].key
    assert pages == [4, 4, 2]


@contract
async def test_a_lists_revision_is_the_one_to_watch_from(store):
    await store.transact([], [Put("/a", b"1")])
    listing = await store.list("/")
    await store.transact([], [Put("/a", b"2")])
    async with store.watch("/", listing.revision) as changes:
        assert (await anext(changes)).changes == (Change("/a", b"2"),)


@contract
async def test_a_transaction_writes_all_or_nothing(store):
    await store.transact([], [Put("/a", b"1")])
    refused = await store.transact([Compare("/a", 0)], [Put("/b", b""), Delete("/a")])
    assert not refused.succeeded
    assert await store.get("/b") is None
    assert (await store.get("/a")).value == b"1"


@contract
async def test_a_refused_transaction_takes_no_revision(store):
    before = await store.transact([], [Put("/a", b"1")])
    refused = await store.transact([Compare("/a", 0)], [Put("/a", b"2")])
    assert refused.revision == before.revision


@contract
async def test_a_comparison_holds_only_at_the_revision_that_wrote_the_key_last(store):
    first = await store.transact([], [Put("/a", b"1")])
    second = await store.transact([Compare("/a", first.revision)], [Put("/a", b"2")])
    assert second.succeeded
    assert not (await store.transact([Compare("/a", first.revision)], [Put("/a", b"3")])).succeeded
    assert (await store.get("/a")).value == b"2"


@contract
async def test_of_many_that_create_one_key_at_once_exactly_one_succeeds(store):
    async def create(name):
        return (await store.transact([Compare("/leader", 0)], [Put("/leader", name)])).succeeded

    outcomes = await asyncio.gather(*(create(f"{number}".encode()) for number in range(20)))
    assert outcomes.count(True) == 1
    assert (await store.get("/leader")).value == f"{outcomes.index(True)}".encode()


@contract
async def test_a_transaction_may_only_compare(store):
    await store.transact([], [Put("/a", b"1")])
    assert not (await store.transact([Compare("/a", 0)], [])).succeeded
    assert (await store.transact([Compare("/b", 0)], [])).succeeded


@contract
async def test_deleting_what_is_not_there_changes_nothing(store):
    before = (await store.transact([], [Put("/a", b"")])).revision
    outcome = await store.transact([], [Delete("/b")])
    assert outcome.succeeded and outcome.revision == before


@pytest.mark.parametrize(
    ("operations", "sentence"),
    [
        ([Put("/a", b""), Delete("/a")], "writes the key /a twice"),
        ([Put("/a", bytes(MAX_VALUE_BYTES + 1))], f"at most {MAX_VALUE_BYTES} are allowed"),
        ([Put(f"/{number}", b"") for number in range(MAX_OPERATIONS + 1)], f"at most {MAX_OPERATIONS} of each"),
        ([Put("a", b"")], "keys begin with /"),
        ([Put("/ä", b"")], "printable ASCII"),
    ],
)
@contract
async def test_what_no_store_can_carry_out_is_refused_in_one_sentence(store, operations, sentence):
    with pytest.raises(StoreError, match=sentence):
        await store.transact([], operations)
    assert (await store.list("/")).entries == ()


@contract
async def test_the_largest_value_fits(store):
    await store.transact([], [Put("/a", bytes(MAX_VALUE_BYTES))])
    assert len((await store.get("/a")).value) == MAX_VALUE_BYTES


# ---- watch


@contract
async def test_a_watch_gives_what_was_and_then_what_comes_each_revision_once(store):
    first = await store.transact([], [Put("/w/a", b"1"), Put("/w/b", b"1"), Put("/x", b"")])
    async with store.watch("/w/", 0) as changes:
        assert await anext(changes) == Changes(first.revision, (Change("/w/a", b"1"), Change("/w/b", b"1")))
        coming = asyncio.ensure_future(anext(changes))
        await store.transact([], [Put("/x", b"other prefix")])
        last = await store.transact([], [Delete("/w/a")])
        assert await coming == Changes(last.revision, (Change("/w/a", None),))


@contract
async def test_a_watch_from_a_revision_misses_nothing_and_repeats_nothing(store):
    revisions = [(await store.transact([], [Put("/k", f"{n}".encode())])).revision for n in range(200)]
    async with store.watch("/", revisions[9]) as changes:
        seen = [(await anext(changes)).revision for _ in range(190)]
    assert seen == revisions[10:]


@contract
async def test_watches_do_not_take_from_each_other(store):
    async with store.watch("/", 0) as one, store.watch("/", 0) as two:
        await store.transact([], [Put("/a", b"1")])
        assert await anext(one) == await anext(two)


@contract
async def test_a_watch_from_a_compacted_revision_says_to_list_again(store):
    for number in range(5):
        revision = (await store.transact([], [Put("/a", f"{number}".encode())])).revision
    await store.compact(revision - 1)
    async with store.watch("/", 0) as changes:
        with pytest.raises(Compacted, match="List the keys again"):
            await anext(changes)
    async with store.watch("/", revision - 1) as changes:
        assert (await anext(changes)).revision == revision


@contract
async def test_compaction_keeps_the_keys_as_they_stand(store):
    revision = (await store.transact([], [Put("/a", b"1")])).revision
    await store.compact(revision)
    assert (await store.get("/a")).value == b"1"


@contract
async def test_an_idle_watch_outlives_a_compaction(store):
    revision = (await store.transact([], [Put("/other", b"1")])).revision
    async with store.watch("/mine/", revision) as changes:
        coming = asyncio.ensure_future(anext(changes))
        for number in range(5):
            revision = (await store.transact([], [Put("/other", f"{number}".encode())])).revision
            await asyncio.sleep(0)
        await store.get("/other")  # the watch, which reads in the same order, has caught up
        await store.compact(revision)
        await store.transact([], [Put("/mine/a", b"")])
        assert (await coming).changes == (Change("/mine/a", b""),)


@contract
async def test_a_watch_ends_with_an_error_when_its_store_closes(store):
    async with store.watch("/", 0) as changes:
        coming = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await coming


# ---- leases


@contract
async def test_a_lease_that_gives_no_sign_of_life_takes_its_keys_with_it(store):
    lease = await store.grant(0.05)
    granted = await store.transact([], [Put("/mine", b"", lease), Put("/kept", b"")])
    async with store.watch("/", granted.revision) as changes, asyncio.timeout(5):
        assert (await anext(changes)).changes == (Change("/mine", None),)
    assert [entry.key for entry in (await store.list("/")).entries] == ["/kept"]
    with pytest.raises(LeaseGone):
        await store.keep_alive(lease)


@contract
async def test_a_lease_lives_as_long_as_it_gives_signs_of_life(store):
    lease, other = await store.grant(0.4), await store.grant(0.8)
    granted = await store.transact([], [Put("/mine", b"", lease), Put("/other", b"", other)])

    async def live():
        while True:
            await store.keep_alive(lease)
            await asyncio.sleep(0.02)

    living = asyncio.ensure_future(live())
    try:
        async with store.watch("/", granted.revision) as changes, asyncio.timeout(5):
            assert (await anext(changes)).changes == (Change("/other", None),)
        assert (await store.get("/mine")).lease == lease
    finally:
        living.cancel()


@contract
async def test_a_revoked_lease_takes_its_keys_at_once_and_again_is_no_error(store):
    lease = await store.grant(100)
    await store.transact([], [Put("/mine", b"", lease)])
    await store.revoke(lease)
    assert await store.get("/mine") is None
    await store.revoke(lease)


@contract
async def test_a_key_written_again_without_its_lease_stays(store):
    lease = await store.grant(100)
    await store.transact([], [Put("/mine", b"", lease)])
    await store.transact([], [Put("/mine", b"now for good")])
    await store.revoke(lease)
    assert (await store.get("/mine")).value == b"now for good"


@contract
async def test_nothing_is_written_on_a_lease_that_is_gone(store):
    lease = await store.grant(100)
    await store.revoke(lease)
    with pytest.raises(LeaseGone):
        await store.transact([], [Put("/kept", b""), Put("/mine", b"", lease)])
    assert (await store.list("/")).entries == ()
