"""What the etcd store promises beyond the contract, on real servers: faults of a cluster, users, TLS, bad starts."""

import asyncio
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from asynchronous import asynchronous
from etcd_cluster import PASSWORD, Cluster, etcd_cluster
from etcd_status import server_of_version
from integration.proxy import Proxy
from matrices import shortened
from ports import free_port
from pydantic import SecretStr
from rule import holds
from shoal_controller.server import serve
from shoal_controller.settings import Settings
from shoal_controller.store import etcd_store
from shoal_controller.store.etcd_store import EtcdAccess
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Change, Compacted, Compare, Put, UnknownOutcome
from shoal_protos.errors import StoreError, UserError
from tiers import promise


def access(cluster: Cluster, password: str = PASSWORD) -> EtcdAccess:
    files = (cluster.folder / name for name in ("ca.pem", "client.pem", "client.key"))
    return EtcdAccess(*files, SecretStr(password))


@pytest.fixture
def three(tmp_path):
    """Three servers with mutual TLS, and a user who may only use what is below /shoal."""
    with etcd_cluster(tmp_path / "three", 3, tls=True) as cluster:
        cluster.ask_for_users("/shoal/")
        yield cluster


@pytest.fixture
def alone(tmp_path):
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster


@asynccontextmanager
async def opened(url: str, etcd: EtcdAccess | None = None):
    store = await open_store(url, etcd=etcd)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def controller(settings: Settings):
    async with (
        serve(settings) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, verify=False, timeout=60) as client,
    ):
        yield client


def url_of(cluster: Cluster, prefix: str, user: str = "shoal@") -> str:
    return f"etcd://{user}{','.join(cluster.addresses)}{prefix}"


# ---- faults


async def count(store, until: asyncio.Event) -> tuple[int, int]:
    """Count up in one key, guarded as the shell's writes are, until told to stop: the last number, and how many writes
    had to be looked up.
    """
    number, revision, doubts = 0, 0, 0
    while not until.is_set():
        value = b"%d" % (number + 1)
        try:
            outcome = await store.transact([Compare("/number", revision)], [Put("/number", value)])
        except UnknownOutcome:
            doubts += 1
        except StoreError:
            continue
        else:
            assert outcome.succeeded, "nobody else writes, and what may have been written is an unknown outcome"
            number, revision = number + 1, outcome.revision
            continue
        with suppress(StoreError):
            found = await store.get("/number")
            if found is not None and found.value == value:
                number, revision = number + 1, found.modified
    return number, doubts


class Seen:
    """What a watch has seen of the number, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._news = asyncio.Event()

    async def look(self, changes) -> None:
        async for one in changes:
            self.numbers.append(int(one.changes[0].value))
            self._news.set()

    async def more(self, by: int = 5) -> None:
        """Until there are so many more."""
        least = len(self.numbers) + by
        async with asyncio.timeout(100):
            while len(self.numbers) < least:
                self._news.clear()
                await self._news.wait()


FAULTS = ["each killed in turn", "leader killed", "leader frozen"]


@pytest.mark.parametrize("fault", shortened(FAULTS, "each killed in turn", "leader frozen"))
@asynchronous
@promise("a store of etcd", "leader frozen")
async def test_nothing_is_lost_or_written_twice_whatever_happens_to_one_of_three_servers(three, fault):
    async with opened(url_of(three, "/shoal"), access(three)) as store:
        end, seen = asyncio.Event(), Seen()

        async with store.watch("/number", (await store.list("/")).revision) as changes:
            looking = asyncio.create_task(seen.look(changes), name="looking")
            counting = asyncio.create_task(count(store, end), name="counting")
            await seen.more()
            leader = await asyncio.to_thread(three.leader)
            for node in three.nodes if fault == "each killed in turn" else [leader]:
                if fault == "leader frozen":
                    await asyncio.to_thread(node.freeze)
                    await seen.more()
                    node.thaw()
                else:
                    await asyncio.to_thread(node.kill)
                    await seen.more()
                    await asyncio.to_thread(three.start, node)
                await seen.more()
            end.set()
            number, _ = await counting
            await seen.more(number - len(seen.numbers))
            looking.cancel()
            await asyncio.wait([looking])
        assert seen.numbers == list(range(1, number + 1))


@asynchronous
async def test_a_token_that_the_server_has_forgotten_is_replaced_by_a_new_login(tmp_path):
    with etcd_cluster(tmp_path / "etcd") as cluster:
        cluster.ask_for_users("/shoal/")
        async with opened(url_of(cluster, "/shoal"), EtcdAccess(password=SecretStr(PASSWORD))) as store:
            first = await store.transact([], [Put("/a", b"1")])
            async with store.watch("/", first.revision) as changes, store.lease(60) as lease:
                coming = asyncio.ensure_future(anext(changes))
                await asyncio.to_thread(cluster.nodes[0].kill)
                await asyncio.to_thread(cluster.start)
                assert (await store.get("/a")).value == b"1"
                await store.transact([], [Put("/a", b"2", lease.id)])
                assert (await coming).changes == (Change("/a", b"2"),)


@asynchronous
async def test_a_server_that_is_away_is_a_store_error_in_time_and_then_all_goes_on(alone):
    async with opened(url_of(alone, "/shoal", "")) as store:
        first = await store.transact([], [Put("/a", b"1")])
        async with store.watch("/", first.revision) as changes:
            coming = asyncio.ensure_future(anext(changes))
            await asyncio.to_thread(alone.nodes[0].kill)
            with pytest.raises(StoreError, match=rf"^the store etcd://{alone.addresses[0]}/shoal cannot be read "):
                await store.get("/a")
            with pytest.raises(StoreError) as error:
                await store.transact([], [Put("/b", b"1")])
            assert not isinstance(error.value, UnknownOutcome), "nothing was sent, so surely nothing has happened"
            assert not coming.done(), "a watch waits"
            await asyncio.to_thread(alone.start)
            last = await store.transact([], [Put("/a", b"2")])
            assert (await coming).revision == last.revision


@asynchronous
async def test_whoever_waits_for_a_store_that_is_away_hears_of_its_closing(alone):
    store = await open_store(url_of(alone, "/shoal", ""))
    start = (await store.list("/")).revision
    async with store.watch("/", start) as changes, store.lease(60) as lease:
        coming = asyncio.ensure_future(anext(changes))
        await asyncio.to_thread(alone.nodes[0].kill)
        reading = asyncio.ensure_future(store.get("/a"))
        done, _ = await asyncio.wait([coming, reading], timeout=1)
        assert not done
        await store.close()
        for waiting in (coming, reading):
            with pytest.raises(StoreError, match="is closed"):
                await waiting
    assert lease.lost.is_set()


@asynchronous
async def test_a_frozen_server_leaves_writes_unknown_and_a_lease_lost_in_its_time(alone):
    loop = asyncio.get_running_loop()
    async with opened(url_of(alone, "/shoal", "")) as store, store.lease(2) as lease:
        await store.transact([], [Put("/a", b"1", lease.id)])
        await asyncio.to_thread(alone.nodes[0].freeze)
        try:
            with pytest.raises(UnknownOutcome):
                await store.transact([], [Put("/b", b"1")])
            async with asyncio.timeout(60):
                await lease.lost.wait()
            assert loop.time() >= lease.valid_until
        finally:
            alone.nodes[0].thaw()


@asynchronous
async def test_what_was_forgotten_while_a_watch_was_cut_off_is_said(alone):
    proxy = Proxy(int(alone.addresses[0].partition(":")[2]))
    with proxy.running():
        async with (
            opened(f"etcd://127.0.0.1:{proxy.port}/shoal") as store,
            opened(url_of(alone, "/shoal", "")) as other,
        ):
            first = await store.transact([], [Put("/a", b"1")])
            async with store.watch("/", first.revision) as changes:
                coming = asyncio.ensure_future(anext(changes))
                await asyncio.to_thread(alone.nodes[0].kill)
                proxy.hold()
                await asyncio.to_thread(alone.start)
                for number in range(3):
                    await other.transact([], [Put("/a", b"%d" % number)])
                await asyncio.to_thread(alone.compact)
                proxy.let_go()
                with pytest.raises(Compacted, match="List the keys again"):
                    await coming


@holds("A watch of a store whose revisions")
@asynchronous
async def test_a_watch_of_a_store_that_was_restored_from_a_backup_says_to_list_again(alone):
    """Its revisions begin again before those that were seen: etcd would hold all changes back until it is there."""
    async with opened(url_of(alone, "/shoal", "")) as store:
        await store.transact([], [Put("/a", b"1")])
        await asyncio.to_thread(alone.save)
        for number in range(20):
            last = await store.transact([], [Put("/a", b"%d" % number)])
        async with store.watch("/", last.revision) as changes:
            await asyncio.to_thread(alone.restore)
            with pytest.raises(Compacted, match="List the keys again"):
                await anext(changes)
        listing = await store.list("/")
        assert [one.value for one in listing.entries] == [b"1"] and listing.revision < last.revision
        async with store.watch("/", listing.revision) as changes:
            written = await store.transact([], [Put("/a", b"2")])
            assert (await anext(changes)).revision == written.revision


@asynchronous
async def test_a_store_that_is_full_refuses_writes_and_is_waited_for_at_the_start(tmp_path):
    room = ["--quota-backend-bytes", str(8 << 20)]
    with etcd_cluster(tmp_path / "etcd", arguments=room) as cluster:
        async with opened(url_of(cluster, "/shoal", "")) as store:
            with pytest.raises(StoreError, match="database space exceeded") as full:
                for _ in range(20):
                    await store.transact([], [Put("/a", b"1" * (1 << 20))])
            assert not isinstance(full.value, UnknownOutcome)
            opening = asyncio.create_task(open_store(url_of(cluster, "/shoal", "")))
            done, _ = await asyncio.wait([opening], timeout=1)
            assert not done
            await asyncio.to_thread(cluster.compact)
            await asyncio.to_thread(cluster.ctl, "defrag")
            await asyncio.to_thread(cluster.ctl, "alarm", "disarm")
            await (await opening).close()
            await store.transact([], [Put("/a", b"1")])


@asynchronous
async def test_what_etcd_sends_in_fragments_is_handed_over_by_whole_revisions(alone):
    async with opened(url_of(alone, "/shoal", "")) as store:
        start = (await store.list("/")).revision
        keys = [f"/w/{number}" for number in range(4)]
        written = [
            (await store.transact([], [Put(key, bytes([number]) * 250_000) for key in keys])).revision
            for number in range(8)
        ]
        async with store.watch("/w/", start) as changes:  # 8 MB, which etcd sends in pieces of 2 MiB at most
            for revision in written:
                found = await anext(changes)
                assert (found.revision, [one.key for one in found.changes]) == (revision, keys)


@asynchronous
async def test_a_controller_whose_store_is_away_answers_reads_refuses_writes_and_goes_on_with_it(alone, tmp_path):
    settings = Settings(
        http="127.0.0.1:0", grpc="127.0.0.1:0", store=url_of(alone, "/shoal", ""), data=tmp_path, log_level="error"
    )
    async with (
        serve(settings) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, verify=False, timeout=60) as client,
    ):
        assert (await client.post("/v1/jobs", json={"job": "a"})).status_code == 202
        await asyncio.to_thread(alone.nodes[0].kill)
        refused = await client.post("/v1/jobs/a/scale", json={"workers": 1}, timeout=100)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert f"etcd at {alone.addresses[0]} cannot be reached" in refused.json()["detail"]
        shown = await client.get("/v1/jobs/a")
        assert shown.status_code == 200 and "nothing is decided until it does" in shown.json()["reason"]
        assert int(shown.headers["age"]) >= 1
        assert (await client.get("/readyz?store")).status_code == 503
        assert [(await client.get(path)).status_code for path in ("/readyz", "/healthz")] == [200, 200]
        await asyncio.to_thread(alone.start)
        while (await client.get("/readyz?store")).status_code != 200:
            continue
        assert (await client.post("/v1/jobs/a/scale", json={"workers": 2}, timeout=100)).status_code == 202
    async with (
        serve(settings) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, verify=False, timeout=60) as client,
    ):
        assert (await client.get("/v1/jobs/a")).json()["workers"]["wanted"] == 2
        events = (await client.get("/v1/jobs/a/events")).json()["events"]
        assert [one["message"] for one in events if "scaled" in one["message"]], events


# ---- the start


async def refusal(url: str, etcd: EtcdAccess | None = None) -> str:
    with pytest.raises(UserError) as error:
        await open_store(url, etcd=etcd)
    return str(error.value)


@asynchronous
async def test_a_wrong_password_a_missing_right_and_no_user_are_one_sentence_each(three):
    place = f"{','.join(three.addresses)}"
    sentence = await refusal(f"etcd://shoal@{place}/shoal/a", access(three, "wrong"))
    assert sentence.startswith(f"store etcd://{place}/shoal/a: etcd at localhost:")
    assert sentence.endswith("authentication failed, invalid user ID or password (to the login of user shoal)")
    sentence = await refusal(f"etcd://shoal@{place}/other", access(three))
    assert sentence.startswith(f"store etcd://{place}/other: etcd at localhost:")
    assert sentence.endswith("; the user needs a role that may read and write all keys with the prefix /other/")
    sentence = await refusal(f"etcd://{place}/shoal", EtcdAccess(*list_of_files(three)))
    assert sentence.endswith("asks for a user and a password")


def list_of_files(cluster: Cluster):
    return [cluster.folder / name for name in ("ca.pem", "client.pem", "client.key")]


@asynchronous
async def test_a_user_who_may_only_read_is_refused(tmp_path):
    with etcd_cluster(tmp_path / "etcd") as cluster:
        cluster.ask_for_users("/shoal/")
        cluster.ctl("role", "revoke-permission", "--prefix=true", "shoal", "/shoal/")
        cluster.ctl("role", "grant-permission", "--prefix=true", "shoal", "read", "/shoal/")
        sentence = await refusal(url_of(cluster, "/shoal"), EtcdAccess(password=SecretStr(PASSWORD)))
        assert sentence.endswith("; the user needs a role that may read and write all keys with the prefix /shoal/")


@asynchronous
async def test_an_older_server_is_refused_by_its_address_and_version():
    with server_of_version("3.3.27") as address:
        sentence = await refusal(f"etcd://{address}/shoal")
    expected = f"store etcd://{address}/shoal: etcd at {address} has version '3.3.27'; expected 3.4 or newer"
    assert sentence == expected


@asynchronous
async def test_one_older_server_beside_good_ones_is_refused_by_its_address(alone):
    with server_of_version("3.3.27") as address:
        sentence = await refusal(f"etcd://{alone.addresses[0]},{address}/shoal")
    assert sentence.endswith(f": etcd at {address} has version '3.3.27'; expected 3.4 or newer")


@asynchronous
async def test_a_user_for_an_etcd_without_users_is_refused(alone):
    sentence = await refusal(url_of(alone, "/shoal"), EtcdAccess(password=SecretStr("x")))
    assert sentence.endswith("authentication is not enabled (to the login of user shoal)")


class Warnings:
    """In the place of the store's log, whatever an earlier test has configured."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, str]] = []

    def warning(self, event: str, error: str) -> None:
        self.errors.append((event, error))


@pytest.fixture
def warnings(monkeypatch):
    monkeypatch.setattr(etcd_store, "log", found := Warnings())
    return found.errors


@asynchronous
async def test_an_endpoint_that_cannot_be_reached_beside_good_ones_is_said_and_the_others_are_used(alone, warnings):
    nobody = f"127.0.0.1:{free_port()}"
    async with opened(f"etcd://{nobody},{alone.addresses[0]}/shoal") as store:
        await store.transact([], [Put("/a", b"")])
    [(event, error)] = warnings
    assert "going on with the others" in event and error.startswith(f"etcd at {nobody} cannot be reached: ")


@asynchronous
async def test_a_store_that_cannot_be_reached_at_the_start_is_said_once_and_waited_for(alone, warnings):
    await asyncio.to_thread(alone.nodes[0].kill)
    opening = asyncio.create_task(open_store(url_of(alone, "/shoal", "")), name="opening")
    done, _ = await asyncio.wait([opening], timeout=3)
    assert not done
    await asyncio.to_thread(alone.start)
    store = await opening
    await store.transact([], [Put("/a", b"")])
    await store.close()
    [(event, error)] = warnings
    assert "waiting for it" in event and error.startswith(f"etcd at {alone.addresses[0]} cannot be reached: ")
