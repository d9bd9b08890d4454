"""The loop that looks at all jobs for their curves: one that cannot be looked at does not end those of the others."""

from __future__ import annotations

import asyncio

import pytest
from asynchronous import asynchronous
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.machine.view import Sample
from shoal_controller.observe import curves
from shoal_controller.observe.curves import Points, record_curves

CALM = Sample(step=1, loss=2.5, step_seconds=0.25, samples=8, goodput_ratio=0.5, active=2, wanted=3)


class Looked:
    """A job, and how often it was looked at."""

    def __init__(self, name: str, enough: asyncio.Event, fails: bool = False) -> None:
        self.spec = JobSpec(name, 1, run="r1")
        self._enough, self._fails = enough, fails
        self.times = 0

    def record(self) -> Sample:
        self.times += 1
        if self._fails:
            raise ValueError("a bug")
        if self.times == 3:
            self._enough.set()
        return CALM


@asynchronous
async def test_a_job_that_cannot_be_looked_at_is_left_out_and_the_others_go_on() -> None:
    enough = asyncio.Event()
    broken, sound = Looked("broken", enough, fails=True), Looked("sound", enough)
    kept: list[tuple[Points, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "EVERY_SECONDS", 0.001)
        looks = record_curves(lambda: [broken, sound], lambda: 7.0, lambda *look: kept.append(look))
        loop = asyncio.create_task(looks)
        await asyncio.wait_for(enough.wait(), 60)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert (broken.times, sound.times >= 3) == (1, True)
    assert kept[0] == ({("broken", "r1"): None, ("sound", "r1"): CALM}, 7.0), "the file of what it was is kept"
