"""The loop that puts points into all jobs' series: one that cannot be looked at does not end those of the others."""

from __future__ import annotations

import asyncio

import pytest
from asynchronous import asynchronous
from shoal_controller.observe import job_series
from shoal_controller.observe.job_series import record_series


class Looked:
    """A job, and how often it was looked at."""

    def __init__(self, enough: asyncio.Event, fails: bool = False) -> None:
        self._enough, self._fails = enough, fails
        self.times = 0

    def record(self) -> None:
        self.times += 1
        if self._fails:
            raise ValueError("a bug")
        if self.times == 3:
            self._enough.set()


@asynchronous
async def test_a_job_that_cannot_be_looked_at_is_left_out_and_the_others_go_on() -> None:
    enough = asyncio.Event()
    broken, sound = Looked(enough, fails=True), Looked(enough)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_series, "EVERY_SECONDS", 0.001)
        loop = asyncio.create_task(record_series(lambda: [broken, sound]))
        await asyncio.wait_for(enough.wait(), 60)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert (broken.times, sound.times >= 3) == (1, True)
