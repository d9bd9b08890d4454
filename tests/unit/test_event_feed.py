"""The newest events of all jobs: bounded in number and characters, gone on from where that is possible, else anew."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from asynchronous import asynchronous
from shoal_controller.jobs import event_feed
from shoal_controller.jobs.event_feed import EventFeed, FeedEntry
from shoal_controller.jobs.records import JobEvent

LIFE = "0123456789abcdef"


def event(message: str) -> JobEvent:
    return JobEvent(1.0, "lost", 1, "w1", message)


def messages(entries: list[FeedEntry]) -> list[str | None]:
    return [entry.event.message if entry.event is not None else None for entry in entries]


def test_the_oldest_go_where_there_are_too_many_and_their_readers_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MOST_EVENTS", 3)
    feed = EventFeed(LIFE)
    begin = feed.newest
    feed.put("a", [event(str(number)) for number in range(5)])
    assert messages(feed.after(None)) == ["2", "3", "4"]
    assert messages(feed.after(begin)) == [None] and feed.after(begin)[0].id == feed.newest
    assert messages(feed.after(f"{LIFE}-2")) == ["2", "3", "4"] and messages(feed.after(f"{LIFE}-4")) == ["4"]
    assert feed.after(feed.newest) == []


def test_long_messages_make_room_and_one_is_kept_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MOST_CHARACTERS", 10)
    feed = EventFeed(LIFE)
    feed.put("a", [event("12345"), event("67890"), event("x")])
    assert messages(feed.after(None)) == ["67890", "x"]
    feed.put("a", [event("y" * 100)])
    assert messages(feed.after(None)) == ["y" * 100]


@pytest.mark.parametrize("cursor", ["", "-1", f"{LIFE}-", f"{LIFE}-x", "f" * 16 + "-0", f"{LIFE}-7", f"{LIFE}--1"])
def test_an_id_that_is_none_of_this_feed_begins_anew(cursor: str) -> None:
    feed = EventFeed(LIFE)
    feed.put("a", [event("1")])
    assert messages(feed.after(cursor)) == [None]


@asynchronous
async def test_whoever_follows_gets_what_comes_and_ends_with_the_feed() -> None:
    feed = EventFeed(LIFE)
    feed.put("a", [event("before")])
    async with aclosing(feed.follow(None, 60.0)) as entries:
        waits = asyncio.ensure_future(anext(entries))
        await asyncio.sleep(0)
        feed.put("b", [event("1"), event("2")])
        found = [await waits, await anext(entries)]
        assert [(one.job, one.event.message) for one in found if one is not None and one.event] == [
            ("b", "1"),
            ("b", "2"),
        ]
        ends = asyncio.ensure_future(anext(entries, "over"))
        await asyncio.sleep(0)
        feed.close()
        assert await ends == "over"


@asynchronous
async def test_whoever_waits_for_long_is_told_that_nothing_came() -> None:
    async with aclosing(EventFeed(LIFE).follow(None, 0.001)) as entries:
        assert await anext(entries) is None
