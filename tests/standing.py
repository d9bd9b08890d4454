"""Controllers that stand for election, and what becomes of each: the scene of the tests of who leads.

async with standing(folder, "a", "b") as (store, (a, b)):
    await a.end()
    await b.until(lambda: b.leads)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shoal_controller.leadership.election import ControllerPlace, Election, Leadership
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Store


class Stander:
    """One controller that stands for election, and what became of it."""

    def __init__(self, store: Store, name: str, address: str = "", release: str = "", format: int = 0) -> None:
        self.name = name
        self.neighbours_say = 0
        address = address or name
        place = ControllerPlace(name, f"{address}:1", f"{address}:2", release=release, format=format)
        self.election = Election(store, place, self._term_of)
        self.terms: list[Leadership] = []
        self.leads = False
        self.slow = False
        """Whether its terms wait for ever before they have begun."""
        self.changed = asyncio.Event()
        self.fails: Callable[[], None] = lambda: None
        self.task = asyncio.create_task(self.election.run(self._lead))

    @asynccontextmanager
    async def _lead(self, leadership: Leadership) -> AsyncIterator[None]:
        self.fails()
        self.terms.append(leadership)
        if self.slow:
            self._say(False)
            await asyncio.Event().wait()
        self._say(True)
        try:
            yield
        finally:
            self._say(False)

    async def _term_of(self, place: ControllerPlace) -> int:
        return self.neighbours_say

    def _say(self, leads: bool) -> None:
        self.leads = leads
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, seen: Callable[[], object]) -> None:
        while not seen():
            await self.changed.wait()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def standing(directory, *names: str) -> AsyncIterator[tuple[Store, list[Stander]]]:
    """Controllers in the order in which they stand; the first one leads."""
    store = await open_store(f"embedded:{directory}")
    standers: list[Stander] = []
    for name in names:
        standers.append(Stander(store, name))
        await standers[0].until(lambda: standers[0].leads)
    try:
        yield store, standers
    finally:
        for one in standers:
            await one.end()
        await store.close()
