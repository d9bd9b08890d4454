"""Workers' tokens over real gRPC: a join token for a run, a session token for each process, also after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import httpx
import pytest
from asynchronous import asynchronous
from integration.linked_workers import Worker as LinkedWorker
from integration.session_port import HELLO, WELCOME, Port, Worker, on_port
from integration.small_controller import SmallController
from pydantic import SecretStr
from rule import holds
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.core.machine.events import Proof
from shoal_controller.jobs import streams
from shoal_controller.server import Server, serve
from shoal_controller.sessions import service
from shoal_controller.settings import Settings
from shoal_protos.channel import CHANNEL_OPTIONS, METHOD, SESSION_TOKEN
from shoal_protos.messages import Alive, Hello, Refusal, SessionToken, ToWorker, Welcome
from tiers import promise

ROOT = {"authorization": "Bearer secret"}
JOIN_SENTENCE = "worker w0 is in job demo already, and here shows a join token in its name"


@asynccontextmanager
async def controller(folder: Path) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    settings = Settings(
        http="127.0.0.1:0", grpc="127.0.0.1:0", store=f"embedded:{folder}", data=folder, log_level="error",
        token=SecretStr("secret"),
    )  # fmt: skip
    async with (
        serve(settings) as server,
        httpx.AsyncClient(
            base_url=f"http://{server.http}/v1", trust_env=False, verify=False, headers=ROOT, timeout=100
        ) as client,
    ):
        yield server, client


@asynccontextmanager
async def stream(server: Server, *headers: tuple[str, str]) -> AsyncIterator[Worker]:
    async with grpc.aio.insecure_channel(server.grpc, options=CHANNEL_OPTIONS) as channel:
        yield Worker(channel.stream_stream(METHOD)(metadata=headers))


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


async def answer(worker: Worker, hello: Hello) -> ToWorker | None:
    await worker.send(hello)
    return await worker.receive()


async def join_token(client: httpx.AsyncClient) -> str:
    answered = await client.post("/jobs/demo/token")
    assert answered.status_code == 200 and answered.headers["cache-control"] == "no-store"
    assert answered.json()["token"].startswith(f"join:demo:{answered.json()['run']}:")
    return str(answered.json()["token"])


async def new_run(client: httpx.AsyncClient) -> str:
    assert (await client.post("/jobs", json={"job": "demo", "workers": {"wanted": 2}})).status_code == 202
    return await join_token(client)


async def session_token(worker: Worker) -> str:
    """The one that it is given; it stands right behind the welcome."""
    given = await worker.receive()
    assert isinstance(given, SessionToken) and given.seconds == streams.ALONE_SECONDS
    return given.token


@holds("A join token is valid")
@asynchronous
@promise("a session without a right")
async def test_a_session_token_opens_its_own_session_also_on_the_next_controller_and_no_other(tmp_path: Path) -> None:
    other = replace(HELLO, worker="w1", incarnation="b1")
    async with controller(tmp_path) as (server, client):
        join = await new_run(client)
        async with stream(server, bearer(join)) as first, stream(server, bearer(join)) as second:
            welcome = await answer(first, HELLO)
            assert isinstance(welcome, Welcome) and welcome.worker == "w0"
            token = await session_token(first)
            assert isinstance(await answer(second, other), Welcome)
            for header, hello, sentence in (
                (bearer(token), other, "shows the session token of worker w0, which opens no other session"),
                (bearer(join), HELLO, JOIN_SENTENCE),
                (bearer(join), replace(HELLO, worker=""), JOIN_SENTENCE),
            ):
                async with stream(server, header) as thief:
                    refusal = await answer(thief, hello)
                    assert isinstance(refusal, Refusal) and sentence in refusal.sentence
            async with stream(server, bearer(token)) as again:
                assert isinstance(await answer(again, replace(HELLO, run=welcome.run)), Welcome)
    async with controller(tmp_path) as (server, client):
        assert await join_token(client) == join
        async with stream(server, bearer(token)) as again:
            assert isinstance(await answer(again, replace(HELLO, run=welcome.run)), Welcome)
            assert await session_token(again)


@asynchronous
async def test_a_join_token_ends_with_its_run(tmp_path: Path) -> None:
    async with controller(tmp_path) as (server, client):
        before = await new_run(client)
        await client.delete("/jobs/demo")
        now = await new_run(client)
        async with stream(server, bearer(before)) as late:
            refusal = await answer(late, HELLO)
            assert isinstance(refusal, Refusal) and refusal.final
            assert "which is over or was replaced" in refusal.sentence
            assert "Set SHOAL_TOKEN to what `shoal token demo` prints now." in refusal.sentence
        async with stream(server, bearer(now)) as worker:
            assert isinstance(await answer(worker, HELLO), Welcome)
        answered = await client.get("/jobs", headers={"authorization": f"Bearer {now}"})
        assert answered.status_code == 401


@holds("A session token ends")
def test_a_session_token_is_renewed_on_the_stream_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(streams, "RENEW_SECONDS", 0.05)
    tokens, now = WorkerTokens("secret"), [1000.0]

    async def scene(port: Port) -> None:
        port.streams._clock = lambda: now[0]
        ends = []
        async with port.worker(tokens.join("demo", "")) as worker:
            await worker.send(HELLO)
            assert await worker.receive() == WELCOME
            while len(ends) < 3:
                message = await worker.receive()
                if isinstance(message, SessionToken):
                    shown = tokens.read(message.token)
                    assert shown is not None and shown.proof == Proof("demo", "", "w0", "a1")
                    ends.append(shown.expires)
                    now[0] += 100.0
                else:
                    assert message == Alive()
        assert ends == [1600.0, 1700.0, 1800.0]

    on_port(scene, token=SecretStr("secret"))


def test_a_session_token_that_has_expired_is_not_final_and_opens_beside_the_join_token() -> None:
    tokens = WorkerTokens("secret")
    old = tokens.session(Proof("demo", "", "w0", "a1"), 1000.0)

    async def scene(port: Port) -> None:
        async with port.worker(old) as worker:
            refusal = await answer(worker, HELLO)
            assert isinstance(refusal, Refusal) and not refusal.final
            assert "the session token of worker w0 of job demo has expired" in refusal.sentence
        headers = (bearer(tokens.join("demo", "")), (SESSION_TOKEN, old))
        async with grpc.aio.insecure_channel(f"localhost:{port.number}") as channel:
            worker = Worker(channel.stream_stream(METHOD)(metadata=headers))
            assert await answer(worker, HELLO) == WELCOME

    on_port(scene, token=SecretStr("secret"))


def test_a_worker_shows_its_session_token_when_it_comes_back_and_both_after_a_refusal() -> None:
    with SmallController() as small:
        worker = LinkedWorker("a", small, token="join")
        worker.introduce()
        assert small.metadata["authorization"] == "Bearer join" and SESSION_TOKEN not in small.metadata
        small.sends("a", SessionToken("own", 300.0), Alive())
        worker.link.end_warm_up()
        small.stop()
        small.start()
        assert small.receives(Hello).worker == "a"
        assert small.metadata["authorization"] == "Bearer own" and SESSION_TOKEN not in small.metadata
        small.stop()
        small.refusals.append(Refusal("the session token has expired", final=False))
        small.start()
        assert small.receives(Hello).worker == "a"
        assert small.metadata["authorization"] == "Bearer join" and small.metadata[SESSION_TOKEN] == "own"
        worker.close()
