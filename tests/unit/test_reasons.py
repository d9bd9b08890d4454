"""A job that waits says why, also what kept workers from being there."""

from dataclasses import replace

from machine_driver import MADE_OF, Driver
from shoal_protos.acts import Pause, Resume
from shoal_protos.messages import MemberState

HOW = '; launcher is none: start workers with "shoal worker --controller HOST:PORT --job job -- COMMAND"'


def test_a_job_whose_workers_are_all_refused_says_why_in_its_reason() -> None:
    job = Driver(wanted=2)
    job.hello("w0")
    job.hello("w1", description=replace(MADE_OF, mirrors=3))
    assert job.view.reason.startswith("1 of 2 workers ready")
    assert "; the last worker to join was refused: worker w1" in job.view.reason
    job.restart()
    assert "; the last worker to join was refused: worker w1" in job.view.reason


def test_a_refusal_is_no_reason_any_more_once_a_world_trains() -> None:
    job = Driver(wanted=2, min_workers=2)
    job.hello("w0", description=replace(MADE_OF))
    job.hello("w9", description=replace(MADE_OF, mirrors=3))
    job.hello("w1")
    del job.connections["w9"], job.statuses["w9"]
    job.recover()
    job.die("w1")
    job.recover()
    assert job.view.reason == f"1 worker active, min_workers is 2{HOW}"


def test_a_job_whose_worker_failed_says_so_while_it_waits_for_the_next() -> None:
    job = Driver(wanted=1, launcher="local")
    worker = job.view.workers[0].worker
    tail = '  File "train.py", line 1, in <module>\nConnectionError: no such host'  # which may be there the next time
    job.exit(worker, code=1, why="its process ended with status 1", tail=tail)
    assert f"; worker {worker} failed: its process ended with status 1" in job.view.reason
    assert "no such host" in job.view.reason


def test_a_paused_job_without_a_world_says_who_paused_it() -> None:
    job = Driver(wanted=2)
    job.hello("w0")
    job.feed(Pause())
    assert job.view.reason.startswith("paused by an operator; 1 of 2 workers ready")


def test_a_job_that_stands_still_for_a_planned_change_names_whom_it_waits_for() -> None:
    job = Driver(wanted=2, min_workers=2)
    job.start(2)
    job.die("w1")
    job.recover()
    assert job.view.reason == f"1 worker active, min_workers is 2{HOW}"
    job.hello("w2")
    job.beat("w2", state=MemberState.WAITING)
    job.wait(2.0)
    generation = job.job.durable.planned[-1].generation
    assert job.view.reason.startswith(
        f"generation {generation} is planned (join); waiting for w0, w2 to build its group ("
    )
    job.builds_a_group("w0", generation)
    job.wait(0.5)
    assert "; waiting for w2 to build its group (" in job.view.reason


def test_a_job_that_trains_names_whom_a_planned_change_waits_for_only_when_that_takes_long() -> None:
    job = Driver(wanted=2, progress_seconds=10.0)
    job.start(2)
    job.die("w1")
    job.recover()
    job.hello("w2")
    job.beat("w2", state=MemberState.WAITING)
    job.wait(2.0)
    generation = job.job.durable.planned[-1].generation
    job.builds_a_group("w0", generation)
    assert job.view.reason == ""
    for step in range(2, 14):
        job.now += 1.0
        job.beat("w2")
        job.beat("w0", step=step, boundaries=step)
        job.tick()
    assert job.view.reason.startswith(f"generation {generation} is planned (join); waiting for w2 to build its group (")


def test_a_job_that_is_resumed_does_not_say_that_it_lacks_workers() -> None:
    job = Driver(wanted=2)
    job.start(2)
    for asked in (Pause(), Resume()):
        job.feed(asked)
        job.wait(0.5)
        plan = job.job.durable.planned[-1]
        if not plan.steps:
            for worker in ("w0", "w1"):
                job.train(worker, plan, steps=0)
            assert job.view.reason == "paused by an operator"
    assert job.view.reason.startswith("generation ")
    assert "is planned (balance); it begins with the next vote (" in job.view.reason


def test_a_job_that_is_to_pause_says_so_until_it_does() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.feed(Pause())
    assert job.view.reason == "pausing; the workers stop between two steps"


def test_a_job_that_is_resumed_says_that_it_is_planned_while_the_planner_thinks() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.feed(Pause())
    job.wait(0.5)
    plan = job.job.durable.planned[-1]
    for worker in ("w0", "w1"):
        job.train(worker, plan, steps=0)
    job.planner_answers = False
    job.feed(Resume())
    assert job.view.reason == "2 workers active; a generation that trains is being planned"
