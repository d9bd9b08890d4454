"""`engine.on_commit`: every member follows each step that it commits, once and in order, in every world."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import shoal.exchange.hand_out
import shoal.training.parameters
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train
from crew_saves import saved
from idle_members import answering
from integration.scripts import Count, Model, Samples
from matrices import shortened
from rule import Edit, holds, rule
from shoal.blocks.released import Arriving
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.state.training_state import digest_of
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from shoal_protos.errors import UserError

STEPS = 7
OPTIONS: dict[str, Any] = {"max_steps": STEPS}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read too early is a wrong bit."""
    monkeypatch.setattr(shoal.exchange.hand_out, "POISON", True)
    monkeypatch.setattr(shoal.training.parameters, "has_compiled", lambda: False)  # other tests of this process


class Average:
    """Of the weights over steps; `steps`: how many it has seen."""

    def __init__(self, engine: Engine) -> None:
        self.steps, self.drawn = 0, 0.0
        named = engine.module.named_parameters()
        self.weights = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in named}

    def update(self, engine: Engine) -> None:
        for name, one in engine.module.named_parameters():
            self.weights[name].lerp_(one, 0.1)
        self.steps += 1
        self.drawn += random.random() + float(torch.rand(()))
        assert not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "drawn": self.drawn, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.drawn, self.weights = state["steps"], state["drawn"], state["weights"]

    @property
    def digest(self) -> str:
        return f"{self.steps} {self.drawn} {digest_of(sorted(self.weights.items()))}"


@dataclass
class Followed:
    """What each worker's process has of a job."""

    averages: dict[str, Average] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    """By worker, those for which it was called."""
    lanes: list[int] = field(default_factory=list)
    """How many its worker had, call by call."""

    def prepare(self, engine: Engine) -> None:
        worker = engine.context.link.worker
        average = self.averages[worker] = Average(engine)
        steps: list[int] = []
        self.steps[worker] = steps

        def follow(engine: Engine) -> None:
            average.update(engine)
            steps.append(engine.global_step)
            self.lanes.append(len(engine.lanes))

        engine.register_state("average", average)
        engine.on_commit(follow)

    def of(self, task: Task) -> Task:
        return replace(task, prepare=self.prepare, in_loop=self.check)

    def check(self, engine: Engine) -> None:
        """Before each batch the step before has been followed."""
        if not engine.warming_up:
            assert engine.context.state.followed == engine.global_step
            assert self.averages[engine.context.link.worker].steps == engine.global_step

    def ends_as(self, crew: Crew, task: Task) -> None:
        fingerprint, digest = undisturbed(task)
        assert crew.finish() == fingerprint
        last = task.options["max_steps"]
        for worker in crew.members():
            average, steps = self.averages[worker.name], self.steps[worker.name]
            assert average.digest == digest
            assert steps == list(range(last + 1 - len(steps), last + 1)), worker.name


_undisturbed: dict[str, tuple[str, str]] = {}


def undisturbed(task: Task) -> tuple[str, str]:
    """Alone, in stage 0: the fingerprint, and the average's digest."""
    plain = {**task.options, "stage": 0, "mirrors": 1, "offload": None, "shoal": {}}
    key = f"{sorted(plain.items(), key=str)} {task.model}"
    if key not in _undisturbed:
        followed = Followed()
        alone = followed.of(replace(task, options=plain))
        with ONE_AT_A_TIME:
            engine = engine_of(alone, AloneLink(), Faults([]))
            train(engine, alone, lambda: None)
            _undisturbed[key] = str(engine.fingerprint()), followed.averages["w0"].digest
    return _undisturbed[key]


@rule(
    "What the script gives to `on_commit` is called on every member once for each step that it commits, in order, with "
    "all parameters here, before the next batch and before anything of the step is saved or given to a joiner; who "
    "gets registered states gets the step with them that they have followed",
    "A step",
    broken_by=[
        Edit(
            "shoal.training.boundary",
            "        if self._calls and state.followed < state.step:\n",
            "        if self._calls and state.followed < state.step and self._context.lanes:\n",
        ),
        Edit("shoal.training.boundary", " and state.followed < state.step:", ":"),
        Edit("shoal.training.boundary", "            with self.all_here(), ", "            with "),
        Edit("shoal.training.boundary", "        seed_everything(", "        str("),
        Edit(
            "shoal.training.boundary",
            "        if not self._keep():\n            return\n        passed",
            "        passed",
        ),
        Edit(
            "shoal.state.training_state",
            'given["step"], given["committed_in"], given["followed"]',
            'given["step"], given["committed_in"], given["step"]',
            by="test_whoever_gets_the_state_of_a_member_that_has_not_followed_yet_follows_itself",
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("point", shortened(["backward", "vote", "in_vote", "optimizer", "hand_out"], "in_vote"))
def test_an_average_of_weights_has_the_undisturbed_runs_bits_on_every_member(point: str, stage: int) -> None:
    followed, task = Followed(), Task({**OPTIONS, "stage": stage})
    with Crew("abc", followed.of(task)) as crew:
        crew.train_to(1)
        crew.plant("b", 3, point)
        crew.train_to(3)
        crew.add("d")
        followed.ends_as(crew, task)
    assert followed.steps["a"] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("workers", ["a", "ab", "abcd"])
def test_worlds_of_any_size_average_alike(workers: str) -> None:
    followed, task = Followed(), Task(OPTIONS)
    with Crew(workers, followed.of(task)) as crew:
        followed.ends_as(crew, task)
    assert all(steps == list(range(1, STEPS + 1)) for steps in followed.steps.values())


@holds("What the script gives to `on_commit`")
def test_a_drain_at_the_very_step_and_a_second_break_count_no_step_twice() -> None:
    followed, task = Followed(), Task({**OPTIONS, "mirrors": 2})
    with Crew("abcd", followed.of(task)) as crew:
        crew.train_to(1)
        crew.request(DrainWorker("a"))
        crew.plant("c", 3, "hand_out")
        crew.plant("d", 3, "opened")
        followed.ends_as(crew, task)
    assert all(steps == list(range(1, len(steps) + 1)) for steps in followed.steps.values())


@holds("What the script gives to `on_commit`")
def test_steps_that_are_trained_again_are_followed_again(tmp_path: Path) -> None:
    followed = Followed()
    task = Task({"max_steps": 14, "mirrors": 0, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}})
    with Crew("abc", followed.of(task)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        before = crew.allowed
        crew.kill("b")
        fingerprint, digest = undisturbed(task)
        assert crew.finish() == fingerprint
        assert {followed.averages[name].digest for name in "ac"} == {digest}
    assert before > 3
    assert followed.steps["a"] == [*range(1, before + 1), *range(4, 15)]


@holds("What the script gives to `on_commit`")
def test_a_checkpoint_has_what_followed_its_step(tmp_path: Path) -> None:
    saves = {"shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 4}}}
    first, again = Followed(), Followed()
    with Crew("ab", first.of(Task({**OPTIONS, **saves, "max_steps": 5}))) as crew:
        crew.finish()
    task = Task({**OPTIONS, **saves})
    with Crew("abc", again.of(task)) as crew:
        again.ends_as(crew, task)
    assert again.steps["a"] == list(range(again.steps["a"][0], STEPS + 1)) and again.steps["a"][0] in (5, 6)


@holds("What the script gives to `on_commit`")
def test_whoever_gets_the_state_of_a_member_that_has_not_followed_yet_follows_itself() -> None:
    """In a recovery the small state of a step is given away before that step's boundary is settled."""
    followed, other = Followed(), Followed()
    engine, taker = (engine_of(Task(OPTIONS), AloneLink(), Faults([])) for _ in range(2))
    followed.prepare(engine)
    other.prepare(taker)
    state, boundary = engine.context.state, engine.parts.boundary
    state.step = 3
    for worker in (state, taker.context.state):
        worker.followed = 2
    followed.averages["w0"].steps = 2
    taker.context.state.load_small_state(state.small_state())
    assert (taker.context.state.step, taker.context.state.followed) == (3, 2)
    for one in (boundary, taker.parts.boundary):
        one.commits.call()
        one.commits.call()
    assert followed.steps["w0"] == other.steps["w0"] == [3]
    assert followed.averages["w0"].digest == other.averages["w0"].digest


def test_parameters_kept_on_the_host_in_stage_3_are_read_by_it() -> None:
    followed, task = Followed(), Task({**OPTIONS, "stage": 3, "offload": "cpu", "offload_param": True})
    with Crew("abc", followed.of(task)) as crew:
        crew.plant("b", 3, "hand_out")
        crew.train_to(3)
        crew.add("d")
        fingerprint, digest = undisturbed(Task(OPTIONS))
        assert crew.finish() == fingerprint
        assert {followed.averages[worker.name].digest for worker in crew.members()} == {digest}


class Apart(Model):
    """A joiner's, whose frozen parameters are others than the job's."""

    def __init__(self) -> None:
        super().__init__(0.1, True)
        self.frozen.data.add_(1.0)


@rule(
    "A joiner's frozen parameters are the job's before its first step is followed",
    "A step",
    broken_by=Edit(
        "shoal.state.training_state",
        '= bool(given["frozen"] == frozen_digest(self))',
        '= bool(given["frozen"] or frozen_digest(self))',
    ),
)
def test_a_joiner_with_other_frozen_parameters_averages_the_jobs() -> None:
    followed, task = Followed(), Task(OPTIONS)
    with Crew("ab", followed.of(task)) as crew:
        crew.train_to(2)
        crew.add("c", followed.of(replace(task, model=Apart)))
        followed.ends_as(crew, task)
    assert len(followed.steps["c"]) < STEPS - 1


def test_a_step_that_overflows_is_followed_as_all_others() -> None:
    """It is committed, and `on_step` is called for it too."""
    precision = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
    followed, task = Followed(), Task({**OPTIONS, "precision": precision})
    with Crew("ab", followed.of(task)) as crew:
        followed.ends_as(crew, task)
        record = crew.workers["a"].engine.context.state.record
    assert record is not None and record.overflow
    assert followed.steps["a"] == list(range(1, STEPS + 1))


@rule(
    "A job without `on_commit` waits for nothing that is handed out; with it all is here when a step is over",
    "A step",
    broken_by=[
        Edit("shoal.training.boundary", "        if self._calls and ", "        if "),
        Edit(
            "shoal.training.parts",
            "boundary.commits.all_here = parameters.settle, parameters.all_here\n",
            "boundary.commits.all_here = parameters.settle, parameters.in_backward\n",
        ),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("with_it", [False, True])
def test_only_who_follows_steps_waits_for_parameters(with_it: bool, stage: int) -> None:
    late: list[bool] = []
    gathered: list[int] = []

    def look(engine: Engine) -> None:
        late.append(any(isinstance(one, Arriving) for one in engine.module.parameters()))

    def prepare(engine: Engine) -> None:
        units: Any = getattr(engine.parts.step.parameters, "units", None)
        if units is not None:
            bring = units.bring

            def note(wanted: list[Any]) -> None:
                gathered.append(len(wanted))
                bring(wanted)

            units.bring = note
        if with_it:
            engine.on_commit(lambda engine: None)

    options = {**OPTIONS, "stage": stage, "lanes": 8}
    with Crew("abcd", Task(options, prepare=prepare, in_loop=look)) as crew:
        crew.finish()
    assert any(late) == (stage == 1 and not with_it)
    assert bool(gathered) == (stage == 3 and with_it)


def test_a_function_may_evaluate_save_and_ask() -> None:
    """On a member without lanes too, and where the boundary is settled in the midst of a lane."""
    results: dict[str, list[float]] = {}

    def follow(engine: Engine) -> None:
        with engine.gathered(), engine.evaluating():
            for batch in engine.shard(Samples(8)):
                engine.report(validation=engine.module(**batch))
        results.setdefault(engine.context.link.worker, []).append(engine.loss)
        if engine.global_step == STEPS - 2:
            engine.stop()

    for stage in (1, 3):
        results.clear()
        with Crew("abc", Task({**OPTIONS, "stage": stage}, prepare=lambda engine: engine.on_commit(follow))) as crew:
            crew.plant("c", 3, "hand_out")
            crew.train_to(3)
            crew.add("d")
            crew.finish()
        assert len(results["a"]) == STEPS - 1
        assert results["d"] == results["a"][-len(results["d"]) :]


def test_a_save_that_is_asked_for_within_it_is_made(tmp_path: Path) -> None:
    def follow(engine: Engine) -> None:
        if engine.global_step in (2, STEPS):
            engine.save_checkpoint()

    options = {**OPTIONS, "shoal": {"checkpoint": {"path": str(tmp_path)}}}
    with Crew("ab", Task(options, prepare=lambda engine: engine.on_commit(follow))) as crew:
        crew.finish()
        assert [one.step for one in sorted(crew.job.durable.checkpoints)] == [2, STEPS]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_in_it_is_the_workers_failure_and_cannot_be_passed_over(stage: int) -> None:
    def follow(engine: Engine) -> None:
        if engine.global_step == 2:
            raise ValueError("of the script")

    engine = engine_of(Task({**OPTIONS, "stage": stage}), AloneLink(), Faults([]))
    engine.on_commit(follow)
    caught = 0
    with pytest.raises(UserError, match=r"a function of engine\.on_commit has raised an error at step 2, and the "):
        for batch in engine:
            engine.backward(engine.module(**batch))
            try:
                engine.step()
            except ValueError:
                caught += 1
    assert caught == 1 and engine.global_step == 3


@holds("What the script gives to `on_commit`")
def test_an_error_on_a_member_without_lanes_ends_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crew.answer", answering({"c"}))

    def follow(engine: Engine) -> None:
        if not engine.lanes:
            raise ValueError("of the script")

    with Crew("ab", Task(OPTIONS, prepare=lambda engine: engine.on_commit(follow))) as crew:
        crew.train_to(2)
        joiner = crew.add("c")
        crew.finish()
        assert "ValueError: of the script" in joiner.failure


def test_what_cannot_follow_steps_is_refused_in_a_sentence() -> None:
    class Mean:
        def __call__(self, engine: Engine) -> None: ...

        def update(self, engine: Engine) -> None: ...

    engine, mean = engine_of(Task({"max_steps": 1}), AloneLink(), Faults([])), Mean()
    for wrong in (3, None, Mean):
        with pytest.raises(UserError, match=r"engine\.on_commit got .*; expected a function that takes the engine\."):
            engine.on_commit(wrong)
    for function in (mean, mean.update):
        engine.on_commit(function)
        with pytest.raises(UserError, match=r"engine\.on_commit got .* twice, which would count each step twice"):
            engine.on_commit(function)
    for batch in engine:
        with pytest.raises(UserError, match=r"engine\.on_commit was called in the loop, .*; call it before\."):
            engine.on_commit(lambda engine: None)
        engine.backward(engine.module(**batch))
        engine.step()


@pytest.mark.parametrize("after_step", [False, True])
def test_a_registered_state_that_only_the_body_brings_up_to_date_is_named_once(
    after_step: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of those that follow the commits, or stay as they are."""
    idle: set[str] = set()
    monkeypatch.setattr("crew.answer", answering(idle))
    kept: dict[str, dict[str, Count]] = {}

    def prepare(engine: Engine) -> None:
        of = kept[engine.context.link.worker] = {name: Count() for name in ("body", "commits", "still")}
        for name, state in of.items():
            engine.register_state(name, state)
        engine.on_commit(lambda engine: setattr(of["commits"], "steps", engine.global_step))

    def count(engine: Engine) -> None:
        kept[engine.context.link.worker]["body"].steps = engine.global_step

    def at_the_top(engine: Engine) -> None:
        if not after_step:
            count(engine)

    def step(engine: Engine) -> None:
        engine.step()
        if after_step:
            count(engine)

    task = Task({"max_steps": 14, "lanes": 8}, prepare=prepare, in_loop=at_the_top, step=step)
    with Crew("ab", task) as crew:
        crew.train_to(2)
        for standby, gone in zip("cd", "ab", strict=True):
            idle.add(standby)
            joiner = crew.add(standby)
            crew.train_until(
                "it to be a standby for a step", lambda joiner=joiner: joiner.engine.context.boundaries > 0
            )
            idle.clear()
            crew.kill(gone)
        crew.finish()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "registered_state_lags" in line]
    assert warnings and all("body" in line and "engine.on_commit" in line for line in warnings)
    assert len(warnings) == 2  # c and d are two processes
