"""Connections to the REST port: those without a request end, and those without a token make room."""

import asyncio
import select
import socket
from contextlib import suppress

import httpx
import pytest
from api_port import TRAIN, serving
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_protos.acts import Pause
from tiers import check

pytestmark = check("serves REST on real ports")


@rule(
    "A request that says twice how long it is is refused, and nothing behind it is read",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.api.guard",
        '        if "content-length" in headers and "transfer-encoding" in headers:\n',
        "        if False:\n",
    ),
)
@asynchronous
async def test_a_request_that_says_twice_how_long_it_is_is_refused_and_its_connection_ends(tmp_path):
    async with serving(tmp_path) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        head = b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 5\r\n"
        writer.write(
            head + b'transfer-encoding: chunked\r\n\r\n9\r\n{"job": 1\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n'
        )
        answer = await asyncio.wait_for(reader.read(), 100)
        assert answer.startswith(b"HTTP/1.1 400") and b"both Content-Length and Transfer-Encoding" in answer
        assert answer.count(b"HTTP/1.1") == 1, "nothing behind it is read"
        writer.close()
    assert api.machine.events == {}


HALF_REQUESTS = {
    "nothing": b"",
    "half a header": b"GET /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\n",
    "half a body": b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
    "a request, and half of another": b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /heal",
}


@rule(
    "A REST connection on which no whole request comes in 10 to 20 s ends: each holds a file descriptor, which "
    "workers need",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.api.web",
        "        if is_waited_for and self._waited_after is cycle:\n            return self.transport.close()\n",
        "",
    ),
)
@pytest.mark.parametrize("sent", HALF_REQUESTS.values(), ids=list(HALF_REQUESTS))
@asynchronous
async def test_a_connection_without_a_request_ends_and_one_with_an_answer_under_way_does_not(
    tmp_path, monkeypatch, sent
):
    monkeypatch.setattr("shoal_controller.api.web.REQUEST_SECONDS", 0.1)
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        follower, following = await asyncio.open_connection("127.0.0.1", api.port)
        following.write(b"GET /v1/jobs/train/events HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(sent)
        await asyncio.wait_for(reader.read(), 100)
        assert b"HTTP/1.1 200" in await follower.readuntil(b"\r\n\r\n")
        await api.shell.submit("train", Pause())
        assert await asyncio.wait_for(follower.read(1), 100)
        for stream in (writer, following):
            stream.close()


@rule(
    "… and one whose client takes next to nothing of its answer is reset, with or without a token",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.api.web", "        if before and self._left and ", "        if False and "),
    after="A REST connection on which",
)
@asynchronous
async def test_a_connection_whose_client_takes_no_answer_ends(tmp_path, monkeypatch):
    """Without a token, too: each holds a descriptor, and answers that wait in memory."""
    monkeypatch.setattr("shoal_controller.api.web.REQUEST_SECONDS", 0.2)
    async with serving(tmp_path, token="secret") as api:
        loop = asyncio.get_running_loop()
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            lazy.setblocking(False)
            await loop.sock_connect(lazy, ("127.0.0.1", api.port))
            await loop.sock_sendall(lazy, b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200)
            ends = select.poll()
            ends.register(lazy, 0)
            assert await asyncio.to_thread(ends.poll, 20_000), "it was not reset"


@rule(
    "… and no address has more than half of REST's connections, nor REST more than half of what the process may "
    "open, which is as many as its user can grant",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.api.web", "(neighbours, most // 2)", "(neighbours, most)"),
        Edit(
            "shoal_controller.process.descriptors",
            "        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n",
            "        pass\n",
        ),
    ],
    after="… and one whose client takes",
)
@asynchronous
async def test_one_address_takes_not_the_places_of_all_others(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.api.web.MOST_CONNECTIONS", 6)
    async with serving(tmp_path) as api:
        idle = [await asyncio.open_connection("127.0.0.1", api.port, local_addr=("127.0.0.2", 0)) for _ in range(4)]
        with suppress(ConnectionError):
            assert await asyncio.wait_for(idle[0][0].read(), 100) == b"", "the oldest makes room for the last"
        assert (await api.client.get("/healthz")).status_code == 200, "another address"
        transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get(f"http://127.0.0.1:{api.port}/healthz")).status_code == 200, "as did the second"
        for _, one in idle:
            one.close()


@rule(
    "Of too many REST connections the oldest without a right token ends, never one that showed one",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.api.web", "(one.is_let_in, one.came)", "one.came"),
)
@asynchronous
async def test_a_connection_that_showed_a_right_token_makes_no_room_for_those_that_showed_none(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.api.web.MOST_CONNECTIONS", 6)
    async with serving(tmp_path, token="secret") as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers={"authorization": "Bearer secret"})
        follower, following = await asyncio.open_connection("127.0.0.1", api.port)
        request = "GET /v1/jobs/train/events HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n"
        following.write(f"{request}authorization: Bearer secret\r\n\r\n".encode())
        assert b"HTTP/1.1 200" in await follower.readuntil(b"\r\n\r\n")
        strangers = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(9)]
        for reader, _ in strangers[:5]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 100) == b""
        await api.shell.submit("train", Pause())
        assert await asyncio.wait_for(follower.read(1), 100)
        for stream in (following, *(writer for _, writer in strangers)):
            stream.close()


@holds("… and one whose client takes")
@asynchronous
async def test_a_client_that_takes_its_answer_slowly_gets_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.api.web.REQUEST_SECONDS", 0.2)
    async with serving(tmp_path) as api:
        whole = len((await api.client.get("/openapi.json")).content)
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1024)
        writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200)
        taken = 0
        while taken < 200 * whole:
            taken += len(await reader.read(1 << 18))
            await asyncio.sleep(0.02)
        writer.close()
