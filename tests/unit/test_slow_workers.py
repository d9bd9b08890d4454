"""Workers of different speed: the machine shares lanes by it, names who is slow, and replaces one where it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from machine_driver import MADE_OF, Driver, notes
from rich.console import Console
from rule import Edit, holds, rule
from shoal_controller.api.answers import WorkerAnswer
from shoal_controller.cli.tables import workers_table
from shoal_controller.core.machine.effects import Effect, Note
from shoal_controller.core.machine.events import Tick
from shoal_controller.core.planning.lanes import EVENLY
from shoal_protos.acts import Pause, Resume, Scale
from shoal_protos.description import OnSlow
from shoal_protos.messages import Telemetry
from shoal_protos.plan import Reason
from shoal_protos.rest import Json
from shoal_protos.shape import ONE

EQUAL = {"w0": 0.1, "w1": 0.1, "w2": 0.1, "w3": 0.1}
SLOW = {**EQUAL, "w1": 0.3}


def job(policy: OnSlow = OnSlow.SHARE, launcher: str = "none") -> Driver:
    made = Driver(4, replace(MADE_OF, on_slow=policy, max_steps=10_000), launcher=launcher)
    made.start(4)
    return made


def train(job: Driver, seconds: float, lane_seconds: Mapping[str, float]) -> list[Effect]:
    """All members make two steps in a second, and go over to what is planned; all effects of it."""
    effects: list[Effect] = []
    for _ in range(round(seconds * 2)):
        job.now += 0.5
        for worker, takes in lane_seconds.items():
            plan = next(iter(job.job.durable.planned), None) or job.job.durable.current
            assert plan is not None
            status, rank = job.statuses[worker], plan.rank_of(worker, f"inc-{worker}")
            if rank is None or worker not in job.connections:
                continue
            boundaries = status.boundaries + 1 if status.generation == plan.generation else 1
            effects += job.beat(
                worker, Telemetry(lane_seconds=takes, step_seconds=0.5), step=status.step + 1,
                generation=plan.generation, committed_in=plan.generation, promised=plan.generation,
                boundaries=boundaries, holds=plan.shares[rank].keeps,
            )  # fmt: skip
        effects += job.feed(Tick())
    return effects


def lanes(job: Driver) -> list[int]:
    assert job.job.durable.current is not None
    return [len(share.lanes) for share in job.job.durable.current.shares]


@holds("What lanes are shared by is durable")
def test_a_slow_worker_gets_fewer_lanes_within_seconds_and_as_many_as_before_when_it_is_well() -> None:
    driver = job()
    assert notes(train(driver, 5, EQUAL), "lanes_shared") == []
    effects = train(driver, 5, SLOW)
    assert lanes(driver) == [3, 1, 2, 2]
    assert driver.job.durable.current is not None and driver.job.durable.current.reason is Reason.BALANCE
    assert notes(effects, "lanes_shared") == [
        "lanes are shared by speed: w1 is to train 1 lane in place of 2 (300 ms a lane), w0 is to train 3 lanes in "
        "place of 2 (100 ms a lane); the lanes of a step take 0.30 s in place of 0.60 s"
    ]
    assert driver.counted("shoal_job_rebalances_total") == 1
    assert notes(train(driver, 30, SLOW), "lanes_shared") == []
    assert notes(train(driver, 30, EQUAL), "lanes_shared") == [
        "lanes are shared evenly again; the lanes of a step take 0.20 s in place of 0.30 s"
    ]
    assert lanes(driver) == [2, 2, 2, 2]
    assert driver.counted("shoal_job_rebalances_total") == 2


@rule(
    "What lanes are shared by is durable and in the goal: a controller that is started again shares as before",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.stored_form",
            "for name in FIELDS:",
            "for name in FIELDS[:-1]:",
            by="test_another_controller_shares_lanes_as_before",
        ),
        Edit(
            "shoal_controller.core.machine.phases.planned_changes",
            "bool(turn.record(worker).leaving), turn.durable.lane_seconds(worker))",
            "bool(turn.record(worker).leaving))",
            by="test_a_slow_worker_gets_fewer_lanes_within_seconds_and_as_many_as_before_when_it_is_well",
        ),
        Edit(
            "shoal_controller.core.machine.phases.running",
            "turn.keep(sharing=left)",
            "turn.durable",
            by="test_the_speed_of_one_who_is_gone_is_forgotten",
        ),
    ],
)
def test_another_controller_shares_lanes_as_before() -> None:
    driver = job()
    train(driver, 10, SLOW)
    kept = driver.job.durable.sharing
    assert kept.seconds == SLOW
    driver.restart()
    for worker in EQUAL:
        driver.hello(worker)
    assert driver.job.durable.sharing == kept
    assert notes(train(driver, 20, SLOW), "lanes_shared") == []
    assert lanes(driver) == [3, 1, 2, 2]


@holds("What lanes are shared by is durable")
def test_the_speed_of_one_who_is_gone_is_forgotten() -> None:
    driver = job()
    train(driver, 10, SLOW)
    driver.die("w1")
    driver.recover()
    train(driver, 2, EQUAL)
    assert driver.job.durable.sharing == replace(EVENLY, **{
        name: getattr(driver.job.durable.sharing, name) for name in ("changed_at", "pause_steps", "more", "fewer")
    })  # fmt: skip
    assert sorted(lanes(driver)) == [2, 3, 3]


@rule(
    "Who has no lane for its speed is looked at with those that train: it gets lanes again once it is well",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.running",
            "if world.lanes_of(rank) or rank in idle]",
            "if world.lanes_of(rank)]",
        ),
        Edit(
            "shoal_controller.core.machine.phases.running",
            "staying[: turn.durable.trainers or None]",
            "staying",
            by="test_a_spare_is_not_looked_at_though_it_has_trained",
        ),
    ],
)
def test_a_worker_that_is_too_slow_for_any_lane_has_none_until_it_is_well() -> None:
    driver = job()
    very_slow = {**EQUAL, "w1": 1.0}
    effects = train(driver, 8, very_slow)
    assert lanes(driver) == [3, 0, 3, 2]
    assert "w1 is to train 0 lanes in place of 2 (1000 ms a lane)" in notes(effects, "lanes_shared")[0]
    assert notes(train(driver, 60, very_slow), "slow") == [
        "worker w1 takes 1000 ms a lane, the others 100 ms, for 10 s"
    ]
    driver.die("w3")
    driver.recover()
    assert lanes(driver) == [4, 0, 4], "a recovery gives it none either"
    well = dict.fromkeys(("w0", "w1", "w2"), 0.1)
    assert notes(train(driver, 30, well), "lanes_shared") == [
        "lanes are shared evenly again; the lanes of a step take 0.30 s in place of 0.40 s"
    ]
    assert sorted(lanes(driver)) == [2, 3, 3]


@holds("Who has no lane for its speed is looked at")
def test_a_spare_is_not_looked_at_though_it_has_trained() -> None:
    driver = job()
    train(driver, 10, SLOW)
    driver.feed(Scale(3, spares=1))
    effects = train(driver, 60, SLOW)
    assert lanes(driver) == [4, 1, 3, 0]
    assert notes(effects, "lanes_shared") == []


def test_a_recovery_shares_by_speed_too() -> None:
    driver = job()
    train(driver, 10, SLOW)
    driver.die("w3")
    driver.recover()
    assert lanes(driver) == [4, 1, 3]


def test_nothing_is_shared_anew_before_every_trainer_is_measured() -> None:
    driver = job()
    effects = train(driver, 30, {**SLOW, "w2": 0.0})
    assert notes(effects, "lanes_shared") == []
    assert lanes(driver) == [2, 2, 2, 2]


def test_a_slow_worker_is_named_once_and_again_when_it_is_well() -> None:
    driver = job(OnSlow.NAME)
    effects = train(driver, 60, SLOW)
    assert notes(effects, "slow") == ["worker w1 takes 300 ms a lane, the others 100 ms, for 10 s"]
    assert [one.worker for one in effects if isinstance(one, Note) and one.kind == "slow"] == ["w1"]
    assert lanes(driver) == [2, 2, 2, 2], "on_slow is name"
    assert notes(train(driver, 5, EQUAL), "slow") == [
        "worker w1 takes 100 ms a lane, the others 100 ms: it is not slow any more"
    ]


@pytest.mark.parametrize(("launcher", "drained"), [("local", ["w1"]), ("none", [])])
def test_a_slow_worker_is_replaced_where_that_is_asked_for_and_a_launcher_starts_others(
    launcher: str, drained: list[str]
) -> None:
    driver = job(OnSlow.REPLACE, launcher=launcher)
    effects = train(driver, 302, SLOW)
    assert [one.worker for one in effects if isinstance(one, Note) and one.kind == "draining"] == drained
    if drained:
        assert "the others 100 ms, for 300 s (on_slow is replace)" in notes(effects, "draining")[0]
        effects = train(driver, 900, {**EQUAL, "w0": 0.4})
        assert notes(effects, "draining") == [], "one an hour: the next one may be as slow"


def test_a_pause_makes_no_worker_slow_for_longer() -> None:
    driver = job(OnSlow.REPLACE, launcher="local")
    train(driver, 5, SLOW)
    driver.feed(Pause())
    paused = driver.job.durable.planned[-1]
    for worker in SLOW:
        driver.train(worker, paused, steps=0)
    driver.wait(400)
    driver.feed(Resume())
    assert notes(train(driver, 4, SLOW), "slow") == []
    effects = train(driver, 280, SLOW)
    assert notes(effects, "slow") == ["worker w1 takes 300 ms a lane, the others 100 ms, for 10 s"]
    assert notes(effects, "draining") == []
    assert len(notes(train(driver, 20, SLOW), "draining")) == 1


def test_a_worker_of_a_bit_less_speed_is_not_replaced() -> None:
    driver = job(OnSlow.REPLACE, launcher="local")
    assert notes(train(driver, 400, {**EQUAL, "w1": 0.14}), "draining") == []


def printed(workers: list[Json]) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(workers_table(workers))
    return capture.get()


def test_what_a_lane_takes_is_shown_of_each_worker() -> None:
    driver = job(OnSlow.NAME)
    train(driver, 2, SLOW)
    shown = [WorkerAnswer.of(one, ONE).model_dump(mode="json", exclude_unset=True) for one in driver.view.workers]
    assert [one["lane_seconds"] for one in shown] == [0.1, 0.3, 0.1, 0.1]
    table = printed(shown)
    assert "a lane" in table
    assert "300 ms" in table
    train(driver, 1, dict.fromkeys(EQUAL, 0.0))
    unknown = [WorkerAnswer.of(one, ONE).model_dump(mode="json", exclude_unset=True) for one in driver.view.workers]
    assert not any("lane_seconds" in one for one in unknown)
    assert "a lane" not in printed(unknown)
