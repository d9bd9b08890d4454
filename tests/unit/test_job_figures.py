"""What a job counts of its steps holds through the loss of all workers and of the controller, and ends with the job."""

from dataclasses import replace

from machine_driver import MADE_OF, Driver
from rule import Edit, holds, rule
from shoal_protos.checkpoint import CheckpointRef, UnreadableCheckpoint
from shoal_protos.messages import MemberState, Result, Telemetry
from shoal_protos.runs import NO_BLOCKS

PER_STEP = 12


def trained(job: Driver, step: int, *workers: str) -> None:
    """They commit steps of half a second each up to this one."""
    known = job.job.figures.step
    for one in range(known + 1, step + 1):
        job.now += 0.5
        for worker in workers:
            telemetry = Telemetry(step_seconds=0.5, step_seconds_median=0.5, training_seconds=0.5 * one)
            job.beat(worker, telemetry=telemetry, step=one)
        job.wait(0.0)
        job.tick()


def job_of(workers: int) -> Driver:
    job = Driver(wanted=workers, made_of=replace(MADE_OF, samples_per_step=PER_STEP, max_steps=1000))
    job.start(workers)
    return job


def test_stepping_is_the_share_of_time_in_steps_whoever_made_them() -> None:
    job = job_of(2)
    trained(job, 20, "w0", "w1")
    before = job.view.stepping_ratio
    assert before > 0.9
    job.die("w1")
    job.recover()
    trained(job, 40, "w0")
    assert job.view.stepping_ratio > 0.9


def test_stepping_falls_while_nothing_is_trained_and_stands_still_when_the_job_is_over() -> None:
    job = job_of(1)
    trained(job, 20, "w0")
    job.now += 10.0
    assert 0.4 < job.view.stepping_ratio < 0.6
    trained(job, 40, "w0")
    job.beat("w0", step=1000, done=True, ended=True)
    job.say("w0", Result(1000, "cafe", 0.5))
    assert job.view.phase.is_over
    ended = job.view.stepping_ratio
    job.now += 1000.0
    assert job.view.stepping_ratio == ended > 0.5


@holds("No counter of a job goes down over")
def test_a_restarted_controller_shows_no_samples_before_it_knows_them_and_never_fewer() -> None:
    job = job_of(2)
    trained(job, 37, "w0", "w1")
    shown = job.view.samples
    assert shown is not None
    assert shown <= 37 * PER_STEP
    stepping = job.view.stepping_ratio
    job.restart()
    assert job.view.samples is None
    for worker in ("w0", "w1"):
        job.hello(worker)
    job.tick()
    assert job.view.samples is not None
    assert shown <= job.view.samples <= 37 * PER_STEP
    assert abs(job.view.stepping_ratio - stepping) < 0.15


def test_a_restarted_controller_does_not_take_a_workers_whole_past_for_its_latest_steps() -> None:
    job = job_of(2)
    trained(job, 100, "w0", "w1")
    for step in (110, 120, 130):
        job.restart()
        for worker in ("w0", "w1"):
            job.hello(worker)
        job.now += 50.0
        for made in (step - 5, step):
            for worker in ("w0", "w1"):
                job.beat(worker, telemetry=Telemetry(step_seconds=0.5, training_seconds=0.5 * made), step=made)
            job.tick()
    count, seconds = job.observed("shoal_step_seconds")
    assert seconds / count == 0.5
    assert 0.2 < job.view.stepping_ratio < 0.4


@rule(
    "No counter of a job goes down over a controller's restart, even if nobody is left to report the latest steps",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.progress",
        "    steps = figures.steps if turn.job.figures_known else max(figures.steps, "
        "turn.durable.figures.steps_bound)\n",
        "    steps = figures.steps\n",
    ),
)
def test_samples_never_go_down_though_nobody_is_left_to_tell_of_the_latest_steps() -> None:
    job = Driver(wanted=1, launcher="local", made_of=replace(MADE_OF, samples_per_step=PER_STEP, max_steps=1000))
    job.start(1)
    trained(job, 37, "w0")
    shown = job.view.samples
    job.restart()
    job.exit("w0", code=None, why="its process ended while no controller watched it")
    job.wait(40.0)
    assert job.view.samples is not None
    assert job.view.samples >= shown > 0


def test_steps_that_are_made_again_count_again() -> None:
    job = Driver(wanted=1, launcher="local", made_of=replace(MADE_OF, samples_per_step=PER_STEP, max_steps=1000))
    job.start(1)
    trained(job, 10, "w0")
    job.exit("w0")
    job.wait(5.0)
    assert job.counted("shoal_job_lost_steps_total") == 10
    fresh = job.spawned[-1] if job.spawned else "w1"
    job.hello(
        fresh, status=replace(job.statuses["w0"], generation=0, step=-1, committed_in=0, state=MemberState.WAITING)
    )
    del job.statuses["w0"]
    job.tick()
    job.recover()
    trained(job, 10, fresh)
    assert job.view.samples == 20 * PER_STEP


def test_steps_before_a_checkpoint_that_cannot_be_read_are_lost_too() -> None:
    """All die at step 50, others are to begin at the checkpoint of step 40, and can read only that of step 30."""
    made_of = replace(MADE_OF, samples_per_step=PER_STEP, max_steps=1000, can_checkpoint=True)
    job = Driver(wanted=1, launcher="local", made_of=made_of)
    job.start(1)
    for step in (30, 40):
        trained(job, step, "w0")
        job.beat("w0", checkpoint=CheckpointRef(1, step, f"/c/step-{step}"))
    trained(job, 50, "w0")
    waiting = replace(job.statuses.pop("w0"), generation=0, step=-1, committed_in=0, state=MemberState.WAITING)
    job.exit("w0")
    job.wait(5.0)
    job.hello("w1", status=replace(waiting, holds=NO_BLOCKS))
    job.tick()
    job.stop("w1", job.statuses["w1"])
    assert job.planned().recovery == replace(job.planned().recovery, step=40)
    job.beat("w1", unreadable_checkpoint=UnreadableCheckpoint("/c/step-40", "it is cut short."))
    job.recover()
    world = job.job.durable.history[-1]
    assert (world.from_step, world.lost_steps) == (30, 20)
    assert job.counted("shoal_job_lost_steps_total") == 20


def test_steps_are_observed_with_the_time_between_two_heartbeats() -> None:
    job = job_of(1)
    job.beat("w0", telemetry=Telemetry(step_seconds=0.5, training_seconds=0.5), step=1)
    job.tick()
    job.beat("w0", telemetry=Telemetry(step_seconds=9.0, training_seconds=4.5), step=21)
    job.tick()
    assert job.observed("shoal_step_seconds") in ((1, 0.5), (21, 0.5 + 20 * 0.2))
    job.now += 60.0
    job.beat("w0", telemetry=Telemetry(step_seconds=0.2, training_seconds=4.7), step=22)
    job.tick()
    count, total = job.observed("shoal_step_seconds")
    assert count == 22
    assert abs(total - 4.7) < 1e-6


def test_the_time_between_two_checkpoints_is_known_from_the_second_on() -> None:
    job = Driver(wanted=1, made_of=replace(MADE_OF, can_checkpoint=True))
    job.start(1)
    job.beat("w0", checkpoint=CheckpointRef(1, 4, "/saves/step-4"))
    assert job.view.figures.checkpoint_interval is None
    job.now += 60.0
    job.beat("w0", checkpoint=CheckpointRef(1, 8, "/saves/step-8"))
    assert job.view.figures.checkpoint_interval == 60.0
