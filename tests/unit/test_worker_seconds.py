"""Where machine-seconds go: the seconds of wanted workers, by their use, add up and stay through restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_driver import MADE_OF, NEW, Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Persist
from shoal_controller.core.machine.events import Disconnected
from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.spec import Phase, State
from shoal_controller.core.overview.idle_lanes import goodput_sentence
from shoal_controller.core.planning.lanes import LaneSharing
from shoal_protos.acts import Cancel, Pause, Scale
from shoal_protos.messages import MemberState, Result, Telemetry

STEP_SECONDS = 0.5


def trained(job: Driver, step: int, *workers: str, seconds: float = STEP_SECONDS) -> None:
    """They commit steps of half a second each up to this one."""
    for one in range(job.job.figures.step + 1, step + 1):
        job.now += seconds
        for worker in workers:
            before = job.job.processes[worker].telemetry.training_seconds
            telemetry = Telemetry(step_seconds=seconds, training_seconds=before + seconds)
            job.beat(worker, telemetry=telemetry, step=one)
        job.tick()


def job_of(workers: int, lanes: int = 8, **spec: object) -> Driver:
    """Their world has committed its first step at time 0."""
    job = Driver(wanted=workers, made_of=replace(MADE_OF, lanes=lanes, max_steps=1000), **spec)
    job.start(workers)
    job.tick()
    return job


def uses(job: Driver) -> dict[str, float]:
    """Seconds by use, of those that are not 0."""
    return {use.value: pytest.approx(seconds) for use, seconds in job.view.worker_seconds.items() if seconds}


def adds_up(job: Driver) -> bool:
    """Whether each second of a wanted worker has one use, or will have it with the next commit."""
    used = sum(job.view.worker_seconds.values()) + job.job.figures.unsettled_seconds
    return used == pytest.approx(job.view.wanted_seconds)


@rule(
    "Each second of a wanted worker has one use; goodput is the part that trained a step for the first time",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "missing = max(0, durable.wanted - sum(found.values()))",
            "missing = 0",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "    figures = figures.used(Use.IDLE_LANE, in_steps - worked)",
            "    figures = figures.used(Use.TRAINING, in_steps - worked)",
            by="test_turns_without_a_lane_are_no_training",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "made_again = min(steps, max(0, figures.highest_step - figures.step)) / steps",
            "made_again = 0",
            by="test_steps_that_are_made_again_are_lost_however_long_ago",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "    return Use.STANDBY if is_warm else Use.STARTING\n",
            "    return Use.STANDBY\n",
            by="test_a_worker_starts_until_it_is_warm_and_then_stands_by",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "    return figures.used(Use.PAUSED, training)\n",
            "    return figures.used(Use.TRAINING, training)\n",
            by="test_what_passes_between_steps_is_a_pause",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "paces = [durable.lane_seconds(world.members[rank].worker) for rank in world.trainers]",
            "paces = [1.0 for _ in world.trainers]",
            by="test_lanes_by_speed_idle_no_more_than_a_step_is_longer_than_a_workers_lanes",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "under_way = min(figures.unsettled_seconds - in_steps, of_a_step)",
            "under_way = 0.0",
            by="test_heartbeats_in_the_middle_of_steps_make_no_pause_of_them",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_seconds",
            "if process is not None else bool(record.incarnation)",
            "if process is not None else False",
            by="test_a_worker_without_lanes_stands_by_also_while_the_controller_is_away",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress",
            "usual = process.telemetry.step_seconds_median if before is None else 0.0",
            "usual = 0.0",
            by="test_steps_that_no_controller_saw_took_as_long_as_usual",
        ),
        Edit(
            "shoal_controller.core.machine.phases.ending",
            "worker_seconds.end(turn.job.figures)",
            "turn.job.figures",
            by="test_where_a_job_ends_the_seconds_of_which_no_step_came_are_a_pause",
        ),
    ],
)
def test_a_job_that_wants_four_workers_and_has_one_has_a_quarter_of_its_goodput() -> None:
    job = job_of(1)
    job.feed(Scale(4))
    trained(job, 21, "w0")
    assert uses(job) == {"training": 10.0, "missing": 30.0}
    assert (job.view.wanted_seconds, job.view.goodput_ratio) == (pytest.approx(40.0), pytest.approx(0.25))
    assert job.view.stepping_ratio == pytest.approx(1.0)
    assert goodput_sentence(job.view) == "goodput 25% of the wanted workers' time; 75% missing"
    assert adds_up(job)


@holds("Each second of a wanted")
def test_turns_without_a_lane_are_no_training() -> None:
    job = job_of(4, lanes=5)
    trained(job, 21, "w0", "w1", "w2", "w3")
    assert uses(job) == {"training": 40.0 * 5 / 8, "idle_lane": 40.0 * 3 / 8}
    assert goodput_sentence(job.view).endswith("; 38% without a lane")


@holds("Each second of a wanted")
def test_lanes_by_speed_idle_no_more_than_a_step_is_longer_than_a_workers_lanes() -> None:
    job = job_of(3, lanes=12)
    by_speed = LaneSharing({"w0": 0.1, "w1": 0.2, "w2": 0.1}, usual=0.1)
    job.job = replace(job.job, durable=replace(job.job.durable, sharing=by_speed))
    job.tick()
    (plan,) = job.job.durable.planned
    assert [len(lanes) for lanes in plan.lanes_by_worker.values()] == [5, 2, 5]
    for worker in plan.workers:
        job.train(worker, plan)
    trained(job, 21, "w0", "w1", "w2")
    assert uses(job) == {"training": 30.0 * 14 / 15, "idle_lane": 30.0 * 1 / 15}


@holds("Each second of a wanted")
def test_a_worker_starts_until_it_is_warm_and_then_stands_by() -> None:
    job = Driver(wanted=2, min_workers=2)
    job.now = 3.0
    job.hello("w0", status=replace(NEW, state=MemberState.WARMING_UP))
    job.now = 5.0
    job.beat("w0", state=MemberState.WAITING)
    job.now = 9.0
    job.tick()
    assert uses(job) == {"missing": 2 * 3.0 + 6.0, "starting": 2.0, "standby": 4.0}
    assert adds_up(job) and job.view.goodput_ratio == 0


@holds("Each second of a wanted")
def test_what_passes_between_steps_is_a_pause() -> None:
    job = job_of(2)
    trained(job, 11, "w0", "w1")
    job.now += 4.0
    trained(job, 12, "w0", "w1")
    assert uses(job) == {"training": 11.0, "paused": 7.0}, "of a step that may be under way the rest"
    job.feed(Pause())
    paused = job.job.durable.planned[-1]
    for worker in ("w0", "w1"):
        job.train(worker, paused, steps=0)
    job.tick()
    job.now += 100.0
    job.tick()
    assert uses(job)["paused"] == pytest.approx(207.0) and adds_up(job)


@holds("Each second of a wanted")
@pytest.mark.parametrize("step_seconds", [0.21, 0.62, 0.99, 1.7, 10.3])
def test_heartbeats_in_the_middle_of_steps_make_no_pause_of_them(step_seconds: float) -> None:
    job = job_of(2)
    for beat in range(1, 201):
        job.now = float(beat)
        steps = int(job.now / step_seconds)
        telemetry = Telemetry(step_seconds=step_seconds, training_seconds=steps * step_seconds)
        for worker in ("w0", "w1"):
            job.beat(worker, telemetry=telemetry, step=1 + steps)
        job.tick()
    assert "paused" not in uses(job) and adds_up(job)
    assert job.view.worker_seconds[Use.TRAINING] >= 2 * (200.0 - step_seconds) - 0.001


@holds("Each second of a wanted")
def test_steps_that_are_made_again_are_lost_however_long_ago() -> None:
    job = job_of(1)
    trained(job, 21, "w0")
    job.job = replace(job.job, figures=replace(job.job.figures, step=11))
    trained(job, 31, "w0")
    assert uses(job) == {"training": 15.0, "lost_step": 5.0}


@holds("Each second of a wanted")
def test_of_a_lost_worker_the_seconds_are_missing() -> None:
    job = job_of(2)
    trained(job, 11, "w0", "w1")
    job.die("w1")
    job.recover()
    trained(job, 31, "w0")
    assert uses(job)["missing"] == pytest.approx(10.0, abs=1.0)
    assert adds_up(job)


@holds("Each second of a wanted")
def test_the_dead_say_nothing_of_what_a_step_takes() -> None:
    job = job_of(2)
    trained(job, 11, "w0", "w1")
    job.die("w1")
    job.recover()
    job.tick()
    before, paused = uses(job)["training"].expected, uses(job).get("paused", 0.0)
    trained(job, 21, "w0", seconds=2 * STEP_SECONDS)
    assert uses(job)["training"].expected - before == pytest.approx(10 * 2 * STEP_SECONDS, abs=1.0)
    assert uses(job).get("paused", 0.0) == paused


@holds("No counter of a job goes down over")
def test_the_next_controller_counts_the_time_for_which_nobody_did() -> None:
    job = job_of(2)
    trained(job, 21, "w0", "w1")
    shown = dict(job.job.durable.figures.worker_seconds)
    job.feed(Disconnected(job.connections.pop("w1"), "reset"))
    job.restart()
    job.now += 5.0
    for worker in ("w0", "w1"):
        job.hello(worker)
    trained(job, 41, "w0", "w1")
    assert job.view.wanted_seconds == pytest.approx(2 * job.now)
    assert all(job.view.worker_seconds[use] >= shown[use] for use in Use)
    assert adds_up(job)


@holds("Each second of a wanted")
def test_a_worker_without_lanes_stands_by_also_while_the_controller_is_away() -> None:
    job = job_of(3)
    job.feed(Scale(2, spares=1))
    (plan,) = job.job.durable.planned
    for worker in plan.workers:
        job.train(worker, plan)
    trained(job, 22, "w0", "w1", "w2")
    job.restart()
    job.now += 5.0
    for worker in ("w0", "w1", "w2"):
        job.hello(worker)
    trained(job, 42, "w0", "w1", "w2")
    assert uses(job)["standby"] == job.now and "starting" not in uses(job)
    assert goodput_sentence(job.view).endswith("% by workers beyond these)"), "a spare is not among the wanted"


@holds("Each second of a wanted")
def test_steps_that_no_controller_saw_took_as_long_as_usual() -> None:
    job = job_of(2)
    trained(job, 21, "w0", "w1")
    job.restart()
    job.now += 5.0
    last = Telemetry(step_seconds=0.3, step_seconds_median=0.5, training_seconds=15.0)
    for worker in ("w0", "w1"):
        job.hello(worker)
    for worker in ("w0", "w1"):
        job.beat(worker, telemetry=last, step=31)
    job.tick()
    assert uses(job) == {"training": 2 * 15.0}


@holds("Each second of a wanted")
def test_where_a_job_ends_the_seconds_of_which_no_step_came_are_a_pause() -> None:
    job = job_of(2)
    trained(job, 21, "w0", "w1")
    job.now += 50.0
    job.feed(Cancel())
    job.now += 50.0
    job.tick()
    assert job.view.phase is Phase.CANCELLED and uses(job) == {"training": 20.0, "paused": 200.0}
    assert sum(job.view.worker_seconds.values()) == pytest.approx(job.view.wanted_seconds)


def test_what_a_version_without_these_figures_has_written_is_counted_from_now_on() -> None:
    job = job_of(1)
    job.job = replace(job.job, figures=replace(job.job.figures, counted_until=None))
    job.now += 1000.0
    job.tick()
    assert job.view.wanted_seconds < 1.0


def minute_old(job: Driver) -> bool:
    """Whether what is stored, which metrics show, has all seconds but those of the last minute."""
    return job.view.wanted_seconds - job.job.durable.figures.wanted_seconds <= 60.0 * job.view.wanted


def test_seconds_without_a_step_are_stored_once_a_minute_as_well() -> None:
    waits = Driver(wanted=4)
    paused = job_of(2)
    trained(paused, 200, "w0", "w1")
    paused.feed(Pause())
    for job in (waits, paused):
        writes = sum(Persist() in (job.wait(1.0)) for _ in range(600))
        assert writes <= 11 and minute_old(job)
        shown = job.view.wanted_seconds
        job.restart()
        assert shown - 60.0 * job.view.wanted <= job.view.wanted_seconds <= shown + 1.0


def test_a_life_without_workers_keeps_how_many_steps_an_earlier_one_may_have_shown() -> None:
    job = job_of(2)
    trained(job, 200, "w0", "w1")
    bound = job.job.durable.figures.steps_bound
    job.restart()
    job.wait(300.0)
    assert not job.job.figures_known and job.job.durable.figures.steps_bound == bound
    assert minute_old(job)


def test_a_job_that_is_over_has_no_active_worker_and_no_second_is_wanted_of_it() -> None:
    job = job_of(1)
    trained(job, 21, "w0")
    job.beat("w0", step=1000, done=True, ended=True)
    job.say("w0", Result(1000, "cafe", 0.5))
    assert job.view.phase.is_over
    ended = job.view.wanted_seconds
    job.now += 1000.0
    job.tick()
    assert job.view.wanted_seconds == ended == job.job.durable.figures.wanted_seconds
    assert job.view.active == 0 == sum(worker.state is State.ACTIVE for worker in job.view.workers)


def test_before_the_first_world_there_is_no_sentence() -> None:
    job = Driver(wanted=2)
    job.now += 10.0
    job.tick()
    assert goodput_sentence(job.view) == ""
    assert uses(job) == {"missing": 20.0}
