"""Stage 3: the same bits as stage 0 whatever a model does with its parameters, through losses anywhere, joins, saves.

What is freed is NaN first, and so is memory before anything comes into it: whatever is read too early or too late is
a wrong bit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from integration.scripts import VOCABULARY
from random_modules import RandomModel
from random_modules import optimizer_of as optimizer_of_random
from safetensors.torch import load_file
from shoal.blocks.released import Released
from shoal.blocks.unit_flats import Presence
from shoal.faults import Faults
from shoal.session.alone import AloneLink
from shoal.training.engine import Engine
from shoal.training.sharded_parameters import ShardedParameters
from shoal_controller.core.machine.events import DrainWorker
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS, LANES, WIDTH = 6, 4, 32


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 200), nn.Linear(200, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Layers(nn.Module):
    """Units with all that makes them hard: tied, shared, called twice, recomputed, used from outside, left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers[4].up.weight = self.layers[1].up.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.dropout(self.embedding(tokens) + self.places[: tokens.shape[1]])
        hidden = self.layers[1](self.layers[0](hidden))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = checkpoint(lambda x: self.layers[2](self.layers[4](x)), hidden, use_reentrant=False)
        hidden = self.layers[0](hidden) * self.layers[3].norm.weight.detach().norm()
        logits = nn.functional.linear(self.head(hidden), self.embedding.weight @ self.embedding.weight.t())
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def task(stage: int = 3, **more: Any) -> Task:
    given = {key: more.pop(key) for key in ("body", "step", "in_loop", "prepare") if key in more}
    return Task({"max_steps": STEPS, "lanes": LANES, "stage": stage, **more}, model=Layers, **given)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def of(one: Task) -> Task:
    return Task(**{**vars(one), "optimizer": adamw})


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "auto_cast": True}}])
def test_every_world_ends_as_one_worker_in_stage_0(precision: dict[str, Any]) -> None:
    precision = precision and {"precision": precision}
    right = undisturbed(of(task(0, **precision)))
    assert undisturbed(of(task(**precision))) == right
    for workers, mirrors in (("ab", 0), ("abc", 1), ("abcd", 2)):
        with Crew(workers, of(task(mirrors=mirrors, **precision))) as crew:
            crew.train_to(2)
            crew.add("e")
            assert crew.finish() == right, (workers, mirrors)


@pytest.mark.parametrize(
    "point",
    [
        "forward",
        "gather",
        "backward",
        "exchange",
        "mirror",
        "fill",
        "vote",
        "optimizer",
        "hand_out",
        "prepare",
        "begin",
    ],
)
def test_a_loss_anywhere_in_a_step_changes_no_bit(point: str) -> None:
    with Crew("abc", of(task())) as crew:
        crew.plant("c", 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == undisturbed(of(task(0)))


@pytest.mark.parametrize("gathers", range(0, 40, 3))
def test_a_loss_at_any_gather_of_a_step_changes_no_bit(gathers: int) -> None:
    """Within the forward, within the backward: of those that wait for the dead one, some are in each."""
    count = 0

    def die(worker: Any, point: str, step: int) -> None:
        nonlocal count
        if (worker.name, point, step) == ("b", "gather", 3):
            count += 1
            if count == gathers + 1:
                crew.plant("b", 3, "gather")

    with Crew("abc", of(task())) as crew:
        crew.watchers.append(die)
        assert crew.finish() == undisturbed(of(task(0)))


def test_a_forward_that_loses_a_peer_runs_again_by_itself() -> None:
    """The script sees one call that takes longer."""
    calls: list[int] = []

    def count(engine: Engine, batch: Any) -> None:
        calls.append(1)
        engine.backward(engine.module(**batch))
        engine.step()

    with Crew("abc", of(task(body=count))) as crew:
        crew.plant("c", 3, "gather")
        assert crew.finish() == undisturbed(of(task(0)))
    assert len(calls) <= LANES * (STEPS + 2)


def test_an_owner_that_is_behind_answers_when_it_has_come_so_far() -> None:
    """One worker goes on to the next forward while another has not made the update yet."""

    def hold(worker: Any, point: str, step: int) -> None:
        if (worker.name, point) == ("b", "optimizer") and step < STEPS:
            worker.wait(lambda: crew.workers["a"].engine.global_step >= step)

    with Crew("ab", of(task(mirrors=0))) as crew:
        crew.watchers.append(hold)
        assert crew.finish() == undisturbed(of(task(0)))


def test_two_losses_one_during_the_recovery_from_the_other() -> None:
    with Crew("abcd", of(task(mirrors=2))) as crew:
        crew.plant("d", 3, "gather")
        crew.plant("c", 3, "promote")
        assert crew.finish() == undisturbed(of(task(0)))


def test_a_drained_worker_takes_no_parameter_with_it() -> None:
    with Crew("abc", of(task(mirrors=0))) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        assert crew.finish() == undisturbed(of(task(0)))


@given(st.integers(0, 1 << 30), st.sampled_from(["forward", "gather", "backward", "vote", "fill", "begin"]), st.data())
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None)
def test_a_random_module_has_the_same_bits_in_stage_3_through_a_loss_and_a_join(
    number: int, point: str, data: st.DataObject
) -> None:
    lanes, micro_batches = data.draw(st.integers(2, 5)), data.draw(st.sampled_from([1, 1, 2]))
    names = "abcd"[: data.draw(st.integers(2, min(4, lanes)))]
    options = {"max_steps": 5, "lanes": lanes, "micro_batches_per_lane": micro_batches}

    def of_stage(stage: int) -> Task:
        model, optimizer = (lambda: RandomModel(number)), optimizer_of_random(number)
        return Task({**options, "stage": stage}, model=model, optimizer=optimizer)

    right = undisturbed(of_stage(0))
    with Crew(names, of_stage(3)) as crew:
        crew.plant(data.draw(st.sampled_from(names)), data.draw(st.integers(2, 4)), point)
        crew.train_to(1)
        crew.add("e")
        assert crew.finish() == right


# ---- memory


def test_between_steps_nothing_is_gathered_and_a_backward_holds_few_units() -> None:
    most: list[int] = []

    def look(engine: Engine, batch: Any) -> None:
        parameters = engine.parts.step.parameters
        assert isinstance(parameters, ShardedParameters)
        if engine.warming_up:
            and_train(engine, batch)
            return
        assert all(unit.presence is Presence.OUT for unit in parameters.units)
        assert all(type(one) is Released for unit in parameters.units for one in unit.parameters)
        loss = engine.module(**batch)
        loss.register_hook(lambda _: most.append(sum(unit.presence is Presence.HERE for unit in parameters.units)))
        engine.backward(loss)
        assert all(unit.presence is Presence.OUT for unit in parameters.units)
        engine.step()

    class Plain(Layers):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    with Crew("abcd", Task(**{**vars(of(task(mirrors=1, body=look))), "model": Plain})) as crew:
        crew.finish()
    assert most and max(most) <= 2


# ---- what a script does


def alone(body: Callable[[Engine, Any], None]) -> None:
    undisturbed(of(task(body=body)))


def and_train(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch))
    engine.step()


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda weight: weight + 1, "__add__|add"),
        (lambda weight: weight.norm(), "norm"),
        (lambda weight: weight.data, r"\.data"),
        (lambda weight: weight.detach(), "detach"),
        (lambda weight: weight[0], "__getitem__"),
        (lambda weight: nn.functional.linear(torch.ones(1, WIDTH), weight), "linear"),
        (lambda weight: copy.deepcopy(weight), "__deepcopy__|\\.data"),
        (lambda weight: repr(weight), "__repr__"),
    ],
)
def test_a_parameter_that_is_not_here_is_refused_by_name(use: Callable[[Tensor], object], named: str) -> None:
    def body(engine: Engine, batch: Any) -> None:
        use(engine.module.layers[0].up.weight)
        and_train(engine, batch)

    with pytest.raises(UserError, match=rf'"layers.0.up.weight" is used by ({named}) while it is not gathered'):
        alone(body)


def test_what_is_no_value_of_a_parameter_can_be_looked_at() -> None:
    def body(engine: Engine, batch: Any) -> None:
        weight = engine.module.layers[0].up.weight
        assert (weight.shape, weight.dtype, weight.numel()) == ((200, WIDTH), torch.float32, 6400)
        assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.grad is None
        assert sum(one.numel() for one in engine.module.parameters()) > 6400
        assert "targets" in inspect.signature(engine.module.forward).parameters
        and_train(engine, batch)
        engine.module.zero_grad()

    alone(body)


def test_gathered_parameters_are_the_jobs_and_may_be_part_of_a_loss() -> None:
    """Where they are whole it changes nothing, so a script is the same in every stage."""

    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        with engine.gathered(engine.module.layers[3]):
            loss = loss + 0.1 * engine.module.layers[3].down.weight.square().mean()
        engine.backward(loss)
        engine.step()

    right = undisturbed(of(task(0, body=body)))
    with Crew("abc", of(task(body=body))) as crew:
        crew.plant("c", 3, "gather")
        assert crew.finish() == right


def slope(engine: Engine) -> Tensor:
    """A backward of the script's own; its gradient is of what the engine does not know of."""
    at = torch.ones(1, WIDTH, requires_grad=True)
    values = engine.module.layers[0](at.unsqueeze(0))
    (found,) = torch.autograd.grad(values.sum(), at)
    return found


@pytest.mark.parametrize("look", [lambda engine: engine.module.layers[0].up.weight.norm(), slope])
def test_a_loss_under_what_a_script_does_outside_of_the_forward_is_mended_too(
    look: Callable[[Engine], Tensor],
) -> None:
    seen: list[float] = []

    def body(engine: Engine, batch: Any) -> None:
        with engine.gathered(engine.module.layers[3]):
            seen.append(float(look(engine).detach().sum()))
        and_train(engine, batch)

    right = undisturbed(of(task(0, body=body)))
    numbers, seen[:] = set(seen), []
    with Crew("abc", of(task(body=body))) as crew:
        crew.plant("c", 2, "hand_out")
        crew.train_to(3)
        assert crew.finish() == right
    assert set(seen) == numbers


def test_a_context_of_gathered_parameters_is_left_before_the_step() -> None:
    def body(engine: Engine, batch: Any) -> None:
        with engine.gathered():
            and_train(engine, batch)

    with pytest.raises(UserError, match=r"engine\.step was called within engine\.gathered"):
        alone(body)


class Careless(Layers):
    """Takes whatever goes wrong for a hopeless sample."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        try:
            return super().forward(tokens, targets)
        except Exception:
            return torch.tensor(9.0, requires_grad=True)


@pytest.mark.parametrize("point", ["gather", "hand_out", "vote"])
def test_rank_0_evaluates_and_averages_weights_after_every_step_through_a_loss(point: str) -> None:
    """What it asks others for, they send beside their own work. The loss of one that it asks is mended on the way, and
    no model swallows it.
    """

    def prepare(engine: Engine) -> None:
        def after_step() -> None:
            with engine.evaluating():
                tokens = torch.arange(20).view(2, 10)
                scores.append(float(engine.module(tokens, tokens)))
            with engine.gathered():
                seen.append({name: value.clone() for name, value in engine.module.state_dict().items()})

        engine.on_step(lambda _: after_step())

    seen: list[dict[str, Tensor]] = []
    scores: list[float] = []
    careless = {"prepare": prepare}
    undisturbed(Task(**{**vars(of(task(0, **careless))), "model": Careless}))
    right, right_scores, seen[:], scores[:] = list(seen), list(scores), [], []
    with Crew("abc", Task(**{**vars(of(task(**careless))), "model": Careless})) as crew:
        crew.plant("c", 3, point)
        crew.train_to(4)
        crew.add("d")
        crew.finish()
    assert scores == right_scores and len(seen) == len(right) == STEPS
    for mine, theirs in zip(seen, right, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_forward_that_is_given_up_leaves_nothing_for_the_next_step() -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        if engine.global_step in (1, 2):
            engine.skip()
            return
        engine.backward(loss)
        engine.step()

    right = undisturbed(of(task(0, body=body)))
    with Crew("ab", of(task(body=body, mirrors=0))) as crew:
        assert crew.finish() == right


def test_a_unit_on_its_way_is_not_freed() -> None:
    with ONE_AT_A_TIME:
        engine = engine_of(of(task()), AloneLink(), Faults([]))
        parameters = engine.parts.step.parameters
        assert isinstance(parameters, ShardedParameters)
        unit = next(iter(parameters.units))
        unit.allocate()
        parameters.units.free(unit)
        assert unit.presence is Presence.COMING


def test_an_export_is_that_of_stage_0(tmp_path: Path) -> None:
    def export(stage: int) -> Callable[[Engine, Any], None]:
        def body(engine: Engine, batch: Any) -> None:
            if engine.global_step == 3:
                engine.export(tmp_path / str(stage))
            and_train(engine, batch)

        return body

    undisturbed(of(task(0, body=export(0))))
    with Crew("abc", of(task(body=export(3)))) as crew:
        crew.finish()
    whole, sharded = load_file(tmp_path / "0"), load_file(tmp_path / "3")
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize(("first", "then"), [(3, 0), (3, 1), (0, 3), (2, 3)])
def test_a_checkpoint_of_one_stage_goes_on_in_another(first: int, then: int, tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("abc", of(task(first, shoal=place, max_steps=3))) as crew:
        crew.finish()
    with Crew("ab", of(task(then, shoal=place))) as crew:
        assert crew.finish() == undisturbed(of(task(0)))


def test_a_model_whose_units_cannot_be_told_is_one_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    undisturbed(Task({"max_steps": 1, "stage": 3}))
    assert '"event": "one_unit"' in capsys.readouterr().err


def test_a_copy_of_a_module_goes_on_with_its_own_forward() -> None:
    with ONE_AT_A_TIME:
        engine = engine_of(of(task()), AloneLink(), Faults([]))
        twin = copy.deepcopy(engine.module)
    tokens = torch.arange(20).view(2, 10)
    assert torch.isfinite(twin(tokens, tokens))
