"""Pods of several processes, as the job decides on them: what is started together, and what goes when one has gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cells_driver import Pairs
from machine_driver import MADE_OF, Driver
from rule import Edit, rule
from shoal_controller.core.machine.durable import Leaving, Place, Standing
from shoal_controller.core.machine.events import Probed, Spawned
from shoal_controller.core.machine.job_size import ImpossibleSize
from shoal_protos.acts import DrainWorker, Scale
from shoal_protos.messages import Result

LANES = replace(MADE_OF, lanes=16)


def of_pods(wanted: int, each: int = 2, started: int = 0, **spec: Any) -> Driver:
    """A job in pods of so many processes; the first `started` train."""
    job = Driver(wanted, LANES, launcher="kubernetes", started_together=each, **spec)
    if started:
        job.start(started)
    return job


def leaving(job: Driver) -> dict[str, Leaving]:
    return {one.worker: one.leaving for one in job.job.durable.roster.values() if one.leaving}


def change(job: Driver) -> None:
    """The world that is planned takes over, and those that it has not are told to end."""
    (plan,) = job.job.durable.planned
    for member in plan.members:
        job.train(member.worker, plan)
    job.wait(1)


def test_processes_are_started_in_whole_pods_whose_ids_follow_each_other() -> None:
    assert of_pods(4).spawned == ["w0", "w1", "w2", "w3"]
    assert of_pods(5).spawned == ["w0", "w1", "w2", "w3"], "as many as make whole ones"
    assert of_pods(1).spawned == ["w0", "w1"], "one at least"
    job = of_pods(2, started=2)
    job.hello("", incarnation="by-hand")  # it gets w2
    job.feed(Scale(5))
    assert job.spawned == ["w4", "w5"]


@rule(
    "Where a process of a pod has gone, another pod is started for all of it, and those that are left stay until the "
    "processes of the other one have come",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "    if places.have_come(lasting, wanted):\n",
            "    if True:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "range((wanted - len(lasting)) // turn.spec.started_together)",
            "range((wanted - len(here)) // turn.spec.started_together)",
        ),
    ],
)
def test_a_dead_process_is_replaced_by_another_pod_and_the_one_beside_it_stays_until_that_has_come() -> None:
    job = of_pods(4, started=4)
    job.die("w0")
    job.wait(1)
    assert [one for one in job.job.durable.roster if one not in ("w0", "w1", "w2", "w3")] == ["w4", "w5"]
    job.recover()
    assert {member.worker for member in job.job.durable.current.members} == {"w1", "w2", "w3"}
    job.hello("w4")
    job.wait(1)
    assert not leaving(job), "half of the other pod is there"
    job.hello("w5")
    job.wait(1)
    assert leaving(job) == {"w1": Leaving.DRAIN}
    assert (
        "another process of its pod has ended, and others have come for both"
        in job.job.durable.roster["w1"].leaving_because
    )


@rule(
    "What is left of a pod, and goes when another one has come, has no part in the coordinates of that one's processes",
    "Cells",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.seating",
        "        others = (one for one in lasting if",
        "        others = (one for one in scaling.staying_workers(turn) if",
    ),
)
def test_the_pod_in_place_of_one_that_has_lost_a_process_makes_whole_cells_whichever_was_lost() -> None:
    for lost in ("w0", "w1"):
        job = Pairs(launcher="kubernetes", started_together=2, wanted=2)
        job.start(2)
        job.die(lost)
        job.wait(1)
        assert [job.seat("w2"), job.seat("w3")] == [0, 1]


def test_a_refused_connection_proves_the_death_of_a_process_whose_pod_lives() -> None:
    for each, standing in ((2, Standing.DEAD), (1, Standing.HERE)):
        job = of_pods(2, each, started=2)
        for worker in ("w0", "w1"):
            job.feed(Spawned(worker, Place.of_pod("job-w0", "uid", "node")))
            job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
        job.die("w0")
        job.wait(0.5)
        assert job.job.durable.roster["w0"].standing is standing


def test_a_drained_process_takes_its_pod_with_it_and_a_scale_down_whole_pods() -> None:
    job = of_pods(4, started=4)
    job.feed(DrainWorker("w2", 30.0, ""))
    job.wait(1)
    assert "w5" in job.job.durable.roster and leaving(job) == {"w2": Leaving.DRAIN}
    for worker in ("w4", "w5"):
        job.hello(worker)
    job.wait(1)
    assert leaving(job) == {"w2": Leaving.DRAIN, "w3": Leaving.DRAIN}
    less = of_pods(6)
    for worker in ("w0", "w2", "w4", "w1", "w3", "w5"):  # in this order they are old
        less.hello(worker)
    less.recover()
    less.feed(Scale(3))
    assert leaving(less) == dict.fromkeys(("w2", "w3", "w4", "w5"), Leaving.SCALE_DOWN)
    assert not less.spawned


def test_bounds_that_divide_a_pod_are_refused_where_they_are_asked_for() -> None:
    """Else a job that wants three and may have no fewer has two, and waits for ever."""
    job = of_pods(4, started=4)
    for asked in (Scale(3, least=3), Scale(None, most=5)):
        with pytest.raises(ImpossibleSize, match="a pod of it has 2 workers; expected a multiple of that"):
            job.feed(asked)
    job.feed(Scale(3, least=2, most=6))
    assert job.job.durable.wanted == 3


@rule(
    "A pod is not ended for one of its processes while another of them is to go on",
    "A change of the world",
    broken_by=Edit("shoal_controller.core.machine.phases.scaling", " and not places.has_others(turn, worker):", ":"),
)
def test_a_process_that_does_not_end_is_killed_when_nothing_else_of_its_pod_is_to_go_on() -> None:
    job = of_pods(4, started=4)
    job.say("w0", Result(3, failure="RuntimeError: in the optimizer"))
    job.recover()
    job.wait(90)
    assert not any("did not end" in note for note in job.notes), "w1 of its pod trains"
    job.exit("w1")
    assert job.killed == ["w0"]
