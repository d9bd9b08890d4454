"""The contract of `Store`: every implementation passes all of this, unchanged.

A new implementation is one more entry of `PLACES`. What only one of them promises is in `test_store_embedded.py` and
`tests/integration/test_store_etcd.py`.
"""

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from asynchronous import asynchronous
from etcd_cluster import Cluster, etcd_cluster
from shoal_controller.store.database import HISTORY_REVISIONS
from shoal_controller.store.open import open_store
from shoal_controller.store.store import (
    MAX_OPERATIONS,
    MAX_TRANSACTION_BYTES,
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
from tiers import check

pytestmark = [pytest.mark.xdist_group("stores"), check("starts servers of etcd")]


@dataclass
class Place:
    """Where an empty store is, and what its operator can do to it."""

    url: str
    forget: Callable[[Store], Awaitable[None]]
    """Have it forget the changes of all revisions that were there."""

    async def open(self) -> Store:
        return await open_store(self.url)


def embedded(folder: Path, _: Cluster) -> Place:
    async def forget(store: Store) -> None:
        for number in range(2 * HISTORY_REVISIONS + 1):
            await store.transact([], [Put("/filling", b"%d" % number)])

    return Place(f"embedded:{folder}", forget)


def etcd(_: Path, cluster: Cluster) -> Place:
    """All tests share one etcd, each has a prefix of its own."""

    async def forget(store: Store) -> None:
        await store.transact([], [Put("/filling", b"")])
        await asyncio.to_thread(cluster.compact)

    return Place(f"etcd://{','.join(cluster.addresses)}/test/{secrets.token_hex(8)}", forget)


PLACES = {"embedded": embedded, "etcd": etcd}


@pytest.fixture(scope="session")
def one_etcd(tmp_path_factory):
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def contract(test):
    """Run the test once with every kind of store; its first parameter is an open, empty one, its second, if it is
    called so, the store's `place`.
    """
    wants_place = "place" in inspect.signature(test).parameters

    async def with_store(kind, tmp_path, one_etcd, **given):
        place = PLACES[kind](tmp_path / "store", one_etcd)
        store = await place.open()
        try:
            await test(store, **({"place": place} if wants_place else {}), **given)
        finally:
            await store.close()

    with_store.__name__ = test.__name__
    parameters = [one for one in list(inspect.signature(test).parameters.values())[1:] if one.name != "place"]
    own = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("kind", "tmp_path", "one_etcd")
    ]
    with_store.__signature__ = inspect.Signature(own + parameters)
    return pytest.mark.parametrize("kind", sorted(PLACES))(asynchronous(with_store))


async def now(store: Store) -> int:
    """The store's revision. A shared one has had others before, and may have forgotten them."""
    return (await store.list("/")).revision


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
async def test_a_list_of_many_pages_is_of_one_revision(store):
    keys = [f"/n/{number:04}" for number in range(700)]
    for first in range(0, len(keys), 100):
        await store.transact([], [Put(key, b"old") for key in keys[first : first + 100]])
    listing = asyncio.ensure_future(store.list("/n/"))
    changing = [
        asyncio.ensure_future(store.transact([], [Put(key, b"new") for key in keys[first : first + 100]]))
        for first in range(0, len(keys), 100)
    ]
    found = await listing
    outcomes = await asyncio.gather(*changing)
    assert [entry.key for entry in found.entries] == keys
    for first, outcome in zip(range(0, len(keys), 100), outcomes, strict=True):
        value = b"new" if outcome.revision <= found.revision else b"old"
        assert {entry.value for entry in found.entries[first : first + 100]} == {value}


@contract
async def test_the_first_keys_beyond_a_key_are_listed_however_many_there_are(store):
    for first in range(0, 400, 100):
        await store.transact([], [Put(f"/n/{number:04}", b"") for number in range(first, first + 100)])
    found = (await store.list("/n/", after="/n/0099", limit=200)).entries
    assert [entry.key for entry in found] == [f"/n/{number:04}" for number in range(100, 300)]
    assert len((await store.list("/n/", after="/a")).entries) == 400
    assert (await store.list("/n/", after="/z")).entries == ()


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
        (
            [Put(f"/{n}", bytes(MAX_TRANSACTION_BYTES // 2 + 1)) for n in range(2)],
            f"at most {MAX_TRANSACTION_BYTES} are",
        ),
        ([], "a transaction without operations changes nothing"),
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


@contract
async def test_the_largest_transaction_fits(store):
    keys = [f"/{number:0>511}" for number in range(MAX_OPERATIONS)]
    value = bytes(MAX_TRANSACTION_BYTES // MAX_OPERATIONS)
    assert (await store.transact([Compare(key) for key in keys], [Put(key, value) for key in keys])).succeeded
    assert [entry.key for entry in (await store.list("/")).entries] == keys


# ---- watch


@contract
async def test_a_watch_gives_what_was_and_then_what_comes_each_revision_once(store):
    before = await now(store)
    first = await store.transact([], [Put("/w/b", b"1"), Put("/w/a", b"1"), Put("/x", b"")])
    async with store.watch("/w/", before) as changes:
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
    before = await now(store)
    async with store.watch("/", before) as one, store.watch("/", before) as two:
        await store.transact([], [Put("/a", b"1")])
        assert await anext(one) == await anext(two)


@contract
async def test_a_watch_sees_what_is_written_once_its_context_is_entered(store):
    async with store.watch("/w/", await now(store)) as changes:
        written = await store.transact([], [Put("/w/a", b"1")])
        assert (await anext(changes)).revision == written.revision


@contract
async def test_a_revision_of_a_mebibyte_is_handed_over_whole(store):
    puts = [Put(f"/w/{number:03}", bytes(MAX_TRANSACTION_BYTES // MAX_OPERATIONS)) for number in range(MAX_OPERATIONS)]
    async with store.watch("/w/", await now(store)) as changes:
        written = [(await store.transact([], puts)).revision for _ in range(3)]
        for revision in written:
            found = await anext(changes)
            assert (found.revision, len(found.changes)) == (revision, MAX_OPERATIONS)


@contract
async def test_a_watch_from_a_revision_that_is_forgotten_says_to_list_again(store, place):
    before = await now(store)
    await store.transact([], [Put("/a", b"1")])
    await place.forget(store)
    async with store.watch("/", before) as changes:
        with pytest.raises(Compacted, match=f"after revision {before} .*List the keys again"):
            await anext(changes)
    listing = await store.list("/")
    assert (await store.get("/a")).value == b"1", "the keys as they stand are kept"
    async with store.watch("/", listing.revision) as changes:
        last = await store.transact([], [Put("/a", b"2")])
        assert (await anext(changes)).revision == last.revision


@contract
async def test_an_idle_watch_outlives_what_is_forgotten(store, place):
    async with store.watch("/mine/", await now(store)) as changes:
        coming = asyncio.ensure_future(anext(changes))
        await place.forget(store)
        await store.transact([], [Put("/mine/a", b"")])
        assert (await coming).changes == (Change("/mine/a", b""),)


@contract
async def test_a_watch_whose_context_is_left_ends_for_whoever_else_reads_from_it(store):
    start = await now(store)
    seen, has_seen = [], asyncio.Event()

    async def read(changes) -> None:
        async for one in changes:
            seen.append(one.revision)
            has_seen.set()

    with pytest.raises(StoreError, match="what went wrong"):
        async with store.watch("/", start) as changes:
            reading = asyncio.create_task(read(changes))
            written = await store.transact([], [Put("/a", b"1")])
            await has_seen.wait()
            raise StoreError("what went wrong")
    await reading
    assert seen == [written.revision]
    with pytest.raises(StopAsyncIteration):
        await anext(changes)


@contract
async def test_a_watch_ends_with_an_error_when_its_store_closes(store):
    async with store.watch("/", await now(store)) as changes:
        coming = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await coming


# ---- leases


@contract
async def test_a_lease_is_granted_for_at_least_what_was_asked_for_and_says_until_when(store):
    asked = asyncio.get_running_loop().time()
    async with store.lease(3) as lease:
        assert lease.seconds >= 3
        assert asked + lease.seconds <= lease.valid_until <= asyncio.get_running_loop().time() + lease.seconds
        assert not lease.lost.is_set()


@contract
async def test_a_lease_lives_with_its_context_and_takes_its_keys_with_it(store):
    async with store.lease(2) as lease:
        granted = await store.transact([], [Put("/mine", b"", lease.id), Put("/kept", b"")])
        first = lease.valid_until
        await asyncio.sleep(1.1 * lease.seconds)
        assert lease.valid_until > first and not lease.lost.is_set()
        assert (await store.get("/mine")).lease == lease.id
    async with store.watch("/", granted.revision) as changes:
        assert (await anext(changes)).changes == (Change("/mine", None),)
    assert [entry.key for entry in (await store.list("/")).entries] == ["/kept"]


@contract
async def test_a_lease_whose_store_is_gone_is_lost_and_its_keys_go_in_its_time(store, place):
    async with store.lease(2) as lease:
        written = await store.transact([], [Put("/mine", b"", lease.id)])
        await store.close()
        async with asyncio.timeout(60):
            await lease.lost.wait()
    again = await place.open()
    try:
        async with again.watch("/", written.revision) as changes:
            assert (await anext(changes)).changes == (Change("/mine", None),)
    finally:
        await again.close()


@contract
async def test_the_keys_of_a_lease_are_gone_when_its_context_has_ended(store):
    async with store.lease(100) as lease:
        await store.transact([], [Put("/mine", b"", lease.id)])
    assert await store.get("/mine") is None, "whoever waits for them need not wait for the lease's time"


@contract
async def test_a_key_written_again_without_its_lease_stays(store):
    async with store.lease(100) as lease:
        await store.transact([], [Put("/mine", b"", lease.id)])
        await store.transact([], [Put("/mine", b"now for good")])
    assert (await store.get("/mine")).value == b"now for good"


@contract
async def test_nothing_is_written_on_a_lease_that_is_gone(store):
    async with store.lease(100) as lease:
        pass
    assert lease.lost.is_set()
    with pytest.raises(LeaseGone):
        await store.transact([], [Put("/kept", b""), Put("/mine", b"", lease.id)])
    assert (await store.list("/")).entries == ()


@contract
async def test_a_closed_store_refuses_every_request(store):
    await store.close()
    await store.close()
    for request in (store.get("/a"), store.list("/"), store.transact([], [Delete("/a")])):
        with pytest.raises(StoreError, match="is closed"):
            await request
    for context in (store.lease(2), store.watch("/", 0)):
        with pytest.raises(StoreError, match="is closed"):
            async with context as changes:
                await anext(changes)
