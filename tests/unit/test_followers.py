"""Readers that follow a job's events: as many as leave connections to everybody else."""

import pytest
from asynchronous import asynchronous
from shoal_controller.api import stream
from small_machine import SPEC, running


@asynchronous
async def test_one_follower_too_many_is_told_so_until_another_one_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "MOST_FOLLOWERS", 1)
    monkeypatch.setattr(stream, "IDLE_SECONDS", 0.01)
    followers: set[object] = set()
    async with running(tmp_path) as world:
        await world.shell.create(SPEC)
        first = stream.event_stream(world.shell, "train", 0, followers).body_iterator
        assert (await anext(first)).startswith(b":")
        with pytest.raises(stream.Busy, match="1 readers follow events already") as refused:
            stream.event_stream(world.shell, "train", 0, followers)
        assert refused.value.http_status == 503
        await first.aclose()
        second = stream.event_stream(world.shell, "train", 0, followers).body_iterator
        assert (await anext(second)).startswith(b":")
        await second.aclose()
        assert not followers
