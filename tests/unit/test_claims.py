"""What a worker claims is checked before any of it is believed: its run, its numbers, its results, its checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_driver import MADE_OF, NEW, RUN, Driver
from shoal_controller.core.effects import Close
from shoal_controller.core.spec import Phase
from shoal_protos.checkpoint import Sighting
from shoal_protos.messages import Point, Refusal, Result, Shutdown, Status, Welcome
from shoal_protos.runs import every

OLD = Status(900, 1, Point.TRAINING, 1, step=5000, committed_in=1, boundaries=5000, holds=every(8), current=True)


# ---- the run


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (
            "run-0",
            "worker w7 on host belongs to run run-0 of job job, which is over or was replaced; this is run run-1.",
        ),
        ("", "worker w7 on host says that it is in generation 1 of job job and names no run;"),
    ],
)
def test_a_worker_of_another_run_is_turned_away_before_anything_of_its_status_is_read(run: str, sentence: str) -> None:
    job = Driver(wanted=2)
    job.start(2)
    before = job.job
    job.hello("w7", status=OLD, run=run)
    (refusal,) = job.said("w7")
    assert isinstance(refusal, Refusal) and refusal.final and refusal.sentence.startswith(sentence)
    assert job.of(Close) and job.notes == [refusal.sentence]
    assert job.job == before, "nothing of it is remembered"


def test_a_worker_of_another_run_cannot_have_the_place_of_a_worker_that_was_launched_and_not_heard_of_yet() -> None:
    job = Driver(wanted=1, launcher="local", command=("x",))
    job.hello("w0", status=OLD, run="run-0")
    assert job.view.phase is Phase.WAITING and job.job.durable.roster["w0"].incarnation == ""
    job.hello("w0", status=NEW, run=RUN)
    assert isinstance(job.said("w0")[0], Welcome)


def test_a_controllers_restart_keeps_the_run_and_its_workers_go_on() -> None:
    job = Driver(wanted=2)
    job.start(2)
    statuses = dict(job.statuses)
    job.restart()
    for worker, status in statuses.items():
        job.hello(worker, status=status)
        assert isinstance(job.said(worker)[0], Welcome)
    assert job.view.phase is Phase.RUNNING


def test_a_job_that_is_over_tells_its_own_workers_how_it_ended_and_turns_others_away() -> None:
    job = Driver(wanted=1)
    job.hello("w0")
    job.say("w0", Result(0, failure="no such file", everyone=True))
    job.hello("w0")
    assert isinstance(job.said("w0")[0], Shutdown)
    job.hello("w0", run="run-0")
    assert isinstance(job.said("w0")[0], Refusal)


def test_a_checkpoint_of_another_run_is_read_and_the_event_names_that_run() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, can_checkpoint=True))
    found = Sighting(step=7, generation=3, path="/checkpoints/7", bytes=1, run="run-0")
    job.hello("w0", status=Status(0, 0, Point.WAITING, 0, -1, 0, checkpoint=found))
    assert job.view.last_checkpoint_step == 7
    assert "a checkpoint of step 7 was found at /checkpoints/7; run run-0 has saved it, this is run run-1" in job.notes
