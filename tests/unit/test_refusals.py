"""What a refused connection proves: a firewall, a tunnel or address translation refuses the living too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from machine_driver import MADE_OF, Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Place, Standing
from shoal_controller.core.machine.effects import Probe
from shoal_controller.core.machine.events import Disconnected, Probed, Spawned, Tick
from shoal_controller.core.machine.phases import failure_detector
from shoal_protos.addresses import split_address


def training(workers: int = 5, **spec: object) -> Driver:
    """A world in which everybody was reached."""
    job = Driver(wanted=workers, **spec)
    job.start(workers)
    for worker in job.connections:
        job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
    return job


def refuse(job: Driver, *workers: str) -> None:
    """Their streams break at once, and then their hosts refuse the controller's connections."""
    for worker in workers:
        job.feed(Disconnected(job.connections.pop(worker), "reset"))
    for worker in workers:
        job.feed(Probed(worker, f"inc-{worker}", refused=True))


def dead(job: Driver) -> list[str]:
    return [record.worker for record in job.job.durable.roster.values() if record.standing is Standing.DEAD]


def pass_time(job: Driver, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        job.now += 0.1
        for worker in tuple(job.connections):
            job.beat(worker)
        job.feed(Tick())


def test_who_says_hello_is_looked_for_at_once() -> None:
    job = Driver(wanted=2)
    job.hello("w0")
    assert job.of(Probe) == [Probe("w0", "inc-w0", "w0:1")]


def test_a_refusal_proves_a_death_where_that_very_process_was_reached() -> None:
    job = training()
    refuse(job, "w1", "w2")
    assert dead(job) == ["w1", "w2"]


@rule(
    "A refused connection proves a death only if this life of the controller has reached that very process at "
    "that address",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "if process.connection is not None or not process.reachable or process.worker",
            "if process.connection is not None or process.worker",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    if record is None or process is None or record.incarnation != event.incarnation:\n",
            "    if record is None or process is None:\n",
            by="test_a_refusal_that_was_meant_for_an_earlier_process_proves_nothing",
        ),
    ],
)
def test_a_refusal_proves_nothing_where_nobody_was_reached_and_the_history_says_so() -> None:
    job = Driver(wanted=3)
    job.start(3)
    job.feed(Probed("w1", "inc-w1", refused=True))
    assert job.notes == [
        "worker w1 on host is connected, but this controller cannot reach it at w1:1: a refused connection there "
        "proves nothing, so its death would be noticed by its silence or by the launcher"
    ]
    job.feed(Probed("w1", "inc-w1", refused=True))
    assert job.notes == []
    refuse(job, "w1")
    assert dead(job) == []
    pass_time(job, 4.0)
    assert job.job.durable.roster["w1"].standing is Standing.LOST, "silent like any other"


@holds("A refused connection proves a")
def test_who_was_reached_at_another_place_was_not_reached() -> None:
    job = training()
    job.hello("w1", address="w1:2", status=job.statuses["w1"])
    refuse(job, "w1")
    assert dead(job) == []


def test_who_could_not_be_reached_is_tried_again() -> None:
    job = Driver(wanted=2)
    job.start(2)
    probes = []
    for _ in range(310):
        job.now += 0.1
        probes += [effect for worker in ("w0", "w1") for effect in job.beat(worker) if isinstance(effect, Probe)]
        probes += [effect for effect in job.feed(Tick()) if isinstance(effect, Probe)]
    assert [probe.worker for probe in probes] == ["w0", "w1"] * 3
    job.feed(Probed("w1", "inc-w1", refused=False, reached=True))
    refuse(job, "w1")
    assert dead(job) == ["w1"]


@rule(
    "… and never within `reconnect_seconds` of a controller's start, until all whom an earlier controller knew have "
    "come back; so a new job's first loss is believed as soon as any other",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    if not refused or silence.may_be_reconnecting(turn):\n        return\n    patience",
            "    patience",
            by="test_after_a_controllers_start_no_refusal_counts_while_somebody_has_not_come_back",
        ),
        Edit(
            "shoal_controller.core.machine.phases.silence",
            "spec.reconnect_seconds and _awaits_somebody(job)\n",
            "spec.reconnect_seconds\n",
        ),
    ],
    after="A refused connection proves a",
)
def test_the_first_loss_of_a_new_job_is_believed_at_the_first_refusal() -> None:
    job = training()
    assert job.now - job.job.started_at < job.spec.reconnect_seconds
    refuse(job, "w1")
    assert dead(job) == ["w1"]


@holds("… and never within `reconnect_seconds` of a controller's start, until")
def test_after_a_controllers_start_no_refusal_counts_while_somebody_has_not_come_back() -> None:
    job = training()
    *back, last = dict(job.statuses).items()
    job.restart()
    for worker, status in back:
        job.hello(worker, status=status)
        job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
    refuse(job, "w1")
    pass_time(job, job.spec.reconnect_seconds - 0.5)
    assert dead(job) == [], f"{last[0]} may be on its way"
    pass_time(job, 1.0)
    assert dead(job) == ["w1"]


@holds("… and never within `reconnect_seconds` of a controller's start, until")
def test_after_a_controllers_start_a_refusal_counts_once_all_have_come_back() -> None:
    job = training()
    *back, (last, status) = dict(job.statuses).items()
    job.restart()
    for worker, known in back:
        job.hello(worker, status=known)
        job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
    refuse(job, "w1")
    job.hello(last, status=status)
    job.feed(Tick())
    assert dead(job) == ["w1"]


@holds("A refused connection proves a")
def test_a_controllers_earlier_life_has_reached_nobody_for_this_one() -> None:
    job = training()
    job.restart()
    pass_time(job, 2 * job.spec.reconnect_seconds)
    job.feed(Probed("w1", "inc-w1", refused=True))
    assert dead(job) == []


@rule(
    "… and for more than half of the members only after `reconnect_seconds`",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "turn.spec.reconnect_seconds if _most_are_gone(turn) else 0.0",
            "0.0",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "        if turn.now - since >= patience:\n",
            "        if patience == 0.0:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "since = turn.now if process.refused_since is None else process.refused_since",
            "since = turn.now",
            by="test_refusals_of_most_members_count_in_the_end_from_the_first_of_them",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "refused_since=since if event.refused else None",
            "refused_since=since if event.refused else process.refused_since",
            by="test_who_has_come_back_or_does_not_refuse_any_more_has_its_time_anew",
        ),
        Edit(
            "shoal_controller.core.machine.phases.admission",
            "            refused_since=None,\n",
            "",
            by="test_who_has_come_back_or_does_not_refuse_any_more_has_its_time_anew",
        ),
    ],
    after="… and not if the launcher sees",
)
def test_refusals_of_most_members_count_only_when_they_had_time_to_come_back() -> None:
    job = training()
    statuses = dict(job.statuses)
    refuse(job, "w0", "w1", "w2")
    pass_time(job, job.spec.reconnect_seconds - 1.0)
    assert dead(job) == []
    job.hello("w2", status=statuses["w2"])
    assert dead(job) == [], "two of five refuse, and the third is back"
    job.feed(Tick())
    assert dead(job) == ["w0", "w1"]


@holds("… and for more than half of the")
def test_refusals_of_most_members_count_in_the_end_from_the_first_of_them() -> None:
    job = training()
    refuse(job, "w0", "w1", "w2")
    for _ in range(round(job.spec.reconnect_seconds)):
        pass_time(job, 1.1)
        for worker in ("w0", "w1", "w2"):
            job.feed(Probed(worker, f"inc-{worker}", refused=True))
    assert dead(job) == ["w0", "w1", "w2"]


@holds("… and for more than half of the")
def test_who_has_come_back_or_does_not_refuse_any_more_has_its_time_anew() -> None:
    job = training()
    statuses = dict(job.statuses)
    refuse(job, "w0", "w1", "w2")
    pass_time(job, 9.0)
    job.hello("w0", status=statuses["w0"])
    job.hello("w1", status=statuses["w1"])
    job.feed(Probed("w2", "inc-w2", refused=False))
    refuse(job, "w0", "w1")
    job.feed(Probed("w2", "inc-w2", refused=True))
    pass_time(job, 9.0)
    assert dead(job) == []
    pass_time(job, 1.5)
    assert dead(job) == ["w0", "w1", "w2"]


@holds("A refused connection proves a")
def test_a_refusal_that_was_meant_for_an_earlier_process_proves_nothing() -> None:
    job = training()
    job.feed(Disconnected(job.connections.pop("w1"), "reset"))
    job.feed(Probed("w1", "the one before", refused=True))
    assert dead(job) == []


@holds("… and for more than half of the")
def test_who_refuses_one_after_the_other_counts_towards_most() -> None:
    job = training()
    refuse(job, "w0")
    refuse(job, "w1")
    refuse(job, "w2")
    assert dead(job) == ["w0", "w1"]


@rule(
    "… and not if the launcher sees the process alive",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.failure_detector",
        " or process.worker in turn.job.live_processes:\n",
        ":\n",
    ),
    after="… and never within `reconnect_seconds`",
)
def test_where_the_launcher_sees_the_process_no_refusal_proves_anything() -> None:
    job = Driver(wanted=3, launcher="local", command=("python", "train.py"))
    for worker in ("w0", "w1", "w2"):
        job.feed(Spawned(worker, Place.of_process(7, f"{worker}.log")))
    job.start(3)
    for worker in job.connections:
        job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
    refuse(job, "w1")
    assert dead(job) == []
    job.exit("w1")
    assert dead(job) == ["w1"]


# ---- a host that answers at another port


def alone(beside: str = "box:2", host: str = "box") -> Driver:
    """w0 trains alone at box:1. w1 has come at `beside`, on a machine of that name. Both were reached."""
    job = Driver(wanted=1)
    job.hello("w0", address="box:1", host="box")
    job.recover()
    job.feed(Probed("w0", "inc-w0", refused=False, reached=True))
    job.hello("w1", address=beside, host=host)
    job.feed(Probed("w1", "inc-w1", refused=False, reached=True))
    job.now += 2.0
    return job


def answer(job: Driver, worker: str = "w1", **met: bool) -> None:
    """The probe of a worker that is connected has met that; a tick follows."""
    job.feed(Probed(worker, f"inc-{worker}", **{"refused": False, "reached": True, **met}))
    job.now += 0.1
    job.feed(Tick())


@rule(
    "… but at once where the host has answered since at another port, at which this controller had reached a worker "
    "before: then nothing on the way refuses",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "        elif _answers_beside(answers[_place(record)], record, since):\n",
            "        elif False:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    return last is not None and last >= since\n",
            "    return last is not None\n",
            by="test_what_a_host_has_answered_before_it_refused_proves_nothing",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "get(event.worker) if process.reachable and not event.refused else None",
            "get(event.worker)",
            by="test_a_worker_that_is_reached_for_the_first_time_vouches_only_with_its_second_answer",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    return record.host, split_address(record.address)[0]\n",
            '    return "", split_address(record.address)[0]\n',
            by="test_another_machine_at_the_same_address_or_another_address_vouches_for_nobody",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    return record.host, split_address",
            '    return record.host, "" and split_address',
            by="test_another_machine_at_the_same_address_or_another_address_vouches_for_nobody",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            " in answers if address != refuses.address), None)",
            " in answers), None)",
            by="test_the_same_port_vouches_for_nobody",
        ),
    ],
    after="… and for more than half of the",
)
def test_a_lone_members_death_is_believed_as_soon_as_its_host_answers_at_another_port() -> None:
    job = alone()
    refuse(job, "w0")
    assert [probe for probe in job.of(Probe) if probe.worker == "w1"] == [Probe("w1", "inc-w1", "box:2", watched=False)]
    assert dead(job) == [], "its host has not answered yet"
    answer(job)
    assert dead(job) == ["w0"]
    assert job.job.durable.roster["w0"].why == "its host box refuses connections to box:1 and answers at another port"


@holds("… but at once where the host")
def test_a_host_that_answers_nothing_refuses_for_reconnect_seconds() -> None:
    for met in ({"reached": False}, {"reached": False, "refused": True}, {"refused": True}):
        job = alone()
        refuse(job, "w0")
        answer(job, **met)
        pass_time(job, job.spec.reconnect_seconds - 0.5)
        assert dead(job) == [], met
        pass_time(job, 0.6)
        assert dead(job) == ["w0"]


@holds("… but at once where the host")
def test_what_a_host_has_answered_before_it_refused_proves_nothing() -> None:
    job = alone()
    answer(job)
    job.now += 2.0
    refuse(job, "w0")
    pass_time(job, 2.0)
    assert dead(job) == []
    answer(job)
    assert dead(job) == ["w0"]


@holds("… but at once where the host")
def test_a_worker_that_is_reached_for_the_first_time_vouches_only_with_its_second_answer() -> None:
    job = alone(beside="elsewhere:1", host="elsewhere")
    refuse(job, "w0")
    job.hello("w2", address="box:3", host="box")
    answer(job, "w2")
    assert dead(job) == []
    pass_time(job, 1.0)
    answer(job, "w2")
    assert dead(job) == ["w0"]


@holds("… but at once where the host")
def test_another_machine_at_the_same_address_or_another_address_vouches_for_nobody() -> None:
    for beside, host in (("box:2", "another"), ("other:2", "box")):
        job = alone(beside, host)
        refuse(job, "w0")
        answer(job)
        assert dead(job) == []


@holds("… but at once where the host")
def test_the_same_port_vouches_for_nobody() -> None:
    """Whoever is there now is another process: the host's refusal was of a moment."""
    job = alone("box:1")
    refuse(job, "w0")
    answer(job)
    assert dead(job) == []


@holds("… but at once where the host")
def test_of_most_members_those_are_believed_dead_whose_host_answers() -> None:
    job = Driver(wanted=5)
    for number, place in enumerate(("box:1", "box:2", "box:3", "far:1", "far:2")):
        job.hello(f"w{number}", address=place, host=place.split(":")[0])
    job.recover()
    for worker in job.connections:
        job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
    job.now += 2.0
    refuse(job, "w4", "w3", "w1", "w0")
    answer(job, "w2")
    assert dead(job) == ["w0", "w1"]


def test_what_a_tick_costs_while_most_of_a_hosts_workers_refuse_does_not_grow_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Counter[int]()

    def counted(address: str) -> tuple[str, int]:
        asked[workers] += 1
        return split_address(address)

    monkeypatch.setattr(failure_detector, "split_address", counted)
    for workers in (8, 32):
        job = Driver(wanted=workers, made_of=replace(MADE_OF, lanes=workers))
        for number in range(workers):
            job.hello(f"w{number}", address=f"box:{number + 1}", host="box")
        job.recover()
        for worker in job.connections:
            job.feed(Probed(worker, f"inc-{worker}", refused=False, reached=True))
        refuse(job, *(f"w{number}" for number in range(workers * 3 // 4)))
        asked.clear()
        job.feed(Tick())
        assert asked[workers] <= 3 * workers
