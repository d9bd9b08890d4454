"""Lanes by speed on real engines: no bit depends on who trains how many, and a lane is measured without waits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from integration.scripts import Count
from ordered_wire import ordered_over_gloo
from over_gloo import over_gloo
from rule import Edit, holds, rule
from shoal.group.group import Group, GroupProgress
from shoal.process.device import HostDevice
from shoal.training import telemetry
from shoal.training.engine import Engine
from shoal.training.telemetry import LaneClock
from tensor_parallel import CellTask, crew_of
from tiers import check

STEPS = 24
MORE = check("more stages")
LONG, OFTEN = 60, 10
"""Steps in which a lane is rehearsed several times, where that is done so often."""


def takes(seconds: dict[str, float]) -> Any:
    """From now on that is what the worker's lanes take, whatever they take."""

    def prepare(engine: Engine) -> None:
        class Told(LaneClock):
            @property
            def lane_seconds(self) -> float:
                return seconds["now"]

        engine.context.lane_clock = Told(engine.context.state.device)

    return prepare


def measures(seconds: dict[str, float]) -> Any:
    """That is what each of the worker's lanes is measured to take, by a device that says so; a step takes a second."""

    class Paced(HostDevice):
        def seconds_between(self, begin: float, end: float) -> float:  # type: ignore[override]
            return seconds["now"]

    def prepare(engine: Engine) -> None:
        class Paces(LaneClock):
            def _now(self) -> float:  # type: ignore[override]
                return float(engine.global_step)

            def end_rehearsal(self, micro_batches: int) -> None:
                super().end_rehearsal(micro_batches)
                seconds["rehearsed"] = seconds.get("rehearsed", 0) + 1

        clock = Paces(Paced())
        clock._paused = nullcontext  # type: ignore[method-assign]
        engine.context.lane_clock = clock

    return prepare


def task(stage: int, seconds: dict[str, float]) -> Task:
    options = {"lanes": 12, "max_steps": STEPS, "stage": stage, "shoal": {"on_slow": "share"}}
    return Task(options, prepare=takes(seconds))


def counts(crew: Crew) -> list[int]:
    world = crew.job.durable.current
    assert world is not None
    return [len(share.lanes) for share in world.shares]


def train_until(crew: Crew, wanted: list[int], steps: int = STEPS) -> None:
    """Step by step, a heartbeat each."""
    while counts(crew) != wanted:
        crew.train_to(crew.allowed + 1)
        crew.beat(1)
        assert crew.allowed < steps - 1, f"{counts(crew)}\n{crew.story()}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lanes_that_follow_speed_change_no_bit(stage: int) -> None:
    usual, slow = {"now": 0.1}, {"now": 0.1}
    with Crew("abc", task(stage, usual), odd={"b": task(stage, slow)}) as crew:
        crew.train_to(2)
        slow["now"] = 0.2
        train_until(crew, [5, 2, 5] if stage < 2 else [6, 0, 6])
        crew.kill("c")
        crew.train_to(crew.allowed + 2)
        assert counts(crew) == ([8, 4] if stage < 2 else [6, 6]), "two rounds of one are as long as one of two"
        assert crew.finish() == undisturbed(task(stage, usual))


@contextmanager
def idle_crew(
    stage: int, usual: dict[str, float], slow: dict[str, float], task: Task | None = None
) -> Iterator[tuple[Crew, Task]]:
    """Three workers, of which b has become too slow for any lane; and the task of the others."""
    options = {"lanes": 6, "max_steps": LONG, "stage": stage, "shoal": {"on_slow": "share"}}
    of_usual, of_slow = (measured(task or Task(), options, one) for one in (usual, slow))
    with Crew("abc", of_usual, odd={"b": of_slow}) as crew:
        crew.train_to(4)
        slow["now"] = 1.0
        train_until(crew, [3, 0, 3], LONG)
        yield crew, of_usual


def measured(task: Task, options: dict[str, Any], seconds: dict[str, float]) -> Task:
    """The task with these options, on a worker whose lanes take as many seconds as are given."""

    def prepare(engine: Engine) -> None:
        task.prepare(engine)
        measures(seconds)(engine)

    return replace(task, options=options, prepare=prepare)


@rule(
    "A member without lanes rehearses one now and then: nothing of it counts, and what a lane takes stays known",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal.training.context",
            "return is_idle and self.lane_clock.is_stale",
            "return False",
            by="test_a_worker_that_loses_its_lanes_gets_them_back_when_it_is_well",
        ),
        Edit(
            "shoal.training.context",
            "self.world is not None and not self.loop.is_warming_up",
            "self.world is not None",
            by="test_a_world_that_breaks_under_a_rehearsal_makes_it_void",
        ),
        Edit(
            "shoal.training.telemetry",
            "return elapsed >= REHEARSAL_STEPS * (seconds - elapsed / steps)",
            "return True",
            by="test_a_rehearsal_costs_a_fiftieth_of_the_time_at_most",
        ),
    ],
)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=MORE), 1, pytest.param(2, marks=MORE), 3])
def test_a_worker_that_loses_its_lanes_gets_them_back_when_it_is_well(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, slow = {"now": 0.1}, {"now": 0.1}
    monkeypatch.setattr(telemetry, "REHEARSAL_STEPS", OFTEN)
    with idle_crew(stage, usual, slow) as (crew, of_usual):
        crew.train_to(crew.allowed + OFTEN + 2)
        assert slow["rehearsed"] == 1
        assert counts(crew) == [3, 0, 3]
        slow["now"] = 0.1
        train_until(crew, [2, 2, 2], LONG)
        assert slow["rehearsed"] >= 2
        assert usual.get("rehearsed") is None
        assert crew.finish() == undisturbed(of_usual)


@holds("A member without lanes rehearses one now and then")
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=MORE)])
def test_a_world_that_breaks_under_a_rehearsal_makes_it_void(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, slow = {"now": 0.1}, {"now": 0.1}
    held = threading.Event()
    monkeypatch.setattr(telemetry, "REHEARSAL_STEPS", OFTEN)
    with idle_crew(stage, usual, slow) as (crew, of_usual):
        rehearsing = crew.workers["b"]

        def hold(*_: object) -> None:
            if rehearsing.engine.warming_up and not held.is_set():
                held.set()
                rehearsing.wait(lambda: rehearsing.link.stopping)

        rehearsing.engine.module.register_forward_pre_hook(hold)
        crew.allow(crew.allowed + OFTEN + 2)
        crew.until("a rehearsal", held.is_set)
        crew.kill("c")
        crew.train_to(crew.allowed)
        assert counts(crew) == [6, 0]
        assert crew.finish() == undisturbed(of_usual)


def test_a_rehearsal_moves_no_state_that_follows_steps_and_names_one_that_follows_bodies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, slow = {"now": 0.1}, {"now": 0.1}
    kept: dict[str, dict[str, Count]] = {}
    monkeypatch.setattr(telemetry, "REHEARSAL_STEPS", OFTEN)

    def of(engine: Engine) -> dict[str, Count]:
        return kept[engine.context.link.worker]

    def prepare(engine: Engine) -> None:
        states = kept[engine.context.link.worker] = {name: Count() for name in ("commits", "steps", "bodies")}
        for name, state in states.items():
            engine.register_state(name, state)
        engine.on_commit(lambda engine: setattr(states["commits"], "steps", states["commits"].steps + 1))

    def in_loop(engine: Engine) -> None:
        of(engine)["bodies"].steps += 1

    def step(engine: Engine) -> None:
        of(engine)["steps"].steps += engine.step()

    with idle_crew(1, usual, slow, Task(prepare=prepare, in_loop=in_loop, step=step)) as (crew, of_usual):
        before = {name: state.steps for name, state in kept["b"].items()}
        first = crew.allowed
        crew.train_to(first + OFTEN + 2)
        moved = {name: state.steps - before[name] for name, state in kept["b"].items()}
        assert slow["rehearsed"] == 1
        assert (moved["steps"], moved["bodies"]) == (0, 1)
        assert named(capsys) == ["bodies"]
        slow["now"] = 0.1
        train_until(crew, [2, 2, 2], LONG)
        assert crew.finish() == undisturbed(of_usual)
    assert named(capsys) == ["steps"]
    assert [kept[worker]["commits"].steps for worker in "abc"] == [LONG] * 3


def named(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The states of which warnings have said since the last look that they lag."""
    lines = capsys.readouterr().err.splitlines()
    return [json.loads(line)["state"] for line in lines if "registered_state_lags" in line]


def test_a_cell_is_as_fast_as_its_slowest_member() -> None:
    usual, slow = {"now": 0.1}, {"now": 0.1}
    prepared = CellTask({"lanes": 12, "max_steps": STEPS, "shoal": {"on_slow": "share"}}, prepare=takes(usual))
    with crew_of("abcd", prepared) as crew:
        crew.train_to(2)
        crew.workers["d"].engine.context.lane_clock = type(
            "Slow", (LaneClock,), {"lane_seconds": property(lambda _: slow["now"])}
        )(crew.workers["d"].engine.context.state.device)
        slow["now"] = 0.3
        while len(set(counts(crew))) == 1:
            crew.train_to(crew.allowed + 1)
            crew.beat(1)
            assert crew.allowed < STEPS - 1, crew.story()
        assert sorted(counts(crew)) == [3, 3, 9, 9]
        crew.finish()


# ---- what is measured


class Clock(HostDevice):
    """A device that is as far as a test says."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, 0.0

    def moment(self) -> float:
        return self.now

    def seconds_between(self, begin: float, end: float) -> float | None:  # type: ignore[override]
        return end - begin if end <= self.done else None


class Lanes:
    """A worker's lanes on such a device."""

    def __init__(self) -> None:
        self.device, self.progress = Clock(), GroupProgress()
        self.clock = LaneClock(self.device)

    def train(self, own: float, waits: float = 0.0, parts: int = 1) -> None:
        for part in range(parts):
            self.clock.begin(self.progress, is_first=part == 0)
            self.device.now += own / parts / 2
            with self.progress.waiting():
                self.device.now += waits / parts
            self.device.now += own / parts / 2
            self.clock.end(is_last=part == parts - 1)
            self.device.now += 5.0
        self.device.done = self.device.now


@rule(
    "What a lane takes is measured without the waits for others, by the device's clock",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal.training.telemetry",
            "self._spans.append((self._began, self._device.moment()))\n        try:",
            "began = self._began\n        try:",
            by="test_waits_and_what_is_between_lanes_count_for_nothing",
        ),
        Edit(
            "shoal.group.gloo",
            "        with group.progress.waiting():\n            failure",
            "        if True:\n            failure",
            by="test_a_wait_in_a_group_is_one",
        ),
    ],
)
def test_waits_and_what_is_between_lanes_count_for_nothing() -> None:
    lanes = Lanes()
    for _ in range(4):
        lanes.train(0.2, waits=1.5)
    assert lanes.clock.lane_seconds == pytest.approx(0.2)


def test_the_median_of_the_last_nine_lanes_is_reported_and_nothing_before_three() -> None:
    lanes = Lanes()
    assert lanes.clock.lane_seconds == 0
    lanes.train(9.0)
    lanes.train(0.1, parts=3)
    assert lanes.clock.lane_seconds == 0
    lanes.train(0.3)
    assert lanes.clock.lane_seconds == pytest.approx(0.3)
    for _ in range(9):
        lanes.train(0.7)
    assert lanes.clock.lane_seconds == pytest.approx(0.7)


@holds("A member without lanes rehearses one now and then")
def test_a_rehearsal_costs_a_fiftieth_of_the_time_at_most() -> None:
    lanes, now = Lanes(), 0.0
    lanes.clock._now = lambda: now  # type: ignore[assignment]
    assert not lanes.clock.is_stale, "nothing was measured, so nothing is to be kept known"
    for _ in range(9):
        lanes.train(3.0)
    found = []
    for step in range(400):
        lanes.clock.on_idle_step()
        now += 1.0
        if lanes.clock.is_stale:
            found.append(step + 1)
            lanes.clock.begin(lanes.progress, is_first=True)
            lanes.device.now += 0.5
            lanes.clock.end(is_last=False)
            lanes.clock.end_rehearsal(micro_batches=2)
            lanes.device.done = lanes.device.now
            assert lanes.clock.lane_seconds == pytest.approx(1.0)
    assert found == [100, 150, 200, 250, 300, 350, 400], "two seconds more than a step, then none"


def test_a_lane_counts_once_the_device_is_through_with_it() -> None:
    lanes = Lanes()
    for _ in range(3):
        lanes.train(0.1)
    lanes.device.done = 0.0
    assert lanes.clock.lane_seconds == 0
    lanes.device.done = lanes.device.now
    assert lanes.clock.lane_seconds == pytest.approx(0.1)


def test_a_lane_that_is_given_up_or_begins_again_is_not_counted() -> None:
    lanes = Lanes()
    for _ in range(3):
        lanes.train(0.1)
    for _ in range(9):
        lanes.clock.begin(lanes.progress, is_first=True)
        lanes.device.now += 7
        lanes.clock.drop()
        lanes.clock.begin(lanes.progress, is_first=False)
        lanes.clock.end(is_last=True)
        lanes.clock.begin(lanes.progress, is_first=True)
        lanes.device.now += 7
    lanes.device.done = lanes.device.now
    assert lanes.clock.lane_seconds == pytest.approx(0.1)


def test_what_another_thread_waits_for_is_no_wait_of_the_lane() -> None:
    lanes = Lanes()
    for _ in range(3):
        lanes.clock.begin(lanes.progress, is_first=True)
        context = lanes.progress.waiting()
        thread = threading.Thread(target=context.__enter__)
        thread.start()
        thread.join()
        lanes.device.now += 0.4
        lanes.clock.end(is_last=True)
    lanes.device.done = lanes.device.now
    assert lanes.clock.lane_seconds == pytest.approx(0.4)


@holds("What a lane takes is measured without")
@check("builds groups of gloo")
@pytest.mark.parametrize("groups", [over_gloo, ordered_over_gloo])
def test_a_wait_in_a_group_is_one(groups: Callable[[int, Callable[[Group], object]], None]) -> None:
    waits, has_begun = list[str](), threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("begins")
        has_begun.set()
        yield
        waits.append("ends")

    def member(group: Group) -> None:
        message = torch.ones(2)
        if group.rank == 0:
            group.progress.waiting = waiting
            group.receive(message, 1, 1).wait()
            group.progress.waiting = nullcontext
        else:
            assert has_begun.wait(100)
            group.send(message, 0, 1).wait()

    groups(2, member)
    assert waits == ["begins", "ends"]
