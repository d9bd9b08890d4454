"""Several optimizers over one model: a GAN whose networks have each a class, a schedule and a turn of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from gan import Gan, body
from matrices import shortened
from rule import Edit, holds, rule
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.catalogue import look_into, saves
from shoal.checkpoint.storage import LocalStorage
from shoal.config.document import Optimizer as OptimizerSection
from shoal.deepspeed import initialize as deepspeed_initialize
from shoal.optim.config_sections import optimizer_differs
from shoal.optim.hyper import advance, hyper_parameters, load_into, set_turn
from shoal.optim.several import Several, member_of, schedules, several, title_of
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.state.given_values import GivenHyperParameters
from shoal.training.engine import Engine
from shoal.training.start import initialize
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "shoal": {"lanes": 1, "max_steps": 2, "torch_threads": 1},
}


def of_each(model: nn.Module, rate: float = 1e-3) -> dict[str, Optimizer]:
    """SGD of two groups, one of which keeps nothing, and Adam with that rate."""
    assert isinstance(model, Gan)
    first, last = model.generator[0], model.generator[2]
    groups = [{"params": [*first.parameters()], "momentum": 0.9}, {"params": [*last.parameters()]}]
    return {"generator": SGD(groups, 0.05), "discriminator": Adam(model.discriminator.parameters(), rate)}


def scheduled(optimizers: dict[str, Optimizer], gamma: float = 0.5) -> dict[str, Any]:
    return {
        "discriminator": StepLR(optimizers["discriminator"], 2, gamma=gamma),
        "generator": ReduceLROnPlateau(optimizers["generator"], patience=0),
    }


def by_name(optimizer: Optimizer) -> dict[str, Optimizer]:
    assert isinstance(optimizer, Several)
    return dict(zip(optimizer.names, optimizer.members, strict=True))


def gan(stage: int, rate: float = 1e-3, **options: Any) -> Task:
    return Task(
        {"max_steps": 7, "lanes": 5, "stage": stage, **options},
        model=Gan,
        optimizer=lambda model: several(of_each(model, rate)),
        scheduler=lambda optimizer: schedules(scheduled(by_name(optimizer)), optimizer),
        body=body,
    )


BF16 = {"precision": {"bf16": {"enabled": True}}}
FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3, bf16": {"stage": 3, **BF16},
    "1, on the host": {"stage": 1, "offload": "cpu"},
    "2, clipped": {"stage": 2, "gradient_clipping": 0.05},
}
CASES = product(FORMS, ("a", "ab", "abc", "abcd", "abcde"))
KEPT = [("0", "a"), ("0", "abc"), ("1", "abcd"), ("2", "abc"), ("3", "ab"), ("3", "abcde"), ("3, bf16", "abc"),
        ("1, on the host", "ab"), ("2, clipped", "abc")]  # fmt: skip


@rule(
    "Of several optimizers, a block is updated by the class of the one that its group is of, and by no other",
    "A step",
    broken_by=[
        Edit("shoal.optim.twin", "        twin.state = joined.state\n", "        assert twin\n"),
        Edit("shoal.optim.several", "        group -= len(member.param_groups)\n", "        assert member\n"),
        Edit(
            "shoal.optim.several",
            "        for member in self.members:\n            member.step()\n",
            "        self.members[0].step()\n",
        ),
        Edit(
            "shoal.optim.hyper",
            "    for one in schedulers_of(scheduler):\n        _advance(one, loss)\n",
            "    for one in schedulers_of(scheduler)[:1]:\n        _advance(one, loss)\n",
            by="test_at_one_lane_they_train_as_torchs_two_do",
        ),
    ],
)
@pytest.mark.parametrize(("form", "workers"), shortened(CASES, *KEPT))
def test_every_world_ends_as_one_worker(form: str, workers: str) -> None:
    """Through a loss before the generator has any state, and a joiner after it."""
    task = gan(**FORMS[form])
    with Crew(workers, task) as crew:
        crew.train_to(1)
        if len(workers) > 1:
            crew.plant(workers[1], 2, "exchange")
        crew.train_to(4)
        crew.add("x")
        assert crew.finish() == undisturbed(task)


@holds("Of several optimizers, a block")
@pytest.mark.parametrize("stage", [0, 2])
def test_another_world_goes_on_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    """Which names both classes."""
    saving: dict[str, Any] = {"shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}}
    with Crew("abc", gan(stage, max_steps=3, **saving)) as crew:
        crew.finish()
    (found,) = saves(LocalStorage(tmp_path))
    manifest = look_into(LocalStorage(tmp_path), found).reader().manifest
    assert (manifest.optimizer, manifest.classes) == ("SGD + Adam", ("SGD", "SGD", "Adam"))
    assert manifest.scheduler_class == "ReduceLROnPlateau + StepLR"
    assert main(["verify", str(tmp_path)]) == 0
    with Crew("ab", gan(3 - stage, **saving)) as crew:
        assert crew.finish() == undisturbed(gan(0))


def test_a_rate_that_one_of_them_is_given_since_replaces_what_was_saved() -> None:
    """And no other; as does a key of its schedule."""

    def run(rate: float, gamma: float) -> tuple[Several, Any, GivenHyperParameters]:
        optimizer = several(of_each(Gan(), rate))
        for member in optimizer.members:
            member._opt_called = True  # type: ignore[attr-defined]
        scheduler = schedules(scheduled(by_name(optimizer), gamma), optimizer)
        return optimizer, scheduler, GivenHyperParameters(optimizer, scheduler, {})

    before, schedule, was = run(1e-3, 0.5)
    for _ in range(3):
        advance(schedule, 1.0)
    now, other, given = run(4e-3, 0.25)
    load_into(now, hyper_parameters(before))
    other.load_state_dict(copy.deepcopy(schedule.state_dict()))
    outcome = given.replace(was.values, goes_on={0, 1})
    assert outcome.taken == ("lr of group 2: 0.001 → 0.004", "gamma of StepLR: 0.5 → 0.25") and not outcome.kept
    assert [group["lr"] for group in now.param_groups] == [*(group["lr"] for group in before.param_groups[:2]), 0.001]
    with pytest.raises(ValueError, match="the schedulers of optimizers 1"):
        other.load_state_dict({"1": {}})


SINCE: dict[str, tuple[tuple[str, ...], str, str]] = {
    "of another class": (("generator", "critic"), "ExponentialLR", "ExponentialLR begins anew, with the rates as they "
                         "were saved; the others go on"),
    "one over the other optimizer": (("critic",), "StepLR", "StepLR begins anew, with the rates as they were saved"),
    "one fewer": (("generator",), "", "the rates of optimizers without a schedule stay as they were saved"),
}  # fmt: skip


@pytest.mark.parametrize("since", SINCE)
def test_a_schedule_goes_on_where_its_own_optimizer_has_one_of_its_class_and_others_begin_anew(
    since: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, kind, means = SINCE[since]
    made: list[dict[str, Any]] = []

    def task(steps: int, names: tuple[str, ...], kind: str) -> Task:
        def over(optimizer: Optimizer) -> Any:
            of_name = by_name(optimizer)
            critic = {"ExponentialLR": lambda one: ExponentialLR(one, 0.9)}.get(kind, lambda one: StepLR(one, 2))
            kinds = {"generator": lambda one: StepLR(one, 2, 0.5), "critic": critic}
            made.append({name: kinds[name](of_name[name]) for name in names})
            return schedules(made[-1], optimizer)

        def both(model: nn.Module) -> Optimizer:
            generator, critic = of_each(model).values()
            return several({"generator": generator, "critic": critic})

        def train_all(engine: Engine, batch: Any) -> None:
            real = batch["tokens"].float() / 255
            engine.backward(engine.module.of_generator(real))  # type: ignore[operator]
            engine.step()

        options = {"max_steps": steps, "lanes": 1, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}}
        return Task(options, Gan, both, over, body=train_all)

    with ONE_AT_A_TIME:
        first = ("generator",) if since.startswith("one over") else ("generator", "critic")
        for steps, over, of in ((3, first, "StepLR"), (4, names, kind)):
            engine = engine_of(one := task(steps, over, of), AloneLink(), Faults([]))
            train(engine, one, lambda: None)
            engine.script_end.reach()
    steps_of = {name: one.last_epoch for name, one in made[-1].items()}
    assert steps_of == {name: 4 if name == "generator" else 1 for name in names}
    assert f'"means": "{means}"' in capsys.readouterr().err


@holds("Of several optimizers, a block")
def test_at_one_lane_they_train_as_torchs_two_do() -> None:
    """In all bits."""
    batches: list[Tensor] = []
    losses: list[float] = []

    def noted(engine: Engine, batch: Any) -> None:
        batches.append(batch["tokens"].float() / 255)
        body(engine, batch)
        losses.append(engine.loss)

    with ONE_AT_A_TIME:
        task = replace(gan(1, max_steps=6, lanes=1), body=noted)
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        torch.manual_seed(0)
        plain = Gan()
    optimizers = of_each(plain)
    schedulers = scheduled(optimizers)
    for one in optimizers.values():
        one._opt_called = True  # type: ignore[attr-defined]
    for step, (real, loss) in enumerate(zip(batches, losses, strict=True)):
        turn = "generator" if step % 3 == 2 else "discriminator"
        plain.zero_grad()
        (plain.of_generator(real) if turn == "generator" else plain.of_discriminator(real)).backward()
        optimizers[turn].step()
        schedulers["discriminator"].step()
        schedulers["generator"].step(loss)
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_state_that_each_was_loaded_with_is_where_training_begins() -> None:
    def loaded(model: nn.Module) -> Optimizer:
        optimizers = of_each(model)
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        return several(optimizers)

    task = replace(gan(2), optimizer=loaded)
    with Crew("ab", task) as crew:
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == undisturbed(task) != undisturbed(gan(0))


def test_the_states_of_both_classes_come_back_from_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(place: str, stage: int, **checkpoint: Any) -> Task:
        return gan(stage, shoal={"checkpoint": {"path": str(tmp_path / place), **checkpoint}})

    with Crew("ab", replace(at("first", 1), options={**at("first", 1, every_steps=3).options, "max_steps": 3})) as crew:
        crew.finish()
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "i")]) == 0
    assert "with optimizer states of 6 parameters" in capsys.readouterr().out
    resume = next(str(one) for one in (tmp_path / "i").iterdir() if one.is_dir())
    right = undisturbed(at("alone", 0, resume=resume))
    with Crew("abc", at("three", 3, resume=resume)) as crew:
        assert crew.finish() == right


# ---- turns and names


def test_a_turn_is_that_of_optimizers_and_of_groups() -> None:
    model = Gan()
    named = [{"params": [*model.generator[0].parameters()], "name": "first"},
             {"params": [*model.generator[2].parameters()], "name": "last"}]  # fmt: skip
    optimizer = several({"generator": SGD(named, 0.1), "critic": Adam(model.discriminator.parameters())})

    def turns(*names: str) -> list[bool]:
        set_turn(optimizer, names)
        return [group["turn"] for group in optimizer.param_groups]

    assert turns("generator") == [True, True, False]
    assert turns("last") == [False, True, False]
    assert turns("critic", "first") == [True, False, True]
    with pytest.raises(UserError) as refused:
        turns("other")
    assert str(refused.value) == (
        "engine.turn got 'other'; expected names of the optimizer's groups: first, generator, last, critic."
    )


def test_each_group_is_known_to_be_of_its_member() -> None:
    optimizer = several(of_each(Gan()))
    assert [(type(one).__name__, number) for one, number in (member_of(optimizer, group) for group in range(3))] == [
        ("SGD", 0), ("SGD", 1), ("Adam", 0)
    ]  # fmt: skip
    assert title_of(optimizer) == "SGD + Adam" and title_of(optimizer.members[1]) == "Adam"


# ---- what is refused


def wrong(optimizer: Callable[[Gan], Any], scheduler: Callable[[Any], Any] = lambda _: None) -> str:
    model = Gan()
    given = optimizer(model)
    with pytest.raises(UserError) as refused:
        initialize(model, CONFIG, [0, 1, 2, 3], given, scheduler(given))
    return str(refused.value)


def test_what_does_not_fit_together_is_one_sentence() -> None:
    def twice(model: Gan) -> list[Optimizer]:
        return [SGD(model.parameters(), 0.1), Adam(model.discriminator.parameters())]

    def half(model: Gan) -> list[Optimizer]:
        return [SGD(model.generator.parameters(), 0.1)]

    def one_name(model: Gan) -> dict[str, Optimizer]:
        group = {"params": [*model.discriminator.parameters()], "name": "generator"}
        return {"generator": SGD(model.generator.parameters(), 0.1), "critic": Adam([group])}

    assert wrong(twice) == (
        'parameter "discriminator.0.weight" is in several optimizers, SGD and Adam; give it to one of them.'
    )
    assert wrong(half).startswith('parameter "discriminator.0.weight" requires a gradient but is in no group')
    assert wrong(one_name) == (
        '"generator" is the name of an optimizer and of a group of optimizer "critic", so engine.turn would mean both; '
        "give one of them another name."
    )


def test_schedulers_that_do_not_fit_the_optimizers_are_one_sentence() -> None:
    other = SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert wrong(lambda model: [*of_each(model).values()], lambda _: [StepLR(other, 1)]) == (
        "scheduler 0, a StepLR, sets the rates of an optimizer that is not given; build it over one of those that are "
        "(optimizer=)."
    )
    assert wrong(of_each, lambda _: StepLR(other, 1)).startswith(
        "scheduler 0, a StepLR, sets the rates of an optimizer"
    )
    assert wrong(of_each, lambda given: {"critic": StepLR(given["generator"], 1)}) == (
        "scheduler 'critic' has the name of no optimizer; the optimizers are called generator, discriminator."
    )
    assert wrong(lambda model: [*of_each(model).values()], lambda given: {"critic": StepLR(given[0], 1)}).endswith(
        "the optimizers have no names: give a list, or name them too."
    )
    assert wrong(of_each, lambda given: {"generator": StepLR(given["discriminator"], 1)}) == (
        "scheduler 'generator', a StepLR, is over optimizer 'discriminator'; build it over 'generator'."
    )
    assert wrong(of_each, lambda given: [StepLR(given["generator"], 1), ExponentialLR(given["generator"], 0.9)]) == (
        "scheduler 1, a ExponentialLR, is a second one over its optimizer; give each optimizer one, such as a "
        "ChainedScheduler of both."
    )


def test_one_that_may_not_run_on_blocks_is_refused_beside_one_that_may() -> None:
    sentence = wrong(
        lambda model: [SGD(model.generator.parameters(), 0.1), torch.optim.LBFGS(model.discriminator.parameters())]
    )
    assert sentence.startswith("optimizer LBFGS searches along a line through all parameters")


def test_a_section_beside_a_list_is_compared_with_each() -> None:
    section = OptimizerSection(type="Adam", params={"lr": 0.001})
    model = Gan()
    assert [*optimizer_differs(section, several(of_each(model)))] == [
        '`optimizer.type` is "Adam", and the script gives a SGD; keep one of them.'
    ]
    both = several([Adam(model.generator.parameters()), Adam(model.discriminator.parameters(), 0.002)])
    (differs,) = optimizer_differs(section, both)
    assert "`optimizer.params.lr` is 0.001, and the optimizer that the script gives has 0.002" in differs


def test_one_scheduler_of_the_config_or_over_one_of_them_is_enough() -> None:
    model = Gan()
    optimizers = of_each(model)
    config = {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}}
    state = initialize(model, config, [0, 1, 2, 3], optimizers).context.state
    assert [group["lr"] for group in optimizers["generator"].param_groups] == [0.0, 0.0] and state.scheduler is not None
    model = Gan()
    optimizers = of_each(model)
    alone = StepLR(optimizers["discriminator"], 1)
    initialize(model, CONFIG, [0, 1, 2, 3], optimizers, alone)
    for call in (optimizers["generator"].step, optimizers["discriminator"].step, alone.step):
        with pytest.raises(UserError, match="the engine calls"):
            call()


def test_a_script_for_deepspeed_may_give_several() -> None:
    model = Gan()
    engine, optimizer, _, _ = deepspeed_initialize(
        model=model, optimizer=[*of_each(model).values()], training_data=[0, 1, 2, 3], config=CONFIG,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda _: 0.5),
    )  # fmt: skip
    assert engine.get_lr() == [0.025, 0.025, 0.0005] and engine.get_mom() == [0.9, 0, (0.9, 0.999)]
    assert [group["lr"] for group in optimizer.param_groups] == engine.get_lr()


def test_a_scheduler_that_cannot_be_built_over_several_is_refused_with_how_to_give_them() -> None:
    model = Gan()
    sentence = (
        r"fails on several optimizers as one, SGD \+ Adam \(\w+: .*give these as a list, or by the names of their"
    )
    with pytest.raises(UserError, match=sentence):
        deepspeed_initialize(
            model=model, optimizer=[*of_each(model).values()], training_data=[0, 1, 2, 3], config=CONFIG,
            lr_scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, 10),
        )  # fmt: skip


def test_a_script_for_deepspeed_declares_its_buffers_by_the_elastic_engine() -> None:
    model = Gan()
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    engine, *_ = deepspeed_initialize(
        model=model, optimizer=[*of_each(model).values()], training_data=[0, 1, 2, 3], config=CONFIG
    )
    engine.elastic.buffer("seen", join="sum")
    with pytest.raises(UserError, match="seen"):
        engine.elastic.buffer("seen", join="mean")
