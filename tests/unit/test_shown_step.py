"""The step that people are shown: how often it is stored, and what another life of the controller shows."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from machine_driver import MADE_OF, Driver
from rule import Edit, rule
from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.effects import Effect, Persist
from shoal_controller.core.machine.events import Tick
from shoal_controller.core.machine.spec import Phase
from shoal_protos.acts import Cancel, DrainWorker
from shoal_protos.messages import Telemetry

ENDLESS = replace(MADE_OF, max_steps=1 << 20)


def training() -> Driver:
    job = Driver(wanted=2, made_of=ENDLESS)
    job.start(2)
    job.wait(1)
    return job


def restarted(job: Driver, durable: Durable | None = None) -> None:
    """Another controller, with what is in the store."""
    job.job = replace(job.job, durable=durable or job.job.durable)
    job.restart()


def passing_steps(job: Driver, seconds: float) -> Iterator[tuple[float, list[Effect]]]:
    """Four steps a second, and what has to be done about them."""
    begun = job.now
    for step in itertools.count(job.statuses["w0"].step + 1):
        if job.now - begun > seconds:
            return
        effects = [
            effect for worker in ("w0", "w1") for effect in job.beat(worker, Telemetry(step_seconds=0.25), step=step)
        ]
        job.now += 0.25
        effects += job.feed(Tick())
        assert job.view.step >= step - 4, "it is shown every second"
        yield job.now, effects


@rule(
    "… the shown step goes back by a minute at most, and only until the members have said theirs: it is stored "
    "with all else, and with the figures of its steps once a minute",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.progress",
        "    due = turn.now - turn.job.figures_written_at >= KEEP_SECONDS\n",
        "    due = False\n",
    ),
    after="… the back-off after failures",
)
@rule(
    "A job that only trains is written once a minute, however fast its steps are",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.turn", 'or after != replaced(before, {"step": after.step})', "or after != before"
    ),
)
def test_a_job_that_only_trains_is_written_once_a_minute_and_another_life_shows_a_step_no_older() -> None:
    job = training()
    stored = {job.now: job.view.step}
    for now, effects in passing_steps(job, 300.0):
        if Persist() in effects:
            stored[now] = job.view.step
    times = sorted(stored)
    assert all(later - sooner <= 61.0 for sooner, later in itertools.pairwise([*times, job.now]))
    assert len([at for at in times if at > times[0] + 120.0]) <= 4, "the figures' bound is found in the first minutes"
    restarted(job, replace(job.job.durable, step=stored[times[-1]]))
    assert job.view.step == stored[times[-1]]


def test_whatever_else_is_written_the_step_that_is_shown_goes_with_it() -> None:
    job = training()
    for _ in passing_steps(job, 30.0):
        pass
    shown = job.view.step
    assert Persist() in job.feed(DrainWorker("w0"))
    restarted(job)
    assert job.view.step == shown


def test_another_life_shows_where_the_members_are_as_soon_as_all_have_said_it() -> None:
    job = training()
    for _ in passing_steps(job, 30.0):
        pass
    shown = job.view.step
    restarted(job, replace(job.job.durable, step=1))
    assert job.view.step == 1
    for worker in ("w0", "w1"):
        job.hello(worker, status=job.statuses[worker])
    job.tick()
    assert job.view.step >= shown


def test_a_job_that_is_over_has_counted_all_its_steps() -> None:
    job = training()
    for _ in passing_steps(job, 30.0):
        pass
    job.feed(Cancel())
    job.wait(60.0, beating=False)
    assert job.view.phase is Phase.CANCELLED
    assert job.observed("shoal_step_seconds")[0] == job.job.figures.steps - 1, "nobody had timed the first"
