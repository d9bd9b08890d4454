"""The demo's acts against a job that is only pretended, and its demo. The whole demo runs in tests/integration."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest
from rule import Edit, rule
from shoal_controller.cli import demo, demo_acts
from shoal_controller.cli.client import IsOver, NotNow
from shoal_controller.cli.display import Lines, watch
from shoal_controller.cli.tables import display_console
from shoal_protos.errors import Conflict, JobFailed, NoController
from shoal_protos.rest import Json


class Pretended:
    """A client of a controller whose job makes a step with every look, and carries a request out at the next one."""

    def __init__(self, max_steps: int = 1000) -> None:
        self.max_steps = max_steps
        self.step = 0
        self.generation = 1
        self.wanted = 3
        self.states = {"w0": "active", "w1": "active", "w2": "active"}
        self.requests: list[str] = []
        self.later: list[Callable[[], None]] = []

    def world(self) -> list[str]:
        return [worker for worker, state in self.states.items() if state == "active"]

    async def job(self, _: str) -> Json:
        self.step = min(self.step + 1, self.max_steps)
        if self.later:
            self.later.pop(0)()
        over = self.step == self.max_steps
        return {
            "job": "disturbed", "phase": "succeeded" if over else "running", "generation": self.generation,
            "workers": {"wanted": self.wanted, "active": len(self.world()), "min": 1, "max": 8},
            "lanes": 8, "step": self.step, "max_steps": self.max_steps, "loss": 1.0, "samples": 16 * self.step,
            "reason": "all went well",
        }  # fmt: skip

    async def workers(self, _: str) -> list[Json]:
        world = self.world()
        return [
            {"worker": worker, "state": state, "pid": 1000 + int(worker[1:]), "step_seconds": 0.001,
             "rank": world.index(worker) if worker in world else None}
            for worker, state in self.states.items()
        ]  # fmt: skip

    async def events(self, _: str, after: int) -> list[Json]:
        return (
            [] if after else [{"revision": 1, "time": 0.0, "generation": 1, "kind": "x", "worker": "", "message": "y"}]
        )

    async def scale_job(self, _: str, workers: int) -> None:
        self.requests.append(f"scale {workers}")
        self.wanted = workers
        self.later.append(self.fill_up)

    async def drain_worker(self, _: str, worker: str) -> None:
        self.requests.append(f"drain {worker}")
        self.later += [lambda: self.lose(worker, "left"), self.fill_up]

    def kill(self, pid: int, number: signal.Signals) -> None:
        self.requests.append(f"kill {number.value} w{pid - 1000}")
        self.later.append(lambda: self.lose(f"w{pid - 1000}", "lost"))

    def lose(self, worker: str, state: str) -> None:
        self.states[worker] = state
        self.generation += 1

    def fill_up(self) -> None:
        self.generation += 1
        while len(self.world()) < self.wanted:
            self.states[f"w{len(self.states)}"] = "active"
        while len(self.world()) > self.wanted:
            self.states[self.world()[-1]] = "left"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    client = Pretended()
    monkeypatch.setattr(demo_acts.os, "kill", client.kill)
    monkeypatch.setattr(demo_acts, "LOOK_SECONDS", 0.0)
    return client


def played(client: Pretended) -> list[str]:
    lines: list[str] = []
    asyncio.run(demo_acts.play(demo_acts.DisturbedJob(client, "disturbed", lines.append)))  # type: ignore[arg-type]
    return lines


def test_the_acts_are_a_kill_a_growth_a_drain_and_a_shrinking(pretended: Pretended) -> None:
    lines = played(pretended)
    assert pretended.requests == ["kill 9 w1", "scale 4", "drain w0", "scale 3"]
    assert [line.partition(" (")[0] for line in lines] == [
        "▶ kill -9 1001",
        '▶ POST /v1/jobs/disturbed/scale {"workers": 4}',
        "▶ POST /v1/jobs/disturbed/workers/w0/drain",
        '▶ POST /v1/jobs/disturbed/scale {"workers": 3}',
    ]
    assert pretended.world() == ["w2", "w3", "w4"]


def test_each_act_waits_until_the_last_one_shows(pretended: Pretended) -> None:
    pretended.later += [lambda: None] * 50
    shown: list[tuple[str, list[str]]] = []

    def note(line: str) -> None:
        shown.append((line, pretended.world()))

    disturbed = demo_acts.DisturbedJob(pretended, "disturbed", note)  # type: ignore[arg-type]
    asyncio.run(demo_acts.play(disturbed))
    assert [world for _, world in shown] == [
        ["w0", "w1", "w2"],
        ["w0", "w2"],
        ["w0", "w2", "w3", "w4"],
        ["w2", "w3", "w4", "w5"],
    ]


@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_running_out_of_steps_is_a_failure_that_says_in_which_act(pretended: Pretended, steps: int) -> None:
    pretended.max_steps = steps
    with pytest.raises(demo_acts.OutOfSteps, match=f"job disturbed succeeded at step {steps} before "):
        played(pretended)


@pytest.mark.parametrize("request_of_it", ["scale_job", "drain_worker"])
def test_a_job_that_ends_before_a_request_reaches_it_has_run_out_of_steps(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, request_of_it: str
) -> None:
    async def end(*_: object) -> None:
        pretended.max_steps = pretended.step
        raise Conflict("job disturbed is over (succeeded)")

    monkeypatch.setattr(pretended, request_of_it, end)
    with pytest.raises(demo_acts.OutOfSteps, match=r"job disturbed succeeded at step \d+ before "):
        played(pretended)


def test_an_act_that_never_shows_is_a_failure(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_acts, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(demo_acts.os, "kill", lambda pid, number: None)
    pretended.max_steps = 10**9
    with pytest.raises(JobFailed, match="waited 0 s for w1 is evicted; job disturbed is running"):
        played(pretended)


def test_a_job_that_did_not_succeed_ends_the_demo() -> None:
    job = {"job": "disturbed", "phase": "failed", "step": 4, "reason": "w0 failed: out of memory"}
    with pytest.raises(JobFailed, match="job disturbed failed at step 4: w0 failed: out of memory"):
        demo.succeeded(job)


@pytest.mark.parametrize("phase, done", [("succeeded", []), ("running", ["stop", "kill"])])
def test_workers_of_a_job_that_is_over_end_by_themselves_after_the_demo(phase: str, done: list[str]) -> None:
    class Here:
        def __init__(self) -> None:
            self.client, self.done = self, list[str]()

        async def stop(self, _: str) -> None:
            if phase != "running":
                raise IsOver(f"job disturbed is over ({phase})")
            self.done.append("stop")

        async def kill_workers(self, _: str) -> None:
            self.done.append("kill")

    here: Any = Here()
    asyncio.run(demo.end(here, "disturbed"))
    assert here.done == done


def report(fingerprint: str) -> dict[str, Any]:
    moved = {"pause": 0, "fill": 1_500_000, "checkpoint": 0}
    world = {
        "generation": 2, "workers": 3, "reason": "kill", "from_step": 17, "pause_seconds": 0.043, "phases": {},
        "promoted_blocks": 90, "bytes": moved, "lost_steps": 0,
    }  # fmt: skip
    return {
        "job": "disturbed", "steps": 100, "fingerprint": fingerprint, "final_loss": 2.5, "generations": [world],
        "step_seconds_median": 0.2, "samples": 6400, "goodput_ratio": 0.9,
        "stepping_ratio": 0.9, "wanted_seconds": 0.0, "worker_seconds": {},
    }  # fmt: skip


def test_equal_fingerprints_are_exit_0_and_different_or_missing_ones_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.conclude(report("ab" * 32), report("ab" * 32)) == 0
    printed = capsys.readouterr().out
    assert "The same bits" in printed
    assert printed.count("ab" * 32) == 2
    assert demo.conclude(report("ab" * 32), report("cd" * 32)) == 1
    assert demo.conclude(report(""), report("")) == 1
    assert capsys.readouterr().out.count("Different bits") == 2


def test_the_table_says_what_each_change_cost(capsys: pytest.CaptureFixture[str]) -> None:
    demo.conclude(report("ab"), report("ab"))
    row = next(line for line in capsys.readouterr().out.splitlines() if "kill" in line)
    assert row.split() == ["2", "kill", "3", "17", "43", "ms", "90", "0", "B", "1.5", "MB", "0", "B", "0"]


def test_without_a_terminal_a_job_is_shown_as_lines(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal_controller.cli.display.POLL_SECONDS", 0.0)
    pretended.max_steps = 40
    pretended.later = [lambda: None] * 20 + [lambda: pretended.lose("w1", "lost")]
    with Lines(display_console()) as shown:
        ended = asyncio.run(watch(pretended, "disturbed", shown))  # type: ignore[arg-type]
    assert ended["step"] == 40
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("g1 x: y")
    assert (
        lines[1].startswith("disturbed running: step 1/1000, loss 1, – samples/s, world 3 of 3")
        or "step 1/40" in lines[1]
    )
    assert "world 2 of 3, generation 2" in lines[2]
    assert lines[3].startswith("disturbed succeeded: step 40/40")


@rule(
    "A controller that cannot answer now is asked until it can, and is not taken for one that is gone",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.cli.display", "except (NoController, StoreError) as error:", "except NoController as error:"
    ),
)
def test_a_controller_that_cannot_answer_now_is_asked_until_it_can(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its job goes on, and so does whoever watches it."""

    def not_now() -> None:
        raise NotNow("too much is asked; try again in 5 s")

    monkeypatch.setattr("shoal_controller.cli.display.POLL_SECONDS", 0.0)
    pretended.max_steps, pretended.later = 40, [not_now] * 20
    with Lines(display_console()) as shown:
        assert asyncio.run(watch(pretended, "disturbed", shown))["step"] == 40  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("too much is asked; try again in 5 s; trying again") == 1


@pytest.mark.parametrize("misses", [3, 4])
def test_a_request_without_an_answer_is_made_again_before_the_controller_is_given_up(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, misses: int
) -> None:
    """As where the machine was suspended in the midst of one."""

    def miss() -> None:
        raise NoController("no controller answers")

    monkeypatch.setattr("shoal_controller.cli.display.POLL_SECONDS", 0.0)
    pretended.max_steps, pretended.later = 40, [miss] * misses
    with Lines(display_console()) as shown:
        if misses < 4:
            assert asyncio.run(watch(pretended, "disturbed", shown))["step"] == 40  # type: ignore[arg-type]
            return
        with pytest.raises(NoController):
            asyncio.run(watch(pretended, "disturbed", shown))  # type: ignore[arg-type]
