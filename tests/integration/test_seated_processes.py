"""Processes of a cell and a real controller: each asks for its seat, then says hello as the one that was seated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from asynchronous import asynchronous
from integration.linked_workers import DESCRIPTION, NEW
from ports import free_port
from rule import Edit, rule
from shoal.group.gloo import build_gloo
from shoal.session import seat
from shoal.session.controller_link import ControllerLink
from shoal.session.dialogue import Identity
from shoal.session.driver import SeatDriver
from shoal.session.link import Ended
from shoal.session.settings import SessionSettings
from shoal_controller.server import serve
from shoal_controller.settings import Settings
from shoal_protos.errors import UserError
from shoal_protos.messages import Ending, Shutdown
from shoal_protos.runs import Runs
from shoal_protos.shape import Shape
from tiers import check

pytestmark = check("starts controllers")

PAIR = Shape(tensor=2)
HALVES = Runs([(0, 3)]), Runs([(3, 6)])
OF_PAIRS = replace(DESCRIPTION, cell=PAIR, homes=HALVES, models=HALVES)


class Process:
    """What a process of a cell does until its part of the model is built. `grpc`: where its controller is."""

    def __init__(self, grpc: str, shape: Shape = PAIR, **environment: str) -> None:
        self._environment = {"SHOAL_CONTROLLER": grpc, "SHOAL_JOB": "demo", **environment}
        self._shape = shape
        self.link: ControllerLink | None = None

    async def sits(self) -> tuple[str, int]:
        """The id and the coordinate that it is given."""
        taken = await asyncio.to_thread(seat._take, self._shape, self._environment)
        self._identity = Identity(taken.worker, taken.incarnation, taken.coordinate)
        return taken.worker, taken.coordinate

    async def joins(self) -> str:
        """Says hello; the id that it is welcomed by."""
        settings = SessionSettings.from_environment(self._environment)
        self.link = ControllerLink(settings, build_gloo, self._identity)
        await asyncio.to_thread(self.link.introduce, OF_PAIRS, NEW)
        return self.link.worker

    def is_welcome(self) -> None:
        assert self.link is not None
        dialogue, spoken = self.link.dialogue, self.link.driver._shared.spoken
        with spoken:
            assert spoken.wait_for(lambda: dialogue.welcomed, 100), "it says hello again"

    async def goes(self) -> None:
        assert self.link is not None
        await asyncio.to_thread(self.link.close)


@asynccontextmanager
async def controller(folder: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(
        http="127.0.0.1:0", grpc=f"127.0.0.1:{port}", store=f"embedded:{folder}", data=folder, log_level="error"
    )
    async with (
        serve(settings) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}/v1", trust_env=False, verify=False, timeout=60) as client,
    ):
        yield client


async def submit(client: httpx.AsyncClient, wanted: int = 2) -> None:
    job = {"job": "demo", "workers": {"wanted": wanted}, "heartbeat_seconds": 0.1, "reconnect_seconds": 0.2}
    answered = await client.post("/jobs", json=job)
    assert answered.status_code == 202, answered.text


async def is_lost(client: httpx.AsyncClient, worker: str) -> None:
    async with asyncio.timeout(100):
        while True:
            workers = (await client.get("/jobs/demo/workers")).json()["workers"]
            if all(one["worker"] != worker or one["state"] in ("lost", "dead") for one in workers):
                return
            await asyncio.sleep(0.05)


@asynchronous
async def test_processes_of_a_cell_get_its_coordinates_and_a_new_one_that_of_a_dead_one(tmp_path: Path) -> None:
    address = f"127.0.0.1:{(port := free_port())}"
    async with controller(tmp_path, port) as client:
        await submit(client)
        first, second = Process(address), Process(address)
        assert [await first.sits(), await second.sits()] == [("w0", 0), ("w1", 1)]
        assert [await second.joins(), await first.joins()] == ["w1", "w0"]
        await second.goes()
        await is_lost(client, "w1")
        third = Process(address)
        assert await third.sits() == ("w2", 1)
        assert await third.joins() == "w2"
        for one in (first, third):
            await one.goes()


@asynchronous
async def test_a_wish_decides_between_coordinates_that_lack_the_same(tmp_path: Path) -> None:
    address = f"127.0.0.1:{(port := free_port())}"
    async with controller(tmp_path, port) as client:
        await submit(client)
        assert await Process(address, SHOAL_COORDINATE="1", SHOAL_WORKER_ID="mine").sits() == ("mine", 1)
        assert await Process(address, SHOAL_COORDINATE="1").sits() == ("w0", 0)


@asynchronous
async def test_a_process_that_has_no_place_is_told_why_in_one_sentence(tmp_path: Path) -> None:
    address = f"127.0.0.1:{(port := free_port())}"
    async with controller(tmp_path, port) as client:
        await submit(client)
        await Process(address).sits()
        with pytest.raises(UserError) as refused:
            await Process(address, Shape(tensor=4)).sits()
        assert str(refused.value) == (
            "worker (new) joined with cells of another shape: tensor 4; the job's is tensor 2. Start it with the job's "
            "script and config."
        )


@asynchronous
async def test_a_process_waits_for_its_seat_while_there_is_no_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, unreachable = f"127.0.0.1:{(port := free_port())}", threading.Event()
    async with controller(tmp_path, port) as client:
        await submit(client)
        assert await Process(address).sits() == ("w0", 0)
    monkeypatch.setattr(SeatDriver, "on_controller_unreachable", lambda *_: unreachable.set())
    waiting = Process(address)
    sitting = asyncio.create_task(waiting.sits(), name="a process asks for its seat")
    assert await asyncio.to_thread(unreachable.wait, 30)
    async with controller(tmp_path, port):
        assert await sitting == ("w1", 1)


@rule(
    "A process that starts over keeps its coordinate: its model is built for it",
    "A change of the world",
    broken_by=Edit("shoal.session.controller_link", "            self._identity.coordinate,\n", "            0,\n"),
)
@asynchronous
async def test_a_process_that_starts_over_keeps_its_coordinate(tmp_path: Path) -> None:
    address = f"127.0.0.1:{(port := free_port())}"
    async with controller(tmp_path, port) as client:
        await submit(client, wanted=4)
        first, second = Process(address), Process(address)
        assert [(await one.sits())[1] for one in (first, second)] == [0, 1]
        assert await second.joins() == "w1"
    assert second.link is not None
    second.link.driver.on_message(Shutdown(Ending.START_OVER, "the world went on without it"))
    assert isinstance(await asyncio.to_thread(second.link.take, 30), Ended)
    async with controller(tmp_path, port):
        await asyncio.to_thread(second.is_welcome)
        assert second.link.worker == "w2"
        third = Process(address)
        assert await third.sits() == ("w3", 0)
        await second.goes()
