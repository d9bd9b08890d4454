"""A worker has seen another process of its host die: that is certain, whatever else is heard of it."""

from __future__ import annotations

import pytest
from machine_driver import Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Place, Standing
from shoal_controller.core.machine.effects import Close, Note
from shoal_controller.core.machine.events import Disconnected, Probed, Spawned
from shoal_protos.messages import Prepare


def training(**spec: object) -> Driver:
    job = Driver(wanted=3, **spec)
    job.start(3)
    return job


def dead(job: Driver) -> list[str]:
    return [record.worker for record in job.job.durable.roster.values() if record.standing is Standing.DEAD]


@rule(
    "What a process has seen to die on its host is dead at once, though its stream is open, its port answers and the "
    "launcher sees it alive: the kernel frees its memory before it closes anything",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            " and record.host == witness.host\n",
            "\n",
            by="test_of_other_hosts_nothing_is_believed",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            '            turn.drop("connections", process.connection)\n            turn.see(',
            "            turn.see(",
        ),
    ],
)
@pytest.mark.parametrize("is_launched", [False, True])
def test_what_a_worker_has_seen_to_die_is_dead_and_what_it_had_sent_before_brings_it_not_back(
    is_launched: bool,
) -> None:
    job = training()
    if is_launched:
        job.feed(Spawned("w1", Place("process 7", 7)))
    job.beat("w0", dead=("inc-w1",))
    assert job.of(Close) == [Close(job.connections["w1"])]
    assert [(note.kind, note.data["noticed_by"]) for note in job.of(Note) if note.worker == "w1"] == [
        ("lost", "worker w0")
    ]
    assert any(isinstance(message, Prepare) for message in job.messages_to("w2"))
    job.beat("w1")
    job.feed(Probed("w1", "inc-w1", refused=False, reached=True))
    assert dead(job) == ["w1"]
    assert job.feed(Disconnected(job.connections.pop("w1"), "reset")) == []
    job.beat("w2", dead=("inc-w1",))
    assert job.of(Note) == []


@holds("What a process has seen to die")
def test_of_other_hosts_nothing_is_believed() -> None:
    job = Driver(wanted=3)
    for worker, host in (("w0", "a"), ("w1", "b"), ("w2", "b")):
        job.hello(worker, host=host)
    job.beat("w0", dead=("inc-w1", "inc-w0", "nobody"))
    assert dead(job) == []
    job.beat("w2", dead=("inc-w1",))
    assert dead(job) == ["w1"]
