"""What an optimizer keeps in its groups and as numbers of its state goes where its tensors go; the probe sees what may
not run on blocks, and leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save, trained
from checkpoints import train as train_on
from crew import Crew, Task, engine_of, train, undisturbed
from crew_saves import saved
from kept_values import (
    KINDS,
    LATE,
    REFUSED,
    Asking,
    AtOnce,
    Beginning,
    InGroup,
    InState,
    LateObject,
    Own,
    Plain,
    WherePresent,
)
from late_device import LateDevice
from matrices import shortened
from rule import Edit, holds, rule
from shoal.blocks.flat import views
from shoal.checkpoint.catalogue import look_into
from shoal.checkpoint.fingerprint import block_digests
from shoal.checkpoint.restore import load_blocks, load_small_state
from shoal.checkpoint.storage import LocalStorage
from shoal.data.seeds import RandomState
from shoal.optim import probe
from shoal.optim.elementwise import check_optimizer
from shoal.optim.hyper import hyper_parameters
from shoal.optim.state_form import carried, given_back, numbers_in
from shoal.process.device import HOST
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.start import Given, engine_with
from shoal_protos.description import first_difference
from shoal_protos.errors import UserError
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

BF16 = {"precision": {"bf16": {"enabled": True}}}
FORMS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3, bf16": {"stage": 3, **BF16},
    "1, on a device": {"stage": 1},
    "1, bf16, on the host of a device": {"stage": 1, "offload": "cpu", **BF16},
    "3, on the host of a device": {"stage": 3, "offload": "cpu", "offload_param": True},
}


def two_groups(kind: type[Own], model: nn.Module) -> Own:
    """The second has one block: most workers hold none of it."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return kind([{"params": [one for one in trained if one.ndim > 1]}, {"params": [o for o in trained if o.ndim < 2]}])


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def task(kind: type[Own], form: str = "1", **more: Any) -> Task:
    options = {"max_steps": 12, **FORMS[form], **more}
    device = LateDevice if form.endswith("a device") else lambda: HOST
    return Task(options, optimizer=lambda model: two_groups(kind, model), scheduler=constant, device=device)


def right(one: Task) -> str:
    """On the CPU, with state beside the parameters."""
    return undisturbed(replace(one, device=lambda: HOST))


def holds_blocks(crew: Crew, joiner: str) -> Callable[[], bool]:
    """Whether it has all that it is to hold."""
    return lambda: crew.at_rest() and bool(crew.workers[joiner].engine.context.state.held.runs)


CASES = list(product(KINDS, FORMS, ("ab", "abcd")))
KEPT = [(kind, form, "abcd") for kind, form in zip(KINDS, ("3", "2", "1", "3, bf16"), strict=True)]
KEPT += [(InState, "1, on a device", "abcd"), (WherePresent, "3, on the host of a device", "abcd")]
KEPT += [(InState, "1, bf16, on the host of a device", "ab"), (InGroup, "0", "ab")]


@rule(
    "What a step changes in an optimizer's group, and a number in its state, goes where its tensors go, and is given "
    "back as the type that it was",
    "A step",
    broken_by=[
        Edit("shoal.blocks.held", "            give_back_own_values(mine, users)\n", "            pass\n"),
        Edit(
            "shoal.blocks.optimizer_step",
            "with_no_empty_group(twin) if stands_in else nullcontext()",
            "nullcontext()",
        ),
        Edit("shoal.blocks.segments", "self._form(segment.stretch).given_back(kept)", "own"),
        Edit(
            "shoal.optim.state_form",
            "KINDS.get(one.dtype, numbers[key])",
            "numbers[key]",
            by="test_a_number_is_given_back_as_the_type_that_it_has_become",
        ),
        Edit("shoal.optim.twin", " if has_turn(theirs) else ()", "", by="test_a_group_without_its_turn_counts_no_step"),
        Edit(
            "shoal.state.training_state",
            "                del group[key]\n",
            "                assert key\n",
            by="test_a_count_is_that_of_the_step_to_which_a_process_goes_back",
        ),
    ],
)
@pytest.mark.parametrize(("kind", "form", "workers"), shortened(CASES, *KEPT))
def test_what_an_optimizer_counts_is_the_same_through_a_loss_in_a_step_and_a_join(
    kind: type[Own], form: str, workers: str
) -> None:
    with Crew(workers, task(kind, form)) as crew:
        crew.plant(workers[1], 2, "exchange")
        crew.train_to(3)
        crew.add("x")
        crew.train_until("fills", holds_blocks(crew, "x"))
        crew.kill(workers[0])
        assert crew.finish() == right(task(kind, form))


@holds("What a step changes in an optimizer's group")
@pytest.mark.parametrize(
    ("kind", "form"),
    shortened(
        product(KINDS, FORMS), (InGroup, "1"), (InState, "3, bf16"), (InGroup, "1, bf16, on the host of a device")
    ),
)
def test_what_an_optimizer_counts_goes_on_after_a_resume(kind: type[Own], form: str, tmp_path: Path) -> None:
    saving = task(kind, form, shoal={"checkpoint": {"path": str(tmp_path), "every_steps": 3}})
    with Crew("ab", saving) as crew:
        crew.train_to(4)
        saved(crew, 3)
    with Crew("abc", saving) as crew:
        assert crew.finish() == right(task(kind, form))


@holds("What a step changes in an optimizer's group")
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_counts_trains_as_it_does_by_itself(kind: type[Own]) -> None:
    """At one lane the gradients are the step's own."""
    noted: list[list[torch.Tensor]] = []
    one = task(kind, max_steps=4, lanes=1, gradient_clipping=0.0)
    engine = engine_of(one, AloneLink(), Faults([]))
    plain = copy.deepcopy(engine.module)
    optimizer = two_groups(kind, plain)
    names = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    state, commit = engine.context.state, engine.context.state.commit

    def noting(*arguments: Any) -> None:
        gradients: dict[str, torch.Tensor] = {}
        for bucket in state.layout.buckets:
            flat = state.sums.reduced.of(state.layout.whole(bucket)).clone()
            gradients |= dict(zip((slot.parameter.name for slot in bucket.slots), views(bucket, flat), strict=True))
        noted.append([gradients[name] for name in names])
        commit(*arguments)

    state.commit = noting  # type: ignore[method-assign]
    train(engine, one, lambda: None)
    for gradients in noted:
        for name, gradient in zip(names, gradients, strict=True):
            plain.get_parameter(name).grad = gradient
        optimizer.step()
    assert len(noted) == 4
    assert all(torch.equal(engine.module.get_parameter(name), plain.get_parameter(name)) for name in names)


@holds("What a step changes in an optimizer's group")
def test_a_group_without_its_turn_counts_no_step() -> None:
    def made(model: nn.Module) -> Own:
        optimizer = two_groups(InGroup, model)
        for name, group in zip(("wide", "narrow"), optimizer.param_groups, strict=True):
            group["name"] = name
        return optimizer

    counts: list[list[int]] = []

    def body(engine: Any, batch: Any) -> None:
        engine.turn("wide" if engine.global_step % 3 else "narrow")
        engine.backward(engine.module(**batch))
        engine.step()
        counts.append([group.get("step", 0) for group in engine.context.state.optimizer.param_groups])

    one = Task({"max_steps": 6, "lanes": 1}, optimizer=made, scheduler=constant, body=body)
    undisturbed(one)
    assert counts == [[0, 1], [1, 1], [2, 1], [2, 2], [3, 2], [4, 2]]
    with Crew("abc", replace(one, options={**one.options, "lanes": 3})) as crew:
        crew.train_to(4)
        crew.kill("b")
        crew.add("d")
        assert crew.finish() == undisturbed(replace(one, options={**one.options, "lanes": 3}))


def test_state_that_a_script_has_loaded_brings_its_numbers_along() -> None:
    def loaded(model: nn.Module) -> Own:
        optimizer = two_groups(InState, model)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = {"mean": torch.ones_like(parameter), "step": 7, "even": False, "weight": 0.7, "later": 5.5}
                optimizer.state[parameter] = state
        return optimizer

    fresh = task(InState)
    brought = replace(fresh, optimizer=loaded)
    with Crew("ab", brought) as crew:
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == undisturbed(brought) != undisturbed(fresh)


@holds("What a step changes in an optimizer's group")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_at", [0, 2])
def test_a_count_is_that_of_the_step_to_which_a_process_goes_back(
    kind: type[Own], saved_at: int, tmp_path: Path
) -> None:
    state, storage = trained(saved_at, kind=kind), LocalStorage(tmp_path)
    name, _ = save(state, storage)
    reader = look_into(storage, name).reader()
    train_on(state, 3)
    load_small_state(reader, state, {})
    load_blocks(reader, state, state.everything)
    assert state.step == saved_at
    right, found = (
        block_digests(one, one.everything) for one in (trained(4, kind=kind), train_on(state, 4 - saved_at))
    )
    assert found == right


@holds("What a step changes in an optimizer's group")
def test_a_number_is_given_back_as_the_type_that_it_has_become() -> None:
    first, later = {"count": 3, "even": True, "step": 7}, {"count": 3.5, "even": False, "step": 8}
    found = given_back(carried(later), numbers_in(first))
    assert repr(found) == repr(later)


# ---- the probe


@rule(
    "An optimizer that gives other bits on blocks than on whole tensors, or whose bits depend on what no joiner is "
    "given, is refused at the start",
    "A step",
    broken_by=[
        Edit(
            "shoal.optim.probe",
            "        if not _equal(whole.weights(), matrix.weights()):\n",
            "        if not matrix:\n",
        ),
        Edit("shoal.optim.probe", "        if not random.is_here():\n", "        if not random:\n"),
        Edit(
            "shoal.optim.probe",
            "        if _equal(whole.weights(), blocks.weights()) and self._are_alike(whole, blocks, form):\n",
            "        if blocks:\n",
        ),
        Edit(
            "shoal.optim.probe",
            "        if not _equal(whole.weights(), beside.weights()[:ELEMENTS]):\n",
            "        if not beside:\n",
        ),
        Edit("shoal.optim.probe", "_sort(value, key in read)", "_sort(value, False)"),
        Edit("shoal.optim.probe", "        for shape in SHAPES[1:]:\n", "        for shape in SHAPES[:0]:\n"),
        Edit("shoal.optim.probe", "SWELLS = (1.0, 1e-2, 0.1, 1.0, 1e3, 10.0)", "SWELLS = (1.0,) * 6"),
        Edit("shoal.optim.probe", "            drawn[1 + step, elements] = 0.0\n", "            assert elements\n"),
    ],
)
@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_not_run_on_blocks_is_refused_with_what_the_probe_saw(kind: type[Own], elementwise: bool) -> None:
    with pytest.raises(UserError, match=f"^optimizer {kind.__name__} {REFUSED[kind]}.*; Shoal runs optimizers on blo"):
        check_optimizer(kind([nn.Parameter(torch.ones(3, 3))]), elementwise)


@rule(
    "What changes with an optimizer's steps where no joiner is given it needs the script's word, also where the probe "
    "sees no bits that depend on it",
    "A step",
    broken_by=Edit("shoal.optim.probe", "        if later and not reason:\n", "        if later and reason:\n"),
)
@pytest.mark.parametrize("kind", LATE)
def test_what_changes_where_no_joiner_is_given_it_needs_the_scripts_word(kind: type[Own]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(UserError, match=f"it changes {LATE[kind]}, which no worker that joins could be given"):
        check_optimizer(optimizer, False)
    assert check_optimizer(optimizer, True) == "not tried"


def test_steps_of_the_probe_leave_objects_that_the_optimizer_has_as_they_are() -> None:
    optimizer = LateObject([nn.Parameter(torch.ones(3, 3))])
    check_optimizer(optimizer, True)
    assert not vars(optimizer.warming)


@pytest.mark.parametrize("kind", [*KINDS, Plain, Beginning])
def test_an_elementwise_optimizer_needs_nobodys_word(kind: type[Own]) -> None:
    assert check_optimizer(kind([nn.Parameter(torch.ones(3, 3))]), False) == check_optimizer(
        kind([nn.Parameter(torch.ones(3, 3))]), True
    )


def test_only_where_the_probe_cannot_run_the_scripts_word_is_taken_with_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asking = Asking([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(UserError, match=r"cannot be tried on its own: RuntimeError: give a closure\..*elementwise: tr"):
        check_optimizer(asking, False)
    assert check_optimizer(asking, True) == "not tried"
    assert capsys.readouterr().err.count("optimizer_not_tried") == 1


def test_an_optimizer_that_could_not_be_tried_trains_at_the_scripts_word() -> None:
    with pytest.raises(UserError, match="cannot be tried on its own: KeyError: 'count'"):
        check_optimizer(AtOnce([nn.Parameter(torch.ones(3, 3))]), False)
    one = task(AtOnce, "3", shoal={"elementwise": True})
    with Crew("ab", one) as crew:
        crew.train_to(2)
        crew.add("c")
        crew.train_until("fills", holds_blocks(crew, "c"))
        crew.kill("a")
        assert crew.finish() == undisturbed(one)


def test_the_probe_looks_at_every_kind_of_group_and_past_a_rate_of_0() -> None:
    class Second(Own):
        def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
            return 1.0 + float(state["mean"].ndim) * group["by_shape"]

    groups = [{"params": [nn.Parameter(torch.ones(3))], "by_shape": False, "lr": 0.0}]
    assert check_optimizer(Plain(groups), False) == "tensors"
    groups.append({"params": [nn.Parameter(torch.ones(3))], "by_shape": True, "lr": 0.0})
    with pytest.raises(UserError, match="a matrix otherwise than its elements in a row"):
        check_optimizer(Second(groups), False)


class Choosing(Own):
    """Trains matrices by their norms in groups of one name, or of one number."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        is_chosen = group.get("name") == "hidden" or group["kind"] == 2
        return 1.0 + float(state["mean"].norm()) * is_chosen


@holds("An optimizer that gives other bits on blocks")
@pytest.mark.parametrize("apart", [{"name": "hidden"}, {"kind": 2}])
def test_the_probe_looks_at_groups_that_differ_in_what_a_step_reads(apart: dict[str, Any]) -> None:
    first = {"params": [nn.Parameter(torch.ones(3))], "name": "rest", "kind": 1}
    second = {**first, "params": [nn.Parameter(torch.ones(3))]}
    check_optimizer(Choosing([first, second]), False)
    with pytest.raises(UserError, match="trains blocks by themselves otherwise"):
        check_optimizer(Choosing([first, second | apart]), False)


@pytest.mark.parametrize("apart", ["name", "layer", "lr", "betas"])
def test_groups_that_differ_in_what_changes_no_way_of_training_are_probed_once(
    apart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = list[int]()
    tried = probe._Probe.tried

    def noting(one: Any) -> Any:
        probed.append(one._number)
        return tried(one)

    monkeypatch.setattr(probe._Probe, "tried", noting)
    of: Any = {"lr": lambda number: 0.01 * number, "betas": lambda number: (0.9, 0.5 + 0.01 * number)}.get(apart, str)
    groups = [{"params": [nn.Parameter(torch.ones(3))], apart: of(number)} for number in range(9)]
    check_optimizer(torch.optim.AdamW(groups), False)
    assert probed == [0]


@pytest.mark.parametrize("kind", [*KINDS, *REFUSED, torch.optim.AdamW])
def test_the_probe_leaves_random_state_hooks_and_the_scripts_object_as_they_are(kind: Any) -> None:
    optimizer, calls = kind([nn.Parameter(torch.ones(3, 3))]), list[Any]()
    everybodys = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    torch.manual_seed(3)
    attributes, groups = dict(vars(optimizer)), copy.deepcopy(optimizer.param_groups)
    drawn = RandomState.save()
    try:
        check_optimizer(optimizer, False)
    except UserError:
        assert kind in REFUSED
    assert drawn.is_here()
    assert vars(optimizer) == attributes and not optimizer.state and not calls
    assert len(_global_optimizer_pre_hooks) == 1
    assert repr(optimizer.param_groups) == repr(groups)
    everybodys.remove()


def test_a_worker_whose_optimizer_keeps_something_else_is_refused() -> None:
    found = []

    class Link(AloneLink):
        def introduce(self, description: Any, status: Any) -> None:
            found.append(description)
            super().introduce(description, status)

    for kind in (Plain, InGroup):
        named: Any = type("Own", (kind,), {})
        one = task(named)
        engine = engine_of(one, AloneLink(), Faults([]))
        model = one.model()
        given = Given(model, engine.context.config, one.data(), two_groups(named, model))
        engine_with(given, lambda *_: (Link(), Faults([])))
    difference = first_difference("w1", found[1], found[0])
    assert difference is not None
    assert "what the optimizer keeps is tensors, step of the group, the job's is tensors." in difference


def test_values_of_groups_are_back_in_the_scripts_object_after_each_step() -> None:
    engine = engine_of(task(InGroup), AloneLink(), Faults([]))
    train(engine, task(InGroup), lambda: None)
    assert [group["step"] for group in hyper_parameters(engine.context.state.optimizer)] == [12, 12]
