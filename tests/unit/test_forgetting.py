"""A job that is forgotten while its store fails at any moment: it is gone in the end, or as if it had never been."""

import asyncio
from dataclasses import replace

import pytest
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.core.machine.spec import Phase
from shoal_controller.store.open import open_store
from shoal_protos.errors import NotFound, StoreError
from small_machine import SPEC, World

MANNERS = ["nothing was done", "it was done all the same"]


class FailsOnce:
    """A store whose transaction of a number fails, counted from `counting` on."""

    def __init__(self, store) -> None:
        self.store = store
        self.left = -1
        self.was_done = False

    def counting(self, number: int, manner: str) -> None:
        self.left, self.was_done = number, manner != MANNERS[0]

    async def transact(self, compares, operations):
        self.left -= 1
        fails = self.left == -1
        if not fails or self.was_done:
            outcome = await self.store.transact(compares, operations)
        if fails:
            raise StoreError("it did not answer")
        return outcome

    def __getattr__(self, name):
        return getattr(self.store, name)


async def forgotten(world: World) -> bool:
    """Whether it is at this attempt."""
    try:
        await world.shell.delete("train")
    except StoreError:
        return False
    return True


async def begun(directory):
    store = FailsOnce(await open_store(f"embedded:{directory}"))
    world = World(store)
    await world.shell.start()
    await world.shell.create(SPEC)
    await world.shell.delete("train")
    return store, world


@rule(
    "A job may be forgotten, or run again, after an attempt to forget it has failed anywhere, also where the "
    "store had done it all the same",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.jobs.job_repository",
            "if found is None and self._may_be_gone:",
            "if found is None and False:",
        ),
        Edit("shoal_controller.jobs.job_repository", 'broken="", forgotten=False, state', 'broken="", state'),
    ],
)
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("manner", MANNERS)
@asynchronous
async def test_whatever_write_fails_a_job_is_forgotten_at_the_next_attempt(tmp_path, manner, number):
    store, world = await begun(tmp_path)
    store.counting(number, manner)
    while not await forgotten(world):
        continue
    with pytest.raises(NotFound):
        world.shell.view("train")
    assert not [entry.key for entry in (await store.list("/")).entries if "train" in entry.key]
    await world.shell.create(SPEC)
    assert world.shell.view("train").phase is Phase.WAITING and not world.shell.stopped.done()
    await world.shell.stop()
    await store.close()


@holds("A job may be forgotten, or run")
@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("manner", MANNERS)
@asynchronous
async def test_a_new_run_of_a_job_that_was_half_forgotten_lives_on_with_the_next_leader(tmp_path, manner, number):
    store, world = await begun(tmp_path)
    store.counting(number, manner)
    await forgotten(world)
    await world.shell.create(replace(SPEC, wanted=2))
    await world.shell.stop()
    after = World(store)
    await after.shell.start()
    assert (after.shell.view("train").phase, after.shell.view("train").wanted) == (Phase.WAITING, 2)
    await after.shell.stop()
    await store.close()


@rule(
    "A job that is slow to be forgotten keeps nobody from making, stopping or forgetting others",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.process.tasks",
        "self._locks.setdefault(name, asyncio.Lock())",
        'self._locks.setdefault("", asyncio.Lock())',
    ),
)
@asynchronous
async def test_a_job_that_is_slow_to_be_forgotten_keeps_nobody_from_others_and_its_name_is_free_afterwards(tmp_path):
    store, world = await begun(tmp_path)
    slow = asyncio.Event()
    world.written.forget = lambda job: slow.wait()
    going = asyncio.ensure_future(world.shell.delete("train"))
    await asyncio.sleep(0)
    again = asyncio.ensure_future(world.shell.create(replace(SPEC, wanted=2)))
    for name in ("other", "another"):
        await world.shell.create(replace(SPEC, job=name))
    await world.shell.delete("other")
    assert not going.done() and not again.done()
    slow.set()
    await going
    assert (await again).wanted == 2
    await world.shell.stop()
    await store.close()
