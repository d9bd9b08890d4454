"""Readers that follow a job's events: as many as leave connections to everybody else, while their tokens are valid."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest
from api_port import TRAIN, serving
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.api import stream
from shoal_controller.api.dependencies import EventFilter
from shoal_controller.api.stream import Follower
from small_machine import SPEC, running
from starlette.requests import ClientDisconnect

ALL = EventFilter(frozenset(), None)


@rule(
    "A worker's log stays bounded while its process writes; so does the number of clients that follow events, "
    "which leaves connections for others",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.launchers.process_records", "        os.truncate(log, 0)\n", ""),
        Edit(
            "shoal_controller.api.stream",
            "        if readers.total() >= MOST_FOLLOWERS:\n",
            "        if len(readers) < 0:\n",
        ),
    ],
)
@holds("A stream of events ends when")
@pytest.mark.parametrize(
    ("bound", "sentence"),
    [
        ("MOST_FOLLOWERS", "1 readers follow events already; ask without Accept: text/event-stream"),
        ("MOST_OF_TOKEN", "1 readers with the token eye follow events already; ask without Accept: text/event-stream,"),
    ],
)
@asynchronous
async def test_one_follower_too_many_is_told_so_until_another_one_goes(tmp_path, monkeypatch, bound, sentence):
    async def gone(_):
        raise OSError

    monkeypatch.setattr(stream, bound, 1)
    followers: Counter[str] = Counter()
    eye, other = (Follower(name, lambda: True, followers) for name in ("eye", "other"))
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        first = stream.event_stream(world.shell, "train", 0, eye, ALL)
        with pytest.raises(stream.Busy, match=sentence) as refused:
            stream.event_stream(world.shell, "train", 0, eye, ALL)
        assert refused.value.http_status == 503
        if bound == "MOST_OF_TOKEN":
            stream.event_stream(world.shell, "train", 0, other, ALL).place.close()
        first.place.close()
        second = stream.event_stream(world.shell, "train", 0, eye, ALL)
        with pytest.raises(ClientDisconnect):  # its reader has gone before it began
            await second({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Event().wait, gone)
        assert not followers


@rule(
    "A stream of events ends when its reader's token opens nothing any more, and no token takes the places of "
    "all readers",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.api.stream",
            "            if not follower.is_let_in():\n                return\n            if event is None:\n",
            "            if event is None:\n",
        ),
        Edit(
            "shoal_controller.api.stream",
            "        if readers[token] >= MOST_OF_TOKEN:\n",
            "        if readers[token] > MOST_FOLLOWERS:\n",
        ),
    ],
)
@pytest.mark.parametrize("act", ["revoked", "rotated"])
@asynchronous
async def test_a_stream_ends_when_its_readers_token_opens_nothing_any_more(tmp_path, monkeypatch, act):
    monkeypatch.setattr(stream, "IDLE_SECONDS", 0.01)
    async with serving(tmp_path, token="secret") as api:
        root = {"authorization": "Bearer secret"}
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=root)
        made = await api.ask("POST", "/v1/tokens", 201, json={"name": "eye", "role": "view"}, headers=root)
        eye = {"authorization": f"Bearer {made['token']}", "accept": "text/event-stream"}
        async with (
            api.client.stream("GET", "/v1/jobs/train/events?after=1", headers=eye) as answer,
            api.client.stream("GET", "/v1/jobs/train/events?after=1", headers={**eye, **root}) as other,
            aclosing(answer.aiter_lines()) as lines,
            aclosing(other.aiter_lines()) as others,
        ):
            assert (await anext(lines)).startswith(":")
            if act == "revoked":
                await api.ask("DELETE", "/v1/tokens/eye", headers=root)
            else:
                await api.ask("POST", "/v1/tokens/eye/rotate", json={"keep_seconds": 0}, headers=root)
            async with asyncio.timeout(100):
                assert all(not line or line.startswith(":") for line in [line async for line in lines])
                assert await anext(others) is not None, "whoever shows another token reads on"
        assert (await api.client.get("/v1/jobs", headers=eye)).status_code == 401
