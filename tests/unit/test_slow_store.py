"""A store that takes long for a write, and does not fail: what waits for it says so."""

import asyncio
import re

from asynchronous import asynchronous, jump
from rule import Edit, rule
from shoal_controller.store.open import open_store
from shoal_protos.acts import Scale
from small_machine import SPEC, World

SLOW_SECONDS = 20.0


class Slow:
    """A store whose transactions wait until they may."""

    def __init__(self, store) -> None:
        self.store = store
        self.may_write, self.writes = asyncio.Event(), asyncio.Event()

    async def transact(self, compares, operations):
        self.writes.set()
        await self.may_write.wait()
        return await self.store.transact(compares, operations)

    def __getattr__(self, name):
        return getattr(self.store, name)


@rule(
    "A write that the store takes long for is in the reason of the job until one is fast again",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.jobs.runner", "self.trouble or self.repository.speed.sentence", "self.trouble"),
)
@asynchronous
async def test_a_write_that_takes_long_is_in_the_reason_until_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.observe.recent.SLOW_SECONDS", SLOW_SECONDS)
    monkeypatch.setattr("shoal_controller.jobs.runner.REQUEST_SECONDS", 3 * SLOW_SECONDS)
    store = Slow(await open_store(f"embedded:{tmp_path}"))
    store.may_write.set()
    world = World(store)
    await world.shell.start()
    await world.shell.create(SPEC)

    def reason():
        return world.shell.view("train").reason

    assert reason() == "as it should be"
    store.may_write.clear()
    store.writes.clear()
    scaling = asyncio.create_task(world.shell.submit("train", Scale(4)))
    await store.writes.wait()
    jump(SLOW_SECONDS)
    assert re.fullmatch(
        r"the store is slow: a write takes 2\d\.\d s \(its disk\?\), and every change of the job waits for it; "
        "as it should be",
        reason(),
    )
    store.may_write.set()
    await scaling
    assert "the store is slow" in reason()
    await world.shell.submit("train", Scale(5))
    assert reason() == "as it should be"
    await world.shell.stop()
    await store.store.close()
