"""A command asks the controller of its own process without a port, and each answer has a deadline."""

from __future__ import annotations

import asyncio

import pytest
from asynchronous import asynchronous
from rule import Edit, rule
from shoal_controller.cli import serve
from shoal_controller.cli.client import Client
from shoal_controller.cli.serve import InProcess
from shoal_protos.errors import NoController
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send


class Stubborn:
    """An application that answers when it is told to, or when its request is cancelled."""

    def __init__(self) -> None:
        self.asked, self.released = asyncio.Event(), asyncio.Event()
        self.seen: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen = scope
        self.asked.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            await JSONResponse({"job": "late"})(scope, receive, send)
            return
        await JSONResponse({"job": "train"})(scope, receive, send)


def client_of(app: Stubborn) -> Client:
    return Client("https://192.0.2.1:7070", "secret", InProcess(app))


@asynchronous
async def test_an_answer_comes_without_a_port_and_shows_this_machine_as_the_caller() -> None:
    app = Stubborn()
    app.released.set()
    async with client_of(app) as client:
        assert await client.job("train") == {"job": "train"}
    assert app.seen["client"][0] == "127.0.0.1" and app.seen["path"] == "/v1/jobs/train"


@asynchronous
async def test_an_answer_that_does_not_come_is_a_controller_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "ANSWER_SECONDS", 0.01)
    async with client_of(Stubborn()) as client:
        with pytest.raises(NoController, match=r"no answer within 0\.01 s"):
            await client.job("train")


@rule(
    "A command that asks the controller of its own process ends when it is told to",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.cli.serve",
        "            await end_task(answering)\n",
        "            pass\n",
    ),
)
@asynchronous
async def test_a_command_that_is_cancelled_ends_though_the_controller_answers_a_cancelled_request() -> None:
    app = Stubborn()
    async with client_of(app) as client:
        asking = asyncio.create_task(client.job("train"))
        await app.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
