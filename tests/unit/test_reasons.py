"""A job that waits says why, also what kept workers from being there."""

from dataclasses import replace

from machine_driver import MADE_OF, Driver
from shoal_controller.core.machine.events import Pause


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
    assert job.view.reason == "1 worker active, min_workers is 2"


def test_a_job_whose_worker_failed_says_so_while_it_waits_for_the_next() -> None:
    job = Driver(wanted=1, launcher="local")
    worker = job.view.workers[0].worker
    job.exit(worker, code=1, why="its process ended with status 1", tail="ModuleNotFoundError: No module named 'x'")
    assert f"; worker {worker} failed: its process ended with status 1" in job.view.reason
    assert "No module named 'x'" in job.view.reason


def test_a_paused_job_without_a_world_says_who_paused_it() -> None:
    job = Driver(wanted=2)
    job.hello("w0")
    job.feed(Pause())
    assert job.view.reason.startswith("paused by an operator; 1 of 2 workers ready")
