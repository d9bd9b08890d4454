"""Many elections in a row, over both stores: no two terms have one fence, and nothing is written twice.

Three controllers stand; whoever leads counts on in one key, each number only once, as fast as it can, while it is told
to end, gives up, loses its lease, or finds its key deleted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from asynchronous import asynchronous
from etcd_cluster import etcd_cluster
from matrices import shortened
from shoal_controller.leadership import election
from shoal_controller.leadership.election import LEADER, Leadership
from shoal_controller.leadership.term import FencedStore
from shoal_controller.process.tasks import first_of
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Compare, Delete, Put, Store, UnknownOutcome
from shoal_protos.errors import StoreError
from standing import Stander

NUMBER = "/number"


class Counting(Stander):
    """Counts for as long as it leads."""

    def __init__(self, store: Store, name: str, written: list[tuple[int, int]]) -> None:
        self.store = store
        self.written = written
        """Term and number, in the order in which the store said yes."""
        self.counted = asyncio.Event()
        super().__init__(store, name)

    @asynccontextmanager
    async def _lead(self, leadership: Leadership) -> AsyncIterator[None]:
        counting = asyncio.create_task(self._count(leadership))
        try:
            async with super()._lead(leadership):
                yield
        finally:
            counting.cancel()
            await asyncio.wait([counting])

    async def _count(self, leadership: Leadership) -> None:
        fenced, term = FencedStore(self.store, leadership), leadership.fence.modified
        while True:
            with suppress(StoreError):
                found = await fenced.get(NUMBER)
                number = int(found.value) + 1 if found is not None else 1
                guard = Compare(NUMBER, found.modified if found is not None else 0)
                with suppress(UnknownOutcome):  # what was written at the last moment is read by the next one
                    if (await fenced.transact([guard], [Put(NUMBER, b"%d" % number)])).succeeded:
                        self.written.append((term, number))
                        self.counted.set()
            await asyncio.sleep(0.001)


@pytest.fixture(params=["embedded", "etcd"])
def urls(request: pytest.FixtureRequest, tmp_path: Path):
    """Of one store: one for each controller that has a connection of its own."""
    if request.param == "embedded":
        yield [f"embedded:{tmp_path}"]
    else:
        with etcd_cluster(tmp_path / "etcd", 3) as etcd:
            yield [f"etcd://{','.join(etcd.addresses)}/shoal"] * 3


@pytest.mark.parametrize("elections", shortened([40, 200], 40))
@asynchronous
async def test_any_number_of_elections_in_a_row_have_a_leader_each_and_nothing_is_written_twice(
    urls: list[str], monkeypatch: pytest.MonkeyPatch, elections: int
) -> None:
    monkeypatch.setattr(election, "PAUSE_SECONDS", 0.01)
    chance, written = random.Random(7), list[tuple[int, int]]()
    async with AsyncExitStack() as ends:
        stores = []
        for url in urls:
            stores.append(await open_store(url))
            ends.push_async_callback(stores[-1].close)
        standers = [Counting(stores[number % len(stores)], f"c{number}", written) for number in range(3)]
        ended: list[Counting] = []
        for place in range(len(standers)):
            ends.push_async_callback(lambda place=place: standers[place].end())
        while len(terms := {one.fence.modified for each in [*standers, *ended] for one in each.terms}) < elections:
            leader = await _leader(standers)
            leader.counted.clear()
            await first_of(leader.counted.wait(), leader.until(lambda one=leader: not one.leads))
            if not leader.leads:
                continue
            act = chance.choices(["ends", "gives up", "loses its lease", "loses its key"], [5, 3, 1, 1])[0]
            if act == "ends":
                await leader.end()
                place = standers.index(leader)
                ended.append(leader)
                standers[place] = Counting(leader.store, f"c{len(ended) + 3}", written)
            elif act == "gives up":
                leader.terms[-1].given_up.set()
            elif act == "loses its lease":
                leader.terms[-1].lease.lost.set()
            else:
                await leader.store.transact([], [Delete(LEADER)])
            await asyncio.sleep(0)
        fences = [one.fence.modified for each in [*standers, *ended] for one in each.terms]
        assert len(fences) == len(set(fences)) == len(terms), "two terms have one fence"
    numbers_in_order = [number for _, number in sorted(written, key=lambda one: one[1])]
    assert len(set(numbers_in_order)) == len(numbers_in_order), "a number was written twice"
    terms_in_order = [term for term, _ in sorted(written, key=lambda one: one[1])]
    assert terms_in_order == sorted(terms_in_order), "a leader wrote after the next one"
    assert len(set(terms_in_order)) > elections // 2


async def _leader(standers: list[Counting]) -> Counting:
    while True:
        if leading := [one for one in standers if one.leads and not one.terms[-1].trouble]:
            return leading[-1]
        await asyncio.sleep(0.001)
