"""A worker has seen another process of its host die: that is certain, whatever else is heard of it."""

from __future__ import annotations

import pytest
from machine_driver import Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Place, Standing
from shoal_controller.core.machine.effects import Close, Note, Spawn
from shoal_controller.core.machine.events import Disconnected, Probed, Spawned
from shoal_controller.core.machine.phases.failure_detector import EXIT_SECONDS
from shoal_protos.messages import Prepare


def training() -> Driver:
    job = Driver(wanted=3)
    job.start(3)
    return job


def launched(launcher: str = "local") -> Driver:
    """The launcher has started all of them."""
    job = Driver(wanted=3, launcher=launcher)
    job.tick()
    for worker in job.job.durable.roster:
        job.feed(Spawned(worker, Place(f"process {worker}", 7)))
    job.start(3)
    return job


def dead(job: Driver) -> list[str]:
    return [record.worker for record in job.job.durable.roster.values() if record.standing is Standing.DEAD]


def events(job: Driver) -> list[tuple[str, str]]:
    """The kinds of what went into the history, and the workers."""
    return [(str(note.kind), note.worker) for note in job.of(Note)]


def is_stopped(job: Driver, worker: str) -> bool:
    return any(isinstance(message, Prepare) for message in job.messages_to(worker))


@rule(
    "What a process has seen to die on its host is dead at once, though its stream is open and its port answers: the "
    "kernel frees its memory before it closes anything",
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
            '        turn.drop("connections", process.connection)\n        turn.see(',
            "        turn.see(",
        ),
    ],
)
def test_what_a_worker_has_seen_to_die_is_dead_and_what_it_had_sent_before_brings_it_not_back() -> None:
    job = training()
    job.beat("w0", dead=("inc-w1",))
    assert job.of(Close) == [Close(job.connections["w1"])]
    assert [(note.kind, note.data["noticed_by"]) for note in job.of(Note) if note.worker == "w1"] == [
        ("lost", "worker w0")
    ]
    assert is_stopped(job, "w2")
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


@rule(
    "How a process ended that others have seen to die is its launcher's to say, if that watches it: its world changes "
    "at once, and it counts as killed or as failed, and is replaced, when the launcher has said it or is late",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "record.ending is None and record.launched and turn.spec.started_together == 1",
            "False",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            'record.why if record.standing is Standing.HERE else ""',
            "record.why",
        ),
        Edit("shoal_controller.core.machine.phases.scaling", "spawn_after and not turn.job.seen_to_die", "spawn_after"),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    _believe_without_launcher(turn)\n",
            "",
            by="test_a_launcher_that_does_not_say_how_it_ended_is_not_waited_for",
        ),
        Edit(
            "shoal_controller.core.machine.job",
            " or self.seen_to_die or",
            " or",
            by="test_a_launcher_that_does_not_say_how_it_ended_is_not_waited_for",
        ),
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "        if record.worker in turn.job.seen_to_die:\n            continue\n",
            "",
            by="test_a_pod_whose_process_was_seen_to_die_says_how_before_it_is_ended",
        ),
    ],
)
@pytest.mark.parametrize(
    ("code", "kind", "counted"),
    [(3, "failed", (1, 0)), (0, "failed", (1, 0)), (-9, "lost", (0, 1)), (-15, "lost", (0, 0))],
)
def test_how_a_process_ended_that_was_seen_to_die_is_its_launchers_to_say(
    code: int, kind: str, counted: tuple[int, int]
) -> None:
    job, why = launched(), f"its process 7 ended by {code}"
    job.beat("w0", dead=("inc-w1",))
    assert is_stopped(job, "w2")
    assert events(job) == [("disconnected", "w1"), ("prepare", "")]
    assert job.of(Close) == [Close(job.connections["w1"])]
    job.beat("w1")
    job.beat("w2", dead=("inc-w1",))
    job.tick()
    assert job.spawned == []
    job.exit("w1", code, why)
    assert events(job)[:1] == [(kind, "w1")]
    assert why in job.notes[0]
    assert job.spawned == ["w3"]
    assert dead(job) == ["w1"]
    failures = job.job.durable.failures
    assert (failures.script, failures.deaths) == counted
    job.beat("w2", dead=("inc-w1",))
    assert job.of(Note) == []


@holds("How a process ended that others have seen to die")
def test_a_launcher_that_does_not_say_how_it_ended_is_not_waited_for() -> None:
    job = launched()
    job.beat("w0", dead=("inc-w1",))
    assert not job.job.is_calm, "that it is late is seen by a tick"
    del job.connections["w1"]
    effects = job.wait(EXIT_SECONDS + 1.0)
    assert [note.worker for note in effects if isinstance(note, Note) and note.kind == "lost"] == ["w1"]
    assert [spawn.worker for spawn in effects if isinstance(spawn, Spawn)] == ["w3"]
    job.exit("w1", 3, "its process 7 ended with status 3")
    assert job.notes == ["worker w1 failed: its process 7 ended with status 3"]


@holds("How a process ended that others have seen to die")
def test_a_pod_whose_process_was_seen_to_die_says_how_before_it_is_ended() -> None:
    job = launched("kubernetes")
    job.beat("w0", dead=("inc-w1",))
    del job.connections["w1"]
    job.recover()
    job.tick()
    assert job.job.durable.current is not None
    assert job.job.durable.committed_in == job.job.durable.current.generation == 2
    assert job.killed == []
    job.exit("w1", -9, "its pod was ended by SIGKILL")
    assert events(job)[0] == ("lost", "w1")


def test_another_controller_is_told_by_the_launcher_how_it_ended() -> None:
    job = launched()
    job.beat("w0", dead=("inc-w1",))
    job.restart()
    job.hello("w0")
    assert [kind for kind, _ in events(job)] == ["disconnected"]
    job.exit("w1", 3, "its process 7 ended with status 3")
    assert job.notes[0] == "worker w1 failed: its process 7 ended with status 3"
