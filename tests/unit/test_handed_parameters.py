"""Stages 0 to 2: parameters that are handed out beside the next forward have the bits of those that are waited for.

Where anything comes it is NaN before, so whatever is read too early is a wrong bit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal.exchange.hand_out
import shoal.training.parameters
import torch
from crew import Crew, Task, Worker, undisturbed
from crew_saves import saved
from hard_units import STEPS, WIDTH, Layers, and_train, of, task
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matrices import examples, shortened
from random_modules import RandomModel
from random_modules import optimizer_of as optimizer_of_random
from reference import reference
from rule import Edit, holds, rule
from shoal.blocks.released import Arriving
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from tiers import check
from torch import Tensor, nn

pytestmark = check("trains in crews of several workers")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.exchange.hand_out, "POISON", True)
    monkeypatch.setattr(shoal.training.parameters, "has_compiled", lambda: False)  # other tests of this process


def coming(engine: Engine) -> int:
    """How many parameters are still to come."""
    return sum(isinstance(one, Arriving) for one in engine.module.parameters())


@rule(
    "A parameter whose bucket is still being handed out is waited for by whatever uses it, in a forward or "
    "outside; where a script keeps views of parameters nothing is handed out beside the forward",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal.training.parameters",
            "            release(self._by_bucket[bucket], self._on_touch, Arriving)\n",
            "            pass\n",
        ),
        Edit(
            "shoal.training.parameters",
            "        self._has_views = self._can_be_guarded and self._are_viewed()\n",
            "        self._has_views = False\n",
        ),
        Edit(
            "shoal.blocks.released",
            "    _transforms_ask()\n",
            "",
            by="test_whatever_uses_a_parameter_between_steps_finds_the_new_values",
        ),
    ],
)
@pytest.mark.parametrize("stage", shortened([0, 1, 2], 1, 2))
@pytest.mark.parametrize("precision", shortened([{}, {"bf16": {"enabled": True}}], {"bf16": {"enabled": True}}))
@pytest.mark.parametrize(("workers", "mirrors"), shortened([("ab", 0), ("abc", 1), ("abcd", 2)], ("abcd", 2)))
def test_every_world_ends_as_one_worker(stage: int, precision: dict[str, Any], workers: str, mirrors: int) -> None:
    precision = precision and {"precision": precision}
    late: list[int] = []

    def look(engine: Engine) -> None:
        late.append(coming(engine))

    with Crew(workers, of(task(stage, mirrors=mirrors, in_loop=look, **precision))) as crew:
        crew.train_to(2)
        crew.add("e")
        assert crew.finish() == reference(of(task(0, **precision)))
    assert (max(late) > 0) == (stage > 0)  # in stage 0 everybody updates everything


@pytest.mark.parametrize(
    "point",
    shortened(
        ["forward", "arrival", "backward", "exchange", "mirror", "fill", "vote", "optimizer", "hand_out", "begin"],
        *("arrival", "mirror", "vote", "begin"),
    ),
)
def test_a_loss_anywhere_in_a_step_changes_no_bit(point: str) -> None:
    with Crew("abc", of(task(1))) as crew:
        crew.plant("c", 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == reference(of(task(0)))


@pytest.mark.parametrize("worker", ["a", "b"])
@pytest.mark.parametrize("arrivals", shortened(range(0, 8, 2), 4))
def test_a_loss_at_any_arrival_of_a_step_changes_no_bit(arrivals: int, worker: str) -> None:
    count = 0

    def die(of: Any, point: str, step: int) -> None:
        nonlocal count
        if (of.name, point, step) == (worker, "arrival", 3):
            count += 1
            if count == arrivals + 1:
                crew.plant(worker, 3, "arrival")

    with Crew("abc", of(task(1))) as crew:
        crew.watchers.append(die)
        assert crew.finish() == reference(of(task(0)))


USES: list[Callable[[nn.Module], object]] = [
    lambda model: [one.detach().clone() for one in model.parameters()],
    lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    lambda model: [one + 1 for one in copy.deepcopy(model).parameters()],
    lambda model: [one.data.sum() for one in reversed(list(model.parameters()))],
    lambda model: nn.utils.parameters_to_vector(model.parameters()),
    lambda model: torch._foreach_norm(list(model.parameters())),
    lambda model: [one.numpy(force=True).sum() for one in model.parameters()],
    lambda model: repr(list(model.parameters())),
    lambda model: torch.func.grad(lambda values: sum(one.sum() for one in values))(tuple(model.parameters())),
    lambda model: [one.as_subclass(torch.Tensor) for one in model.parameters()],
]


@holds("A parameter whose bucket")
@pytest.mark.parametrize("use", shortened(range(len(USES)), 0, 4, 8))
def test_whatever_uses_a_parameter_between_steps_finds_the_new_values(use: int) -> None:
    """In the loop's body a loss is taken part in where the parameter is used, and nothing is raised."""

    def look(engine: Engine) -> None:
        USES[use](engine.module)
        assert not coming(engine)
        values = torch.cat([one.detach().double().flatten() for one in engine.module.parameters()])
        assert bool(values.isfinite().all())

    with Crew("abc", of(task(1, in_loop=look))) as crew:
        crew.plant("c", 3, "arrival")
        assert crew.finish() == reference(of(task(0)))


def test_a_gradient_by_torch_func_finds_the_new_values() -> None:
    def look(engine: Engine) -> None:
        layer = engine.module.layers[2]
        named = dict(layer.named_parameters())
        ones = torch.ones(1, 3, WIDTH)
        slopes = torch.func.grad(lambda values: torch.func.functional_call(layer, values, (ones,)).sum())(named)
        assert all(bool(one.isfinite().all()) for one in slopes.values())

    with Crew("abc", of(task(1, in_loop=look))) as crew:
        assert crew.finish() == reference(of(task(0)))


def test_a_gradient_of_the_input_is_no_matter_for_what_comes_meanwhile() -> None:
    def look(engine: Engine) -> None:
        layer, ones = engine.module.layers[2], torch.ones(1, 3, WIDTH)
        assert bool(torch.func.grad(lambda values: layer(values).sum())(ones).isfinite().all())
        with torch.inference_mode():
            assert bool(engine.module.layers[0](ones).isfinite().all())

    with Crew("abc", of(task(1, in_loop=look))) as crew:
        assert crew.finish() == reference(of(task(0)))


def test_a_process_that_is_forked_meanwhile_finds_all_parameters() -> None:
    ended: list[int] = []

    def look(engine: Engine) -> None:
        child = os.fork()
        if not child:
            values = torch.cat([one.detach().flatten() for one in engine.module.parameters()])
            os._exit(0 if bool(values.isfinite().all()) else 1)
        ended.append(os.waitpid(child, 0)[1])

    with Crew("ab", of(task(1, mirrors=0, max_steps=3, in_loop=look))) as crew:
        assert crew.finish() == undisturbed(of(task(0, max_steps=3)))
    assert not any(ended)


def test_a_dataset_that_computes_with_the_model_finds_the_new_values_through_a_loss() -> None:
    def ask(engine: Engine) -> None:
        fetcher = engine.context.loop.fetcher
        own = fetcher.micro_batch

        def micro_batch(*place: int) -> Any:
            assert bool(nn.utils.parameters_to_vector(engine.module.parameters()).isfinite().all())
            return own(*place)

        fetcher.micro_batch = micro_batch  # type: ignore[method-assign]

    with Crew("abc", of(task(1, prepare=ask))) as crew:
        crew.plant("c", 3, "arrival")
        assert crew.finish() == reference(of(task(0)))


def averaging(averages: dict[int, Tensor]) -> Callable[[Engine], None]:
    """An average of the weights, taken after every step."""
    mean: dict[int, Tensor] = {}

    def body(engine: Engine, batch: Any) -> None:
        before = engine.global_step
        and_train(engine, batch)
        if engine.global_step == before or engine.warming_up:
            return
        weights = nn.utils.parameters_to_vector(engine.module.parameters()).detach()
        key = id(engine)
        mean[key] = weights.clone() if key not in mean else mean[key].lerp(weights, 0.1)
        averages[engine.global_step] = mean[key]

    return body


def test_an_average_of_the_weights_after_every_step_has_the_same_bits() -> None:
    alone: dict[int, Tensor] = {}
    right = undisturbed(of(task(0, body=averaging(alone))))
    several: dict[int, Tensor] = {}
    with Crew("abc", of(task(1, mirrors=0, body=averaging(several)))) as crew:
        assert crew.finish() == right
    assert torch.equal(alone[STEPS], several[STEPS])


@rule(
    "Requests, evaluations, a planned change and the states that a script has registered find all parameters in "
    "place; a save copies what its worker owns",
    "A change of the world",
    broken_by=[
        Edit("shoal.training.training_loop", "        self._parts.step.parameters.before_evaluating()\n", ""),
        Edit(
            "shoal.training.resize",
            "        self._step.parameters.before_leaving(old)\n",
            '        getattr(self._step.parameters, "units", None) and self._step.parameters.before_leaving(old)\n',
        ),
        Edit(
            "shoal.training.registered_states",
            "        if self._context.state.registered:\n"
            "            self._parameters.settle()  # a state of the user's may be one of parameters\n",
            "",
        ),
    ],
)
def test_callbacks_evaluations_and_gathered_weights_find_all_parameters() -> None:
    found: list[float] = []

    def watch(engine: Engine) -> None:
        def on_step(engine: Engine) -> None:
            total = sum(float(one.detach().double().sum()) for one in engine.module.parameters())
            with engine.evaluating(), engine.gathered():
                assert not coming(engine)
                assert total == sum(float(one.detach().double().sum()) for one in engine.module.parameters())
            found.append(total)

        engine.on_step(on_step)

    right = undisturbed(of(task(0, prepare=watch)))
    alone, found[:] = list(found), []
    with Crew("abcd", of(task(1, prepare=watch))) as crew:
        crew.plant("b", 3, "arrival")
        crew.plant("a", 5, "optimizer")
        assert crew.finish() == right
    assert found == alone


@holds("Requests, evaluations, a planned change")
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_save_copies_what_its_worker_owns_while_the_rest_is_still_to_come(
    precision: dict[str, Any], tmp_path: Path
) -> None:
    late: list[int] = []

    def look(worker: Worker, point: str, _: int) -> None:
        if point == "save":
            late.append(coming(worker.engine))

    here: dict[str, Any] = {"precision": precision} if precision else {}
    with Crew("abc", of(task(1, **here, shoal={"checkpoint": {"path": str(tmp_path), "every_steps": 2}}))) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        saved(crew, 2)
        right = crew.finish()
    assert max(late) > 0 and right == reference(of(task(0, **here)))
    resume = str(next(tmp_path.glob("step-000000000002-*")))
    on = {"checkpoint": {"path": str(tmp_path / "other"), "resume": resume}}
    assert undisturbed(of(task(0, **here, shoal=on))) == right


@holds("Requests, evaluations, a planned change")
def test_a_registered_state_finds_all_parameters_when_it_is_saved(tmp_path: Path) -> None:
    late: list[int] = []

    class Weights:
        """A state that is made of the parameters."""

        def __init__(self, engine: Engine) -> None:
            self._engine = engine

        def state_dict(self) -> dict[str, Any]:
            late.append(coming(self._engine))
            return {"sum": sum(float(one.detach().sum()) for one in self._engine.module.parameters())}

        def load_state_dict(self, _: dict[str, Any]) -> None: ...

    def register(engine: Engine) -> None:
        engine.register_state("weights", Weights(engine))

    saving = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    with Crew("abc", of(task(1, prepare=register, shoal=saving))) as crew:
        late.clear()
        crew.train_to(2)
        saved(crew, 2)
        assert crew.finish() == reference(of(task(0)))
    assert late and max(late) == 0


def test_a_schedule_whose_state_is_made_of_parameters_finds_all_of_them_when_it_is_saved(tmp_path: Path) -> None:
    """A loss that it met while it read would be taken part in within a save, which would begin two."""
    late: list[int] = []

    class Schedule(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            weights = [one for group in self.optimizer.param_groups for one in group["params"]]
            late.append(sum(isinstance(one, Arriving) for one in weights))
            return {**super().state_dict(), "sum": sum(float(one.detach().sum()) for one in weights)}

    def schedule(optimizer: torch.optim.Optimizer) -> Schedule:
        return Schedule(optimizer, step_size=2, gamma=0.5)

    saving = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    with Crew("abc", Task(**{**vars(of(task(1, shoal=saving))), "scheduler": schedule})) as crew:
        late.clear()
        crew.plant("b", 2, "hand_out")
        crew.train_to(3)
        saved(crew)
        assert crew.finish() == reference(Task(**{**vars(of(task(0))), "scheduler": schedule}))
    assert late and max(late) == 0


@holds("Requests, evaluations, a planned change")
def test_an_evaluation_that_the_loop_begins_finds_all_parameters() -> None:
    late: list[tuple[int, int]] = []

    def look(engine: Engine) -> None:
        before = coming(engine)
        with engine.evaluating():
            late.append((before, coming(engine)))

    with Crew("abc", of(task(1, in_loop=look))) as crew:
        crew.plant("b", 3, "arrival")
        assert crew.finish() == reference(of(task(0)))
    assert max(before for before, _ in late) > 0 and max(within for _, within in late) == 0


@holds("Rank 0 tells the others")
def test_each_step_has_its_callback_once_where_rank_0_dies_before_its_hand_out() -> None:
    steps: list[int] = []

    def watch(engine: Engine) -> None:
        engine.on_step(lambda engine: steps.append(engine.global_step))

    for point in ("optimizer", "hand_out", "arrival"):
        steps.clear()
        with Crew("abc", of(task(1, prepare=watch))) as crew:
            crew.plant("a", 3, point)
            crew.finish()
        assert steps == list(range(1, STEPS + 1)), point


@holds("A parameter whose bucket")
def test_views_that_a_script_keeps_are_never_read_too_early() -> None:
    """No class guards them, so with them nothing comes late."""
    views: dict[int, list[Tensor]] = {}
    late: list[int] = []

    def look(engine: Engine) -> None:
        if id(engine) not in views:
            views[id(engine)] = [one.data for one in engine.module.parameters()]
        late.append(coming(engine))
        assert all(bool(one.isfinite().all()) for one in views[id(engine)])

    with Crew("abc", of(task(1, mirrors=0, in_loop=look))) as crew:
        assert crew.finish() == reference(of(task(0)))
    assert max(late) == 0


def test_a_write_in_the_forward_is_refused_though_its_parameter_has_just_come() -> None:
    class Clamps(Layers):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            self.layers[3].down.weight.data.clamp_(-0.01, 0.01)
            self.embedding.weight.data.clamp_(-0.01, 0.01)
            return super().forward(tokens, targets)

    one = of(task(1, mirrors=0, max_steps=200))
    with Crew("ab", Task(**{**vars(one), "model": Clamps})) as crew:
        crew.allow()
        crew.until("a refusal", lambda: any("was changed by the script" in w.failure for w in crew.workers.values()))


@holds("Requests, evaluations, a planned change")
def test_a_drained_worker_leaves_all_parameters_behind() -> None:
    with Crew("abc", of(task(1, mirrors=0))) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        assert crew.finish() == reference(of(task(0)))


def test_two_losses_one_during_the_recovery_from_the_other() -> None:
    with Crew("abcd", of(task(1, mirrors=2))) as crew:
        crew.plant("d", 3, "arrival")
        crew.plant("c", 3, "promote")
        assert crew.finish() == reference(of(task(0)))


@given(st.integers(0, 1 << 30), st.sampled_from(["forward", "arrival", "backward", "vote", "begin"]), st.data())
@settings(
    max_examples=examples(6), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)
def test_a_random_module_has_the_same_bits_through_a_loss_and_a_join(
    number: int, point: str, data: st.DataObject
) -> None:
    lanes, micro_batches = data.draw(st.integers(2, 5)), data.draw(st.sampled_from([1, 1, 2]))
    names = "abcd"[: data.draw(st.integers(2, min(4, lanes)))]
    options = {"max_steps": 5, "lanes": lanes, "micro_batches_per_lane": micro_batches}

    def of_stage(stage: int) -> Task:
        model, optimizer = (lambda: RandomModel(number)), optimizer_of_random(number)
        return Task({**options, "stage": stage}, model=model, optimizer=optimizer)

    right = reference(of_stage(0))
    with Crew(names, of_stage(data.draw(st.integers(0, 2)))) as crew:
        crew.plant(data.draw(st.sampled_from(names)), data.draw(st.integers(2, 4)), point)
        crew.train_to(1)
        crew.add("e")
        assert crew.finish() == right
