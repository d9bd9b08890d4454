"""The version of a job, and when it was made, began and ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_driver import MADE_OF, Driver, training
from rule import holds
from shoal_controller.core.machine.spec import Phase
from shoal_protos.acts import Cancel, DrainWorker, Pause, Resume, Scale
from shoal_protos.corruption import CorruptBlock, OnCorruption
from shoal_protos.errors import Conflict


@holds("Of two changes that name one version")
@holds("A change with `If-Match` is held")
def test_a_version_grows_with_what_is_asked_and_not_with_what_happens() -> None:
    job = training(3)
    begin = job.view.version
    for _ in range(20):
        job.wait(1)
    job.die("w2")
    job.recover()
    assert job.view.version == begin, "steps, heartbeats, a kill and a recovery"
    for number, request in enumerate((Scale(2), Pause(), Resume()), begin + 1):
        job.feed(request)
        assert job.view.version == number
        job.wait(2)
        assert job.view.version == number
    with pytest.raises(Conflict):
        job.feed(Resume())
    assert job.view.version == begin + 3
    job.restart()
    assert job.view.version == begin + 3
    job.feed(Cancel())
    job.wait(300)
    assert job.view.phase is Phase.CANCELLED
    assert job.view.version == begin + 5, "asked to end, and over"


@holds("A change with `If-Match` is held")
def test_a_drain_that_is_asked_for_is_another_version_too() -> None:
    """Though neither the job's size nor its phase says so."""
    job = training(3)
    begin = job.view.version
    job.feed(DrainWorker("w1", 30.0))
    assert job.view.version == begin + 1


@holds("A change with `If-Match` is held")
def test_a_pause_that_nobody_has_asked_for_is_another_version_too() -> None:
    job = training(2, made_of=replace(MADE_OF, on_corruption=OnCorruption.PAUSE))
    begin = job.view.version
    job.beat("w0", corrupt=(CorruptBlock(3, 0, 1, ("w0", "w1")),))
    assert job.job.durable.paused and job.view.version == begin + 1


def test_a_job_says_when_it_was_made_began_and_ended_also_after_a_take_over() -> None:
    job = Driver(wanted=1)
    made = job.now
    job.tick()
    assert (job.view.created_at, job.view.started_at, job.view.ended_at) == (made, None, None)
    job.now += 60
    job.start(1)
    began = job.view.started_at
    assert began is not None and made + 60 <= began <= job.now
    job.wait(5)
    job.restart()
    job.hello("w0")
    job.feed(Cancel())
    job.wait(300)
    view = job.view
    assert (view.created_at, view.started_at) == (made, began)
    assert view.ended_at is not None and began < view.ended_at <= job.now
