"""What script and config give otherwise than to the run of a checkpoint, and what becomes of it where a job goes on.

Rates are compared with those of a run that had the new values from its beginning. Ratios are powers of two, where both
ways have the same bits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fresh, save, train, trained
from crew import Crew, Task, undisturbed
from crew_saves import saved
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import look_into
from shoal.checkpoint.fingerprint import block_digests
from shoal.checkpoint.manifest import sealed
from shoal.checkpoint.restore import load_blocks, load_small_state
from shoal.checkpoint.storage import LocalStorage
from shoal.config import Scheduler
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.optim.config_sections import build_scheduler
from shoal.optim.hyper import advance, hyper_parameters, load_into
from shoal.optim.twin import effects_of_steps
from shoal.state.given_values import GivenHyperParameters, OtherValues
from shoal_protos.errors import UserError
from torch import nn
from torch.optim import Optimizer, lr_scheduler

Made = Callable[[Optimizer], Any]


class Run:
    """An optimizer of two groups with a scheduler, and what they were given."""

    def __init__(self, rate: float, scheduler: Made, steps: int = 0, **more: Any) -> None:
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate * times} for times in (1, 4)]
        self.optimizer = torch.optim.AdamW(groups, **more)
        self.scheduler = scheduler(self.optimizer)
        self.given = GivenHyperParameters(self.optimizer, self.scheduler, {})
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.go_on(steps)

    def go_on(self, steps: int) -> list[Any]:
        """What each step reads."""
        read = []
        for _ in range(steps):
            read.append([[group["lr"], group["betas"]] for group in self.optimizer.param_groups])
            advance(self.scheduler, 1.0)
        return read

    def resume(self, before: Run) -> OtherValues:
        load_into(self.optimizer, hyper_parameters(before.optimizer))
        self.scheduler.load_state_dict(copy.deepcopy(before.scheduler.state_dict()))
        return self.given.replace(before.given.values, goes_on={0})


def of_torch(name: str, **params: Any) -> Made:
    return partial(getattr(lr_scheduler, name), **params)


def in_sequence(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


MULTIPLES: list[Made] = [
    of_torch("LambdaLR", lr_lambda=lambda step: 0.9**step),
    of_torch("MultiplicativeLR", lr_lambda=lambda _: 0.9),
    of_torch("StepLR", step_size=2, gamma=0.3),
    of_torch("MultiStepLR", milestones=[2, 5], gamma=0.3),
    of_torch("ConstantLR", factor=0.3, total_iters=4),
    of_torch("LinearLR", total_iters=5),
    of_torch("ExponentialLR", gamma=0.9),
    of_torch("PolynomialLR", total_iters=7),
    of_torch("CosineAnnealingLR", T_max=6),
    of_torch("CosineAnnealingWarmRestarts", T_0=4),
    of_torch("ReduceLROnPlateau", patience=0),
    in_sequence,
    chained,
]


@rule(
    "A value of the optimizer that script or config give otherwise than to a checkpoint's run replaces what was saved, "
    "and under a schedule its base, so that the first step has the rate of the new schedule at that step; what only "
    "training has moved stays",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.state.given_values",
            "            _set(self._optimizer, key, {number: new for number, (_, new) in changed.items()})\n",
            "            assert key\n",
            by="test_what_a_job_is_given_now_holds_in_any_world_from_the_first_step_on",
        ),
        Edit(
            "shoal.optim.schedules",
            "    for number, (old, new) in rates.items():\n",
            "    for number, (old, new) in ():\n",
        ),
        Edit(
            "shoal.optim.schedules",
            "        put_rates(self, self.get_lr())\n",
            "        assert bases is not None\n",
            by="test_a_schedule_of_a_formula_goes_on_as_if_it_had_always_had_the_new_values",
        ),
        Edit(
            "shoal.state.given_values",
            "if key not in moved}",
            "if key is not moved}",
            by="test_what_only_training_has_moved_stays",
        ),
        Edit(
            "shoal.checkpoint.restore",
            "    state.given.begin_schedules_anew(goes_on)\n",
            "    assert state\n",
            by="test_a_schedule_of_another_kind_begins_anew_each_time_that_all_go_back",
        ),
        Edit(
            "shoal.training.start",
            "**state.given.texts(), ",
            "",
            by="test_a_worker_with_other_values_than_its_run_is_refused_by_name",
        ),
    ],
)
@pytest.mark.parametrize("scheduler", MULTIPLES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_saved_scheduler_goes_on_from_another_base_as_if_it_had_always_had_it(scheduler: Made, steps: int) -> None:
    right, now = Run(0.5, scheduler, steps), Run(0.5, scheduler)
    outcome = now.resume(Run(0.125, scheduler, steps))
    assert outcome == OtherValues(("lr of group 0: 0.125 → 0.5", "lr of group 1: 0.5 → 2.0"))
    assert hyper_parameters(now.optimizer) == hyper_parameters(right.optimizer)
    assert now.go_on(6) == right.go_on(6)


class Own(lr_scheduler.LRScheduler):
    """Of the script; nobody knows how its rates follow from bases."""

    def get_lr(self) -> list[Any]:
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


@holds("A value of the optimizer that script")
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 8 * optimizer.param_groups[0]["lr"], total_steps=20),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, optimizer.param_groups[0]["lr"], 1.0, step_size_up=3),
        of_torch("CosineAnnealingLR", T_max=6, eta_min=0.01),
        of_torch("ReduceLROnPlateau", patience=0, min_lr=0.01),
        Own,
    ],
)
def test_a_schedule_that_cannot_go_on_from_another_base_stays_and_is_named(scheduler: Made) -> None:
    before, now = Run(0.125, scheduler, 3, betas=(0.9, 0.95)), Run(0.5, scheduler, betas=(0.9, 0.75))
    outcome = now.resume(before)
    assert [text.partition(":")[0] for text in outcome.taken] == ["betas"]
    assert outcome.kept[0].startswith("lr")
    assert "so the saved schedule goes on: lr" in str(outcome)
    for mine, theirs in zip(now.go_on(6), before.go_on(6), strict=True):
        assert [[rate, (first, 0.75)] for rate, (first, _) in theirs] == mine


OURS: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 4}, {"warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 8, "warmup_num_steps": 2}, {"total_num_steps": 30, "warmup_max_lr": 0.5}),
    ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 2}, {"total_num_steps": 20, "cos_min_ratio": 0.25}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, {"cycle_min_lr": [0.1, 0.3], "cycle_max_mom": 0.99}),
    ("LRRangeTest", {"lr_range_test_step_size": 2}, {"lr_range_test_step_rate": 3.0}),
]


@holds("A value of the optimizer that script")
@pytest.mark.parametrize(("name", "old", "new"), OURS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_schedule_of_a_formula_goes_on_as_if_it_had_always_had_the_new_values(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], steps: int
) -> None:
    def scheduler(params: Mapping[str, Any]) -> Made:
        return lambda optimizer: build_scheduler(Scheduler(type=name, params=dict(params)), optimizer, 40)

    right, now = Run(0.3, scheduler({**old, **new}), steps), Run(0.3, scheduler({**old, **new}))
    outcome = now.resume(Run(0.7, scheduler(old), steps))
    assert not outcome.kept
    assert {f"{key} of {name}" for key in new} <= {text.partition(":")[0] for text in outcome.taken}
    assert hyper_parameters(now.optimizer) == hyper_parameters(right.optimizer)
    assert now.go_on(6) == right.go_on(6)


@holds("A value of the optimizer that script")
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}, {"step_size": 1, "gamma": 0.25}),
        ("MultiStepLR", {"milestones": [2], "gamma": 0.5}, {"milestones": [1, 3, 3]}),
        ("ExponentialLR", {"gamma": 0.5}, {"gamma": 0.25}),
        ("ConstantLR", {"factor": 0.5, "total_iters": 9}, {"factor": 0.25}),
    ],
)
def test_keys_of_a_schedule_of_torch_are_taken_where_it_is_a_formula(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    right, now = Run(0.5, of_torch(name, **{**old, **new}), 3), Run(0.5, of_torch(name, **{**old, **new}))
    outcome = now.resume(Run(0.125, of_torch(name, **old), 3))
    assert {f"{key} of {name}" for key in new} <= {text.partition(":")[0] for text in outcome.taken}
    assert now.go_on(5) == right.go_on(5)


def test_keys_of_a_schedule_of_torch_that_is_none_stay_and_are_named() -> None:
    def scheduler(total: int) -> Made:
        return of_torch("OneCycleLR", max_lr=0.5, total_steps=total)

    before, now = Run(0.1, scheduler(20), 3), Run(0.1, scheduler(30))
    assert now.resume(before) == OtherValues((), ("total_steps of OneCycleLR: 20 → 30",))
    assert now.go_on(6) == before.go_on(6)


class Counting(torch.optim.SGD):
    """Counts its steps in its group, from a number that it is given."""

    def __init__(self, parameters: Any, lr: float = 0.1, count: int = 0) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group.setdefault("count", count)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
        super().step(closure)


@holds("A value of the optimizer that script")
def test_what_only_training_has_moved_stays() -> None:
    parameter = nn.Parameter(torch.ones(2))
    before, now = Counting([parameter], lr=0.1, count=0), Counting([parameter], lr=0.1, count=100)
    moved = effects_of_steps(before, lay_out([Trainable("weight", (2,), torch.float32, 0)])).moved
    given = GivenHyperParameters(before, None, moved).values
    before.step()
    before.param_groups[0]["lr"] = 0.025  # as a loop's body does
    load = GivenHyperParameters(now, None, moved)
    load_into(now, hyper_parameters(before))
    assert load.replace(given, goes_on={0}) == OtherValues()
    assert (now.param_groups[0]["lr"], now.param_groups[0]["count"]) == (0.025, 1)


# ---- checkpoints


def test_other_kinds_of_the_same_number_are_no_other_values_and_many_groups_are_not_all_named() -> None:
    def made(rate: float, decay: float) -> tuple[Optimizer, GivenHyperParameters]:
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate * (number > 0)} for number in range(20)]
        optimizer = torch.optim.SGD(groups, lr=1.0, weight_decay=decay)
        return optimizer, GivenHyperParameters(optimizer, None, {})

    (_, before), (optimizer, now) = made(1.0, 0), made(2.0, 0.0)
    outcome = now.replace(before.values, goes_on={0})
    assert len(outcome.taken) == 9 and outcome.taken[-1] == "lr of 11 more groups"
    assert optimizer.param_groups[19]["lr"] == 2.0 and now.texts()["weight_decay of the optimizer's groups"] == "0.0"


def test_a_value_that_needs_state_which_the_checkpoint_lacks_is_refused_by_name(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    reader = look_into(storage, save(trained(2), storage)[0]).reader()
    other = fresh(kind=partial(torch.optim.AdamW, amsgrad=True))  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"given now \(amsgrad: false → true\): .* exp_avg, .*max_exp_avg_sq.* of before"
    ):
        load_small_state(reader, other, {})


def test_a_momentum_that_is_new_begins_with_no_buffer(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    reader = look_into(storage, save(trained(2, kind=torch.optim.SGD), storage)[0]).reader()
    other = fresh(kind=partial(torch.optim.SGD, momentum=0.9))  # type: ignore[arg-type]
    assert load_small_state(reader, other, {}) == OtherValues(("momentum: 0 → 0.9",))
    load_blocks(reader, other, other.everything)
    train(other, 2)
    plain = trained(4, kind=torch.optim.SGD)
    assert block_digests(other, other.everything) != block_digests(plain, plain.everything)


# ---- jobs


def test_another_rate_is_taken_where_every_step_so_far_has_overflowed_and_the_optimizer_keeps_nothing_yet(
    tmp_path: Path,
) -> None:
    """Of half precision a checkpoint has master weights then, which are not the optimizer's."""
    endless = {"precision": {"fp16": {"enabled": True, "initial_scale_power": 60}}}
    task = given(path=str(tmp_path), every_steps=3)
    place = written(replace(task, options={**task.options, **endless}))
    later = given(0.25, resume=place)
    with Crew("ab", replace(later, options={**later.options, **endless})) as crew:
        crew.finish()
        assert any("lr: 0.0078125 → 0.25" in message for message in messages(crew))


def constant(_: Optimizer) -> None:
    """No schedule."""


def given(rate: float = 2**-7, decay: float = 0.1, scheduler: Made = constant, **checkpoint: Any) -> Task:
    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=decay)

    return Task({"max_steps": 8, "shoal": {"checkpoint": checkpoint}}, optimizer=optimizer, scheduler=scheduler)


def written(task: Task) -> str:
    """The checkpoint of step 3."""
    place = Path(task.options["shoal"]["checkpoint"]["path"])
    with Crew("ab", task) as crew:
        crew.train_to(4)
        saved(crew, 3)
    return str(next(place.glob("step-000000000003-*")))


def messages(crew: Crew) -> list[str]:
    return [message for kind, message in crew.events if kind == "other_values"]


def decaying(optimizer: Optimizer) -> Any:
    return build_scheduler(
        Scheduler(type="WarmupDecayLR", params={"warmup_num_steps": 2, "total_num_steps": 9}), optimizer, 9
    )


def longer(optimizer: Optimizer) -> Any:
    return build_scheduler(
        Scheduler(type="WarmupDecayLR", params={"warmup_num_steps": 2, "total_num_steps": 20}), optimizer, 9
    )


halving = of_torch("StepLR", step_size=2, gamma=0.5)
SHARDED = {"stage": 3, "precision": {"bf16": {"enabled": True}}}


@holds("A value of the optimizer that script")
@pytest.mark.parametrize(
    ("workers", "before", "now", "named", "options"),
    [
        ("a", constant, constant, "lr: 0.0078125 → 0.25, weight_decay: 0.1 → 0.5", {}),
        ("ab", halving, halving, "weight_decay: 0.1 → 0.5, lr: 0.0078125 → 0.25", {}),
        (
            "abc",
            decaying,
            longer,
            "weight_decay: 0.1 → 0.5, lr: 0.0078125 → 0.25, total_num_steps of WarmupDecayLR: 9 → 20",
            {"stage": 0},
        ),
        ("abcd", constant, constant, "lr: 0.0078125 → 0.25, weight_decay: 0.1 → 0.5", SHARDED),
    ],
)
def test_what_a_job_is_given_now_holds_in_any_world_from_the_first_step_on(
    workers: str, before: Made, now: Made, named: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def of(task: Task) -> Task:
        return replace(task, options={**task.options, **options})

    resume = written(of(given(scheduler=before, path=str(tmp_path / "before"), every_steps=3)))
    task = of(given(0.25, 0.5, now, path=str(tmp_path / "now"), resume=resume))
    as_before = of(given(scheduler=before, path=str(tmp_path / "again"), resume=resume))
    with Crew(workers, task) as crew:
        crew.train_to(5)
        crew.kill(workers[-1])
        if workers == "a":
            crew.until("the job to wait", lambda: crew.job.durable.current is None)
        crew.add("e")
        assert crew.finish() == undisturbed(task) != undisturbed(as_before)
        assert messages(crew) == [f"other values are given than to the checkpoint's run; taken: {named}"]


@holds("A value of the optimizer that script")
def test_values_that_are_given_as_before_are_not_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(engine: Any, batch: Any) -> None:
        if engine.global_step == 1:
            engine.context.state.optimizer.param_groups[0]["lr"] = 0.5
        engine.backward(engine.module(**batch))
        engine.step()

    whole = replace(given(path=str(tmp_path), every_steps=3), body=body)
    right = undisturbed(replace(given(), body=body))
    resume = written(whole)
    assert undisturbed(replace(given(path=str(tmp_path / "now"), resume=resume), body=body)) == right
    assert "other_values" not in capsys.readouterr().err


def test_a_checkpoint_that_keeps_no_given_values_goes_on_with_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = written(given(path=str(tmp_path), every_steps=3))
    manifest = Path(resume) / "manifest.json"
    content = json.loads(manifest.read_bytes())
    del content["given"]
    manifest.write_bytes(sealed(json.dumps(content, separators=(",", ":")).encode()))
    assert undisturbed(given(0.25, 0.5, path=str(tmp_path / "now"), resume=resume)) == undisturbed(given())
    assert capsys.readouterr().err.count("given_values_unknown") == 1


def cosine(optimizer: Optimizer) -> Any:
    return build_scheduler(Scheduler(type="WarmupCosineLR", params={"total_num_steps": 9}), optimizer, 9)


@holds("A value of the optimizer that script")
def test_a_schedule_of_another_kind_begins_anew_each_time_that_all_go_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = written(given(scheduler=decaying, path=str(tmp_path / "before"), every_steps=3))
    task = given(scheduler=cosine, path=str(tmp_path / "now"), resume=resume)
    right = undisturbed(task)
    assert capsys.readouterr().err.count("WarmupCosineLR begins anew, with the rates as they were saved") == 1
    alone = replace(task, options={**task.options, "mirrors": 0})
    with Crew("abc", alone) as crew:
        crew.train_to(5)
        crew.train_until("three that own blocks", lambda: crew.at_rest() and len(crew.members()) == 3)
        crew.kill("b")
        assert crew.finish() == right
        assert any(resize.reason.value == "restore" for resize in crew.job.durable.history)


@holds("A value of the optimizer that script")
def test_a_worker_with_other_values_than_its_run_is_refused_by_name() -> None:
    with Crew("ab", given()) as crew:
        crew.train_to(2)
        other = crew.add("c", given(0.25))
        crew.until("the refusal", lambda: not other.alive)
        assert "lr of the optimizer's groups is 0.25, the job's is 0.0078125. Start it with" in crew.story()
        assert crew.finish() == undisturbed(given())
