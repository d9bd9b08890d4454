"""When a job is calm, so that ticks may be rare: everybody is heard, and nothing but an answer changes anything."""

import pytest
from machine_driver import training
from rule import Edit, holds, rule
from shoal_controller.core.machine.events import Disconnected
from shoal_protos.acts import Cancel, DrainWorker, Pause, Scale


def test_a_job_whose_world_trains_and_whose_workers_are_all_heard_is_calm():
    assert training().job.is_calm


def test_a_worker_that_is_dead_or_has_left_does_not_keep_a_job_from_being_calm_once_its_blocks_have_copies_again():
    job = training(3)
    job.exit("w2")
    job.recover()
    job.wait(1)
    assert job.job.is_calm == (not job.job.durable.current.fills and not job.job.durable.planned)


def test_a_recovery_in_which_all_who_are_left_are_heard_is_calm_for_it_waits_for_answers_only():
    job = training(3)
    job.exit("w2")
    assert job.view.phase == "resizing"
    assert job.job.is_calm
    job.feed(Disconnected(job.connections["w1"], "its stream ended"))
    assert not job.job.is_calm, "its port has to be probed"


@pytest.mark.parametrize("request_", [Scale(2), DrainWorker("w1"), Pause()])
def test_whoever_asks_for_a_change_ends_the_calm_until_it_is_made(request_):
    job = training(3)
    job.feed(request_)
    assert not job.job.is_calm


def test_a_job_that_is_to_be_cancelled_is_not_calm():
    job = training(3)
    job.feed(Cancel())
    assert not job.job.is_calm


@rule(
    "In a calm job (a world trains and nothing is to change, or one is being made, and everybody is heard) a "
    "tick comes every quarter of a heartbeat interval, in any other one every 0.1 s, unless it waits",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.job",
            "        return all(one.connection is not None and one.ping is None for one in served)\n",
            "        return all(one.connection is not None for one in served)\n",
        ),
        Edit(
            "shoal_controller.core.machine.job",
            "        return all(one.connection is not None and one.ping is None for one in served)\n",
            "        return all(one.ping is None for one in served)\n",
        ),
        Edit("shoal_controller.jobs.runner", "        if self._job.is_calm and 0 <= now", "        if 0 <= now"),
    ],
)
def test_a_worker_that_is_silent_ends_the_calm_before_it_is_suspected():
    job = training(3)
    for _ in range(5):
        job.now += 0.5
        for worker in ("w0", "w1"):
            job.beat(worker)
        job.tick()
    assert job.job.processes["w2"].ping is not None
    assert not job.job.is_calm


@holds("In a calm job (a world trains")
def test_a_stream_that_ends_ends_the_calm_at_once():
    job = training(3)
    job.feed(Disconnected(job.connections["w2"], "its stream ended"))
    assert job.view.phase == "running"
    assert not job.job.is_calm


def test_a_worker_that_waits_for_a_world_ends_the_calm():
    job = training(3, max_workers=8)
    job.planner_answers = False
    job.hello("w3")
    assert not job.job.is_calm, "the planner has been asked"
