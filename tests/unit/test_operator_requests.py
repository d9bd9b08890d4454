"""What an operator asks for: done, or refused in a sentence, and then nothing has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_driver import MADE_OF, Driver, training
from rule import Edit, rule
from shoal_controller.core.machine.durable import Standing
from shoal_controller.core.machine.effects import Note
from shoal_controller.core.machine.events import Event, Tick
from shoal_controller.core.machine.spec import State
from shoal_protos.acts import Cancel, ConfirmLost, DrainWorker, Pause, Resume, Save, Scale
from shoal_protos.errors import Conflict, NotFound, UserError
from shoal_protos.messages import (
    Ask,
    Drain,
    Result,
)


def refused(job: Driver, request: Event) -> str:
    before = job.job
    with pytest.raises(UserError) as error:
        job.feed(request)
    assert job.job is before
    return str(error.value)


def test_an_evicted_worker_may_be_confirmed_dead_though_its_stream_has_not_broken() -> None:
    job = training(3)
    del job.connections["w2"], job.statuses["w2"]  # it is frozen: nothing comes through its stream
    job.wait(10.0)
    job.recover()
    assert job.job.durable.roster["w2"].standing is Standing.LOST
    assert job.job.processes["w2"].connection is not None
    job.feed(ConfirmLost("w2"))
    assert job.job.durable.roster["w2"].standing is Standing.DEAD


def test_scaling_outside_the_bounds_names_both() -> None:
    job = Driver(wanted=3, min_workers=2, max_workers=5)
    assert refused(job, Scale(6)) == "job job cannot be scaled to 6 workers; expected from 2 to 5."
    assert refused(job, Scale(1)) == "job job cannot be scaled to 1 worker; expected from 2 to 5."


def test_scaling_is_bounded_by_lanes_where_no_maximum_is_given() -> None:
    job = Driver(wanted=2)
    job.start(2)
    assert refused(job, Scale(9)) == "job job cannot be scaled to 9 workers; expected from 1 to 8."


def test_bounds_change_while_a_job_trains_and_outlive_the_controller() -> None:
    job = training(2, max_workers=4)
    job.feed(Scale(least=2, most=6))
    assert "the job may have from 2 to 6 workers" in job.notes
    job.restart()
    assert (job.view.min_workers, job.view.wanted, job.view.max_workers) == (2, 2, 6)
    job.feed(Scale(6))
    job.feed(Scale(most=0))
    assert (job.view.wanted, job.view.max_workers) == (6, 8), "no bound but the lanes"
    assert job.job.spec.max_workers == 4, "what it was made with stays"


def test_a_world_below_a_raised_minimum_commits_no_step_until_enough_have_come() -> None:
    job = training(2)
    job.feed(Scale(3, least=3))
    assert not job.job.durable.planned[-1].steps
    job.feed(Scale(least=2))
    assert refused(job, Scale(1)) == "job job cannot be scaled to 1 worker; expected from 2 to 8."


def test_a_lowered_maximum_lets_those_go_who_came_by_themselves_beyond_it() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.hello("w2")
    job.feed(Scale(most=2))
    assert job.view.workers[2].state is State.DRAINING


def test_a_job_that_would_begin_with_nobody_is_refused() -> None:
    job = Driver(wanted=2)
    assert refused(job, Scale(least=0)) == "job job cannot have at least 0 workers; expected 1 or more."


def test_bounds_that_a_job_cannot_have_are_refused_with_what_it_can() -> None:
    job = training(2, max_workers=4)
    assert refused(job, Scale(least=5)) == "job job cannot have at least 5 workers; expected 1 to 4."
    assert refused(job, Scale(least=3)) == "job job wants 2 workers, not from 3 to 4; scale it in the same request."
    assert refused(job, Scale(most=9)) == (
        "job job cannot have up to 9 workers: it has 8 lanes, and every worker trains at least one."
    )


def test_draining_an_unknown_worker_names_those_there_are() -> None:
    job = Driver(wanted=2)
    job.start(2)
    with pytest.raises(NotFound):
        job.feed(DrainWorker("w7"))
    assert refused(job, DrainWorker("w7")) == "job job has no worker w7; its workers are: w0, w1."
    assert refused(job, DrainWorker("w" * 200)) == f"job job has no worker {'w' * 78}…; its workers are: w0, w1."


def test_the_last_worker_is_not_drained_without_a_checkpoint() -> None:
    job = Driver(wanted=1)
    job.start(1)
    assert "worker w0 is the last one of job job: its state would be lost" in refused(job, DrainWorker("w0"))


def test_the_last_worker_may_go_when_a_joiner_is_ready() -> None:
    job = Driver(wanted=1)
    job.start(1)
    job.hello("w1")
    job.feed(DrainWorker("w0", 7.0))
    assert Drain(7.0, 1) in job.messages_to("w0") or Drain(7.0, 2) in job.messages_to("w0")
    assert job.view.workers[0].state is State.DRAINING


@rule(
    "… or at once, when an operator says who is dead",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.operator_requests",
        "    failure_detector.confirm_death(\n"
        '        turn, record.worker, "an operator confirmed that its process is gone", noticed_by="an '
        'operator"\n'
        "    )",
        '    turn.note(EventKind.LOST, "an operator confirmed that its process is gone", record.worker)',
    ),
    after="The wait for a silent",
)
def test_an_operators_word_ends_the_wait_for_a_silent_majority_at_once() -> None:
    job = Driver(wanted=3)
    job.start(3)
    for _ in range(60):
        job.now += 0.5
        job.beat("w0")
        job.feed(Tick())
    assert "2 of 3 workers are silent (w1 for 30 s, w2 for 30 s)" in job.view.reason
    assert refused(job, ConfirmLost("w0")) == (
        'worker w0 is not lost: it was heard 0.0 s ago. To let it go: "shoal drain job w0".'
    )
    job.feed(ConfirmLost("w1"))
    job.feed(ConfirmLost("w2"))
    assert [worker.state for worker in job.view.workers] == [State.ACTIVE, State.LOST, State.LOST]
    assert "silent" not in job.view.reason
    assert job.job.attempt is not None and "an operator confirmed that its process is gone" in job.job.attempt.why
    assert (
        refused(job, ConfirmLost("w2")) == "worker w2 is already gone: an operator confirmed that its process is gone."
    )


def test_draining_twice_or_resuming_what_is_not_paused_is_a_conflict() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.feed(DrainWorker("w1"))
    assert refused(job, DrainWorker("w1")) == "worker w1 is already being drained."
    assert refused(job, Resume()) == "job job is not paused; it is running."
    job.feed(Pause())
    assert refused(job, Pause()) == "job job is already paused."


def test_a_checkpoint_without_a_path_is_refused() -> None:
    job = Driver(wanted=1)
    job.start(1)
    assert "set checkpoint.path" in refused(job, Save())


def test_a_checkpoint_is_asked_of_one_member() -> None:
    job = Driver(wanted=1, made_of=replace(MADE_OF, can_checkpoint=True))
    job.start(1)
    job.feed(Save())
    assert [type(message) for message in job.messages_to("w0")] == [Ask]


def test_a_job_that_is_over_refuses_wishes_and_says_why() -> None:
    job = Driver(wanted=2)
    job.feed(Cancel())
    assert (
        refused(job, Scale(2))
        == "job job is over (cancelled): cancelled before its first step, while no world was training."
    )
    with pytest.raises(Conflict):
        job.feed(Pause())


def test_a_job_that_is_cancelled_because_its_script_fails_ends_with_why_it_failed() -> None:
    job = Driver(wanted=2, launcher="local", command=("x",))
    job.hello("w0")
    job.say("w0", Result(0, failure="ValueError: no such column"))
    job.feed(Cancel())
    assert job.view.reason == (
        "cancelled before its first step, while no world was training; worker w0 failed: ValueError: no such column"
    )


def test_the_history_says_who_noticed_that_a_worker_is_gone() -> None:
    job = training(4)
    job.connections.pop("w1")
    job.wait(10)
    assert job.job.durable.roster["w1"].standing is Standing.LOST
    drained = job.feed(DrainWorker("w1"))
    died = job.exit("w2")
    noticed_by = {
        effect.worker: effect.data["noticed_by"]
        for effect in (*drained, *died)
        if isinstance(effect, Note) and effect.kind == "lost"
    }
    assert noticed_by == {"w1": "an operator", "w2": "the launcher"}
