"""Which controller leads: one at a time, whoever is next when it ends, and itself again where nobody was elected."""

from __future__ import annotations

import asyncio

import pytest
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.leadership import election
from shoal_controller.leadership.election import LEADER, TERM, ControllerPlace
from shoal_controller.leadership.term import FencedStore
from shoal_controller.store.store import Compare, Damaged, Delete, Fenced, Put, UnknownOutcome
from shoal_protos.errors import StoreError
from standing import Stander, standing
from structlog.testing import capture_logs


@rule(
    "Of any number of controllers one leads at a time, and each term has a fence of its own: what a leader "
    "writes is written only while nobody else was elected",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.leadership.term",
        "transact([fence, *compares], operations)",
        "transact(compares, operations)",
    ),
)
@asynchronous
async def test_one_leads_and_when_it_ends_another_one_does_and_all_know_who(tmp_path):
    async with standing(tmp_path, "a", "b", "c") as (store, (a, b, c)):
        assert (a.leads, b.leads, c.leads) == (True, False, False)
        await b.election.until_another_leads()
        assert b.election.leader == ControllerPlace("a", "a:1", "a:2") and not b.election.is_own
        fence = a.terms[0].fence
        await a.end()
        assert not a.leads
        waits = [asyncio.create_task(one.until(lambda one=one: one.leads)) for one in (b, c)]
        _, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waiting:
            wait.cancel()
        assert (b.leads, c.leads) in ((True, False), (False, True))
        leader = b if b.leads else c
        assert leader.terms[0].fence.modified > fence.modified, "no two terms have one fence"
        assert leader.terms[0].fence.modified == (await store.get(TERM)).modified


@rule(
    "A leader whose lease was lost leads on only where nobody was elected meanwhile",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.leadership.election",
        "                guards = [leadership.fence, Compare(",
        "                guards = [Compare(",
    ),
)
@asynchronous
async def test_a_leader_whose_lease_was_lost_leads_on_where_nobody_was_elected_meanwhile(tmp_path):
    async with standing(tmp_path, "a") as (store, (a,)):
        leadership, lease = a.terms[0], a.terms[0].lease
        lease.lost.set()
        while leadership.lease is lease:
            await store.get(LEADER)
        assert a.leads and a.terms == [leadership] and leadership.trouble == ""
        assert (await store.get(LEADER)).lease == leadership.lease.id


@holds("A leader whose lease was lost")
@asynchronous
async def test_a_leader_whose_lease_was_lost_ends_its_term_where_another_one_was_elected(tmp_path):
    async with standing(tmp_path, "a") as (store, (a,)):
        await store.transact([], [Put(TERM, b"another's"), Put(LEADER, ControllerPlace("x", "x:1", "x:2").encoded())])
        a.terms[0].lease.lost.set()
        await a.until(lambda: not a.leads)
        assert a.election.leader == ControllerPlace("x", "x:1", "x:2")


@rule(
    "A leader that is cut off from the store gives way as soon as a neighbour says that it leads: its workers "
    "are needed there",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.leadership.election",
        "                if await self._is_overtaken(leadership):\n",
        "                if await self._is_overtaken(leadership) and False:\n",
    ),
)
@asynchronous
async def test_a_leader_that_is_cut_off_from_the_store_leads_until_a_neighbour_does(tmp_path, monkeypatch):
    monkeypatch.setattr(election, "PAUSE_SECONDS", 0.01)
    async with standing(tmp_path, "a", "b") as (store, (a, _)):
        while len(a.election.places) < 2:
            await store.get(LEADER)
        leadership, away = a.terms[0], asyncio.Event()

        def lease(seconds: float) -> None:
            away.set()
            raise StoreError("cannot be reached")

        monkeypatch.setattr(store, "lease", lease)
        leadership.lease.valid_until = 0.0
        leadership.lease.lost.set()
        await away.wait()
        away.clear()
        await away.wait()
        assert a.leads and "cannot be reached" in leadership.trouble
        a.neighbours_say = leadership.fence.modified + 1
        await a.until(lambda: not a.leads)


@rule(
    "A leader whose key in the store is gone, or another's, finds out though its lease lives: it writes the key "
    "again where nobody was elected, else its term ends",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.leadership.election", "self._until_displaced(displaced))", "asyncio.sleep(3600))"),
)
@asynchronous
async def test_a_leader_that_another_one_has_replaced_ends_its_term_though_its_lease_lives(tmp_path):
    """Where an operator has deleted the key, or restored the store from a backup."""
    async with standing(tmp_path, "a") as (store, (a,)):
        while not a.election.is_own:
            await store.get(LEADER)
        other = ControllerPlace("x", "x:1", "x:2").encoded()
        await store.transact([], [Put(LEADER, other), Put(TERM, other)])
        await a.until(lambda: not a.leads)


@holds("A leader whose key in the store")
@asynchronous
async def test_a_leader_whose_key_was_deleted_writes_it_again_where_nobody_was_elected(tmp_path):
    async with standing(tmp_path, "a") as (store, (a,)):
        while not a.election.is_own:
            await store.get(LEADER)
        await store.transact([], [Delete(LEADER)])
        while (found := await store.get(LEADER)) is None:
            continue
        assert a.leads and len(a.terms) == 1 and found.lease == a.terms[0].lease.id


@rule(
    "A term whose lease is lost before it has begun begins anew: only one that has begun gets another lease",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.leadership.election",
        "await _unless_lost(lease, ends.enter_async_context(lead(leadership)))",
        "await ends.enter_async_context(lead(leadership))",
    ),
)
@asynchronous
async def test_a_term_whose_lease_is_lost_before_it_has_begun_begins_anew(tmp_path, monkeypatch):
    """What waits for the store in its beginning would wait for ever: only a term that has begun gets another lease."""
    monkeypatch.setattr(election, "PAUSE_SECONDS", 0.01)
    async with standing(tmp_path, "a") as (_, (a,)):
        a.slow = True
        a.terms[0].given_up.set()
        await a.until(lambda: len(a.terms) == 2)
        assert not a.leads
        a.slow = False
        a.terms[1].lease.lost.set()
        await a.until(lambda: len(a.terms) == 3 and a.leads)


@asynchronous
async def test_a_leader_that_gives_up_stands_again(tmp_path):
    async with standing(tmp_path, "a") as (_, (a,)):
        a.terms[0].given_up.set()
        await a.until(lambda: len(a.terms) == 2)
        assert a.terms[1].fence.modified > a.terms[0].fence.modified


@asynchronous
async def test_a_term_that_cannot_begin_is_tried_again_unless_the_store_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(election, "PAUSE_SECONDS", 0.01)
    failures: list[StoreError] = [Damaged("no use"), StoreError("away"), StoreError("away")]

    def fail_at_first() -> None:
        if failures:
            raise failures.pop()

    async with standing(tmp_path, "a") as (_, (a,)):
        a.fails = fail_at_first
        a.terms[0].given_up.set()
        with pytest.raises(Damaged, match="no use"):
            await a.task
        assert len(a.terms) == 1 and not a.leads


@asynchronous
async def test_what_keeps_a_controller_from_leading_is_told_once_and_not_at_each_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(election, "PAUSE_SECONDS", 0.01)
    reasons = ["no room"] * 5 + ["away"] * 5

    def fail_at_first() -> None:
        if reasons:
            raise StoreError(reasons.pop())

    async with standing(tmp_path, "a") as (_, (a,)):
        with capture_logs() as logs:
            a.fails = fail_at_first
            a.terms[0].given_up.set()
            await a.until(lambda: len(a.terms) == 2)
            reasons.append("no room")
            a.terms[1].given_up.set()
            await a.until(lambda: len(a.terms) == 3)
    assert [one["why"] for one in logs if one["log_level"] == "warning"] == ["away", "no room", "no room"]


@asynchronous
async def test_a_place_that_cannot_be_read_is_nobodys_and_harms_nobody(tmp_path):
    async with standing(tmp_path, "a") as (store, (a,)):
        for value in (b"\xff", b"[]", b'{"id": "z"}'):
            await store.transact([], [Put(f"{election.PLACES}z", value)])
        await store.transact([], [Put(f"{election.PLACES}y", ControllerPlace("y", "y:1", "y:2").encoded())])
        while len(a.election.places) < 2:
            await store.get(LEADER)
        assert [one.id for one in a.election.places] == ["a", "y"], "the one that leads first"


@asynchronous
async def test_two_controllers_with_one_address_are_told_so_and_one_leads(tmp_path, monkeypatch):
    monkeypatch.setattr(election, "CONFLICT_SECONDS", 0.05)
    async with standing(tmp_path, "a") as (store, (a,)):
        b = Stander(store, "b", address="a")
        async with asyncio.timeout(100):
            while not (a.election.conflict and b.election.conflict):
                await store.get(LEADER)
        for one in (a, b):
            assert one.election.conflict == (
                "another controller of this store says, as this one does, that it is reached at a:1 and a:2: what is "
                "meant for one may reach the other. Give each its own --http, --grpc and SHOAL_ADVERTISE"
            )
        assert (a.leads, b.leads, a.election.is_own, b.election.is_own) == (True, False, True, False)
        await b.end()
        async with asyncio.timeout(100):
            while a.election.conflict:
                await store.get(LEADER)


@asynchronous
async def test_the_place_that_a_dead_controller_has_left_is_no_second_one_with_its_address(tmp_path, monkeypatch):
    monkeypatch.setattr(election, "CONFLICT_SECONDS", 0.2)
    errors = []
    monkeypatch.setattr(election.log, "error", lambda event, **fields: errors.append(event))
    async with standing(tmp_path, "a") as (store, (a,)):
        async with store.lease(2.0) as lease:
            left = ControllerPlace("dead", "a:1", "a:2").encoded()
            await store.transact([], [Put(f"{election.PLACES}dead", left, lease.id)])
            while len(a.election.places) < 2:
                await store.get(LEADER)
        while len(a.election.places) > 1:
            await store.get(LEADER)
        await asyncio.sleep(0.5)
        assert not errors and not a.election.conflict


@holds("Of any number of controllers one")
@asynchronous
async def test_a_leader_writes_only_while_nobody_else_was_elected_and_its_lease_lasts(tmp_path):
    async with standing(tmp_path, "a") as (store, (a,)):
        leadership = a.terms[0]
        fenced = FencedStore(store, leadership)
        assert (await fenced.transact([], [Put("/x", b"1")])).succeeded
        assert not (await fenced.transact([Compare("/x")], [Put("/x", b"2")])).succeeded, "its own conditions hold too"

        valid, leadership.lease.valid_until = leadership.lease.valid_until, 0.0
        with pytest.raises(StoreError, match=r"this controller's lease ended .* nothing is decided until it does"):
            await fenced.transact([], [Put("/x", b"3")])
        assert (await fenced.get("/x")).value == b"1"
        leadership.lease.valid_until = valid

        await store.transact([], [Put(TERM, b"another's")])
        with pytest.raises(Fenced, match="another controller was elected"):
            await fenced.transact([], [Put("/x", b"4")])
        assert (await store.get("/x")).value == b"1"


@rule(
    "What a leader has written counts as unknown where its lease ended before it heard of it: nothing is sent on "
    "the strength of it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.leadership.term",
        "            raise UnknownOutcome(self._leadership.trouble)\n",
        "            return outcome\n",
    ),
)
@asynchronous
async def test_what_is_written_at_the_end_of_a_lease_is_not_acted_on(tmp_path):
    """The process may have been frozen between the write and the answer."""
    async with standing(tmp_path, "a") as (store, (a,)):
        leadership = a.terms[0]

        class Late:
            async def transact(self, *given):
                outcome = await store.transact(*given)
                leadership.lease.valid_until = 0.0
                return outcome

        with pytest.raises(UnknownOutcome):
            await FencedStore(Late(), leadership).transact([], [Put("/x", b"1")])
        assert (await store.get("/x")).value == b"1"
