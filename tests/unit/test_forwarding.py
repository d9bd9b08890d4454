"""A controller that follows: what it hands on to the one that leads, and what becomes of a request when that one is
silent, gone, or replaced meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from api_port import NO_JOBS, TRAIN, figures, serving
from asynchronous import asynchronous
from ports import free_port
from rule import Edit, holds, rule
from shoal_controller.access.client_tls import ClientTls
from shoal_controller.access.token_register import TokenRegister
from shoal_controller.api import forwarding
from shoal_controller.api.app import ApiSettings, build_app
from shoal_controller.api.neighbours import Neighbours
from shoal_controller.api.web import Web
from shoal_controller.core.machine.durable import Durable
from shoal_controller.jobs.job_repository import new_repository
from shoal_controller.jobs.ports import Outside
from shoal_controller.jobs.shell import Shell
from shoal_controller.jobs.streams import Streams
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.election import LEADER, ControllerPlace, Election, Leadership
from shoal_controller.leadership.introductions import Introductions
from shoal_controller.store.embedded import EmbeddedStore
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Delete, Put
from shoal_protos.errors import StoreError
from small_machine import SPEC
from tiers import check

pytestmark = check("serves REST on real ports")

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Follower:
    """A real port, a real election, and a leader that the test names."""

    def __init__(self, store, client) -> None:
        self.store = store
        self.client = client
        self.controller = ControllerState()
        self.election = Election(store, ControllerPlace("me", "me:1", "me:2"), self._term_of)
        self.controller.join(store, self.election, Introductions("me", "5" * 64))

    async def _term_of(self, place: ControllerPlace) -> int:
        return 0

    async def follow(self, port: int, name: str = "leader") -> None:
        """Returns when it takes the one at this port for the leader."""
        place = ControllerPlace(name, f"127.0.0.1:{port}", "leader:2")
        await self.store.transact([], [Put(LEADER, place.encoded())])
        while self.controller.other != place:
            await self.store.get(LEADER)

    @asynccontextmanager
    async def lead(self, leadership: Leadership) -> AsyncIterator[None]:
        shell = Shell(self.store)
        shell.connect(Outside(Streams(), {}, self._plan))
        await shell.start()
        self.controller.lead(leadership, shell)
        try:
            yield
        finally:
            self.controller.leave()
            await shell.stop()

    async def _plan(self, question):
        raise AssertionError("nothing is planned here")


@asynccontextmanager
async def following(directory, port: int):
    """A controller that follows the one at this port."""
    store = await open_store(f"embedded:{directory / 'follower'}")
    await store.transact([], [Put(LEADER, ControllerPlace("leader", f"127.0.0.1:{port}", "leader:2").encoded())])
    web, tokens = Web("127.0.0.1", 0), TokenRegister(None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{web.port}", trust_env=False, verify=False, timeout=20
    ) as client:
        follower = Follower(store, client)
        standing = asyncio.create_task(follower.election.run(follower.lead))
        app = build_app(follower.controller, figures, ApiSettings(2), tokens, Neighbours(ClientTls(None)))
        await web.start(app, lambda error: None)
        await follower.follow(port)
        try:
            yield follower
        finally:
            standing.cancel()
            await asyncio.wait([standing])
            await web.stop()
            await store.close()


@asynccontextmanager
async def answering(answer: Answer):
    """The port of whatever answers so."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@rule(
    "A follower asks the leader for the very path that it was asked for: one that is made of it anew may be "
    "another, or none",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.leadership.introductions",
        'target = scope["raw_path"] + ',
        'target = scope["path"].encode() + ',
    ),
)
@pytest.mark.parametrize("name", ["train%3Fx", "train%23x", "train%2Fscale", "train%00", "..%2Ftokens"])
@asynchronous
async def test_a_path_reaches_the_leader_as_it_was_sent(tmp_path, name):
    async with serving(tmp_path) as api, following(tmp_path, api.port) as follower:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for method in ("GET", "DELETE"):
            path = f"/v1/jobs/{name}?after=0"
            direct, forwarded = await api.client.request(method, path), await follower.client.request(method, path)
            assert (forwarded.status_code, forwarded.text) == (direct.status_code, direct.text)
        assert api.shell.view("train").phase == "waiting", "no other job was deleted"


@asynchronous
async def test_a_body_that_is_too_large_is_refused_as_the_leader_refuses_it(tmp_path):
    async def body():
        for _ in range(5):
            yield b" " * 65536

    async with serving(tmp_path) as api, following(tmp_path, api.port) as follower:
        direct, forwarded = [await one.post("/v1/jobs", content=body()) for one in (api.client, follower.client)]
        assert (forwarded.status_code, forwarded.text) == (direct.status_code, direct.text)
        assert direct.status_code == 413


@holds("A leader that does not answer is")
@asynchronous
async def test_a_change_waits_for_the_next_leader_where_the_last_one_is_gone(tmp_path):
    async with following(tmp_path, free_port()) as follower:
        asked = asyncio.create_task(follower.client.post("/v1/jobs", json=TRAIN))
        done, _ = await asyncio.wait([asked], timeout=0.5)
        assert not done, asked.result().text
        await follower.store.transact([], [Delete(LEADER)])  # as at the end of its lease
        assert (await asked).status_code == 202


@asynchronous
async def test_a_change_that_waits_for_a_leader_is_told_at_once_that_its_controller_ends(tmp_path, monkeypatch):
    async def never(self, lease):
        await asyncio.Event().wait()

    monkeypatch.setattr(Election, "_win", never)
    monkeypatch.setattr(forwarding, "ELECTION_SECONDS", 3600.0)  # the client waits for 20
    async with following(tmp_path, free_port()) as follower:
        await follower.store.transact([], [Delete(LEADER)])
        asked = asyncio.create_task(follower.client.post("/v1/jobs/train/pause"))
        done, _ = await asyncio.wait([asked], timeout=0.3)
        assert not done, asked.result().text
        follower.controller.end()
        answer = await asked
        assert answer.status_code == 503 and answer.json()["code"] == "not_leading"
        assert answer.json()["detail"] == "this controller is shutting down; try again once a controller runs"
        ready = await follower.client.get("/readyz")
        assert (ready.status_code, ready.json()["detail"]) == (503, "this controller is shutting down")


@holds("A leader that does not answer is")
@asynchronous
async def test_a_change_waits_for_the_next_leader_where_the_last_one_says_that_it_leads_no_longer(tmp_path):
    answers = asyncio.Semaphore(0)

    async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nshoal-not-leading: 1\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        answers.release()
        writer.close()

    async with answering(ended) as port, following(tmp_path, port) as follower:
        asked = asyncio.create_task(follower.client.post("/v1/jobs", json=TRAIN))
        await answers.acquire()
        assert (await follower.client.get("/v1/jobs")).json() == NO_JOBS, "what the store has"
        forwarded = await follower.client.post("/v1/jobs", json=TRAIN, headers={"shoal-forwarded": "1"})
        assert forwarded.status_code == 503 and forwarded.headers["shoal-not-leading"], "it does not lead either"
        assert not asked.done()
        await follower.store.transact([], [Delete(LEADER)])
        assert (await asked).status_code == 202


@holds("A leader that does not answer is")
@asynchronous
async def test_a_change_is_refused_when_no_other_leader_comes_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(forwarding, "ELECTION_SECONDS", 0.3)
    async with following(tmp_path, free_port()) as follower:
        answer = await follower.client.post("/v1/jobs", json=TRAIN)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["type"] == "about:blank", "surely nothing has happened"


@asynchronous
async def test_a_follower_whose_leader_seems_to_be_itself_asks_itself_once(tmp_path, monkeypatch):
    """Two controllers say that they are reached at one address."""
    monkeypatch.setattr(forwarding, "ELECTION_SECONDS", 0.3)
    async with following(tmp_path, free_port()) as follower:
        await follower.follow(follower.client.base_url.port)
        assert (await follower.client.get("/v1/jobs")).json() == NO_JOBS, "what the store has"
        refused = await follower.client.post("/v1/jobs", json=TRAIN)
        assert refused.status_code == 503 and "this controller does not lead" in refused.json()["detail"]
        assert refused.json()["type"] == "about:blank"
        assert (await follower.client.get("/v1/jobs")).json() == NO_JOBS, "nothing was done"


@rule(
    "A leader that does not answer is waited for only while it leads, for a frozen one takes connections; a "
    "change waits for the next one, and is not made twice",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.api.forwarding",
            "asyncio.ensure_future(self._until_late(leader))",
            "asyncio.ensure_future(asyncio.sleep(3600))",
        ),
        Edit(
            "shoal_controller.api.forwarding",
            "if (reads and self._controller.other == leader) or loop.time() >= deadline:",
            "if self._controller.other == leader:",
        ),
        Edit(
            "shoal_controller.api.forwarding",
            "        if NOT_LEADING in answer.headers:\n",
            "        if NOT_LEADING in answer.headers and False:\n",
        ),
    ],
)
@rule(
    "A change that may have been made though nobody knows is told apart from one that surely was not",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.api.problems",
            '    kind = OUTCOME_UNKNOWN if code is ErrorCode.OUTCOME_UNKNOWN else "about:blank"\n',
            '    kind = "about:blank"\n',
        ),
        Edit(
            "shoal_controller.jobs.runner",
            "            settle(batch, error if isinstance(error, StoreError) else _cut_off(self.spec))\n",
            "            settle(batch, self._halted or _cut_off(self.spec))\n",
        ),
    ],
)
@asynchronous
async def test_a_leader_that_is_frozen_is_waited_for_until_another_one_leads(tmp_path):
    """It takes connections, for the kernel does, and answers nothing."""
    frozen = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frozen.wait()
        writer.close()

    async with answering(silent) as port, following(tmp_path, port) as follower:
        read = asyncio.create_task(follower.client.get("/v1/jobs"))
        change = asyncio.create_task(follower.client.post("/v1/jobs", json=TRAIN))
        events = {"accept": "text/event-stream"}
        stream = asyncio.create_task(follower.client.get("/v1/jobs/train/events", headers=events))
        done, _ = await asyncio.wait([read, change, stream], timeout=0.3)
        assert not done
        await follower.store.transact([], [Delete(LEADER)])
        async with asyncio.timeout(100):
            assert (await read).json() == NO_JOBS
            refused = await change
            assert refused.status_code == 503 and "it may have been done" in refused.json()["detail"]
            assert (refused.json()["type"], refused.headers["retry-after"]) == ("urn:shoal:outcome-unknown", "5")
            assert (await stream).status_code in (404, 503)
        frozen.set()


@rule(
    "An answer of the leader's that broke off is not handed on as a whole one",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.api.forwarding",
        "self._events(leader, answer) if is_events else answer.aiter_raw()",
        "self._events(leader, answer)",
    ),
)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@asynchronous
async def test_an_answer_that_broke_off_is_not_handed_on_as_a_whole_one(tmp_path, kind):
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: 100\r\n\r\nhalf" % kind.encode())
        await writer.drain()
        writer.close()

    async with answering(half) as port, following(tmp_path, port) as follower:
        if kind == "text/event-stream":  # its reader goes on after the last event
            assert (await follower.client.get("/v1/jobs/train/events")).text == "half"
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await follower.client.get("/v1/jobs/train/events")


@asynchronous
async def test_a_reader_that_goes_away_is_followed_no_longer_by_the_leader(tmp_path):
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: comment\n\n")
        if not await reader.read():
            gone.set()
        writer.close()

    async with answering(endless) as port, following(tmp_path, port) as follower:
        async with follower.client.stream("GET", "/v1/jobs/train/events") as answer:
            assert (await anext(answer.aiter_raw())).startswith(b": comment")
            assert not gone.is_set()
        async with asyncio.timeout(100):
            await gone.wait()


@asynchronous
async def test_a_controller_that_cannot_stand_says_why_though_one_that_has_died_still_seems_to_lead(
    tmp_path, monkeypatch
):
    @asynccontextmanager
    async def on_a_full_disk(_store, _seconds):
        raise StoreError("the disk is full")
        yield

    why = "this controller cannot stand for election: the disk is full"
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedStore, "lease", on_a_full_disk)
        async with following(tmp_path, port=9) as follower:
            await follower.controller.settled()
            await new_repository(follower.store, SPEC, "an earlier life").renew(Durable(SPEC, wanted=1))
            while (await follower.client.get("/healthz")).json()["trouble"] != why:  # noqa: ASYNC110
                await asyncio.sleep(0)
            refused = await follower.client.get("/readyz?store")
            assert (refused.status_code, refused.json()["detail"]) == (503, why)
            assert (await follower.client.get("/readyz")).status_code == 200
            assert (await follower.controller.readable()).view("train").reason.startswith(why)
            patch.undo()
            while (await follower.client.get("/healthz")).json()["trouble"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert (await follower.client.get("/readyz?store")).status_code == 200
