"""Spares of a job: asked for, refused in one sentence, started, shown, and at work in the recovery itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crew import Crew, Task
from machine_driver import MADE_OF, Driver
from reference import reference
from shoal_controller.core.machine.job_size import ImpossibleSize, JobSize, resized
from shoal_controller.core.machine.spec import Phase, WorkerBounds
from shoal_controller.elastic_jobs.resource_forms import size_change
from shoal_protos.acts import Scale
from shoal_protos.shape import Shape


def test_a_launcher_starts_spares_too_and_a_job_shows_them_apart() -> None:
    job = Driver(wanted=2, launcher="local", spares=1)
    assert job.spawned == ["w0", "w1", "w2"]
    job.start(2)
    assert (job.view.phase, job.view.active, job.view.active_spares, job.view.spares) == (Phase.RUNNING, 2, 0, 1)
    job.hello("w2")
    plan = job.job.durable.planned[-1]
    assert plan.lanes_by_worker["w2"] == ()
    for member in plan.members:
        job.train(member.worker, plan)
    assert (job.view.active, job.view.active_spares) == (2, 1)


def test_the_number_of_spares_is_changed_while_the_job_trains() -> None:
    job = Driver(wanted=3)
    job.start(3)
    job.feed(Scale(2, spares=1))
    plan = job.job.durable.planned[-1]
    assert [len(lanes) for lanes in plan.lanes_by_worker.values()] == [4, 4, 0]
    assert [record.worker for record in job.job.durable.roster.values() if record.leaving] == []
    for member in plan.members:
        job.train(member.worker, plan)
    job.feed(Scale(3, spares=0))
    assert all(job.job.durable.planned[-1].lanes_by_worker.values())


@pytest.mark.parametrize(
    ("lanes", "spares_train", "trains"),
    [(8, None, False), (12, None, True), (8, True, True), (12, False, False)],
)
def test_where_lanes_are_many_or_the_job_says_so_spares_train(
    lanes: int, spares_train: bool | None, trains: bool
) -> None:
    job = Driver(wanted=3, made_of=replace(MADE_OF, lanes=lanes), spares_train=spares_train)
    job.start(3)
    job.feed(Scale(2, spares=1))
    world = (job.job.durable.current, *job.job.durable.planned)[-1]
    assert world is not None and bool(world.lanes_by_worker["w2"]) == trains


SIZE = JobSize("job", 4, WorkerBounds(1, None), 8, mirrors=1)


@pytest.mark.parametrize(
    ("size", "asked", "sentence"),
    [
        (replace(SIZE, mirrors=0), 1, "cannot have 1 spare: its config has mirrors 0, .*; ask for 5 workers, or set"),
        (SIZE, 5, "cannot have 5 spares beside 4 workers: .* at most 8 workers can; expected at most 4 spares"),
        (replace(SIZE, bounds=WorkerBounds(1, 4)), 1, "at most 4 workers can; expected at most 0 spares"),
        (
            replace(SIZE, cell=Shape(tensor=2), bounds=WorkerBounds(2, None)),
            1,
            "spares are for jobs whose workers train, and start, by themselves",
        ),
        (SIZE, -1, "cannot have -1 spares; expected 0 or more"),
    ],
)
def test_spares_that_cannot_be_are_refused_in_one_sentence(size: JobSize, asked: int, sentence: str) -> None:
    with pytest.raises(ImpossibleSize, match=sentence) as refused:
        resized(size, Scale(spares=asked))
    assert str(refused.value).count(". ") == 0
    assert resized(SIZE, Scale(spares=4)).spares == 4


def test_a_worker_whose_config_has_no_mirrors_is_refused_by_a_job_with_spares() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, mirrors=0), spares=1)
    job.hello("w0")
    assert job.job.durable.description is None
    assert "its config has mirrors 0, so they would hold nothing" in job.job.durable.last_refusal


def test_a_resource_that_asks_for_spares_scales_its_job() -> None:
    job = Driver(wanted=2)
    job.start(2)
    assert size_change(job.view, replace(job.spec, spares=1)) == Scale(spares=1)
    assert size_change(job.view, job.spec) is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_spare_trains_in_the_recovery_and_the_bits_are_those_of_an_undisturbed_run(stage: int) -> None:
    task = Task({"max_steps": 14, "stage": stage})
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.request(Scale(2, spares=1))
        crew.train_until("the spare", lambda: crew.at_rest() and len(crew.job.durable.current.trainers) == 2)
        before = crew.job.durable.current
        assert len(before.shares[2].mirrored) == before.blocks and not before.shares[2].owned
        crew.kill("a")
        crew.train_until("the recovery", lambda: crew.job.durable.current.generation > before.generation)
        world = crew.job.durable.current
        assert len(world.trainers) == 2 == world.world_size and world.recovery is not None
        assert crew.finish() == reference(task)
    assert max(resize.pause_bytes for resize in crew.job.durable.history if resize.reason == "kill") == 0 or stage < 3
