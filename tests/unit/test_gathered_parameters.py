"""What a script may do with sharded parameters (stage 3): look, gather, evaluate, keep, export; and what is refused.

What is freed is NaN first, as in test_sharded_parameters.py.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal.blocks.sharded_memory
import shoal.blocks.unit_flats
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from hard_units import STEPS, WIDTH, Layers, and_train, of, task, with_model
from matrices import shortened
from reference import reference
from rule import holds
from safetensors.torch import load_file
from shoal.blocks.unit_flats import Presence
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal.training.sharded_parameters import ShardedParameters
from shoal_protos.errors import UserError
from tiers import check
from torch import Tensor, nn

pytestmark = check("trains many small jobs")


@pytest.fixture(autouse=True, params=["seen", "copied"])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are seen in their owners' memory, as on one host, or copied, as between hosts."""
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    if request.param == "copied":
        monkeypatch.setattr(shoal.blocks.sharded_memory, "can_lie_in_pages", lambda _: False)


def alone(body: Callable[[Engine, Any], None]) -> None:
    undisturbed(of(task(body=body)))


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
        (lambda weight: torch.func.grad(lambda one: one.sum())(weight), "torch.func"),
        (lambda weight: torch.vmap(lambda one: one.sum())(weight), "torch.func"),
        (lambda weight: torch.func.functionalize(lambda one: one + 1)(weight), "torch.func"),
        (lambda weight: weight.as_subclass(torch.Tensor), "as_subclass"),
    ],
)
def test_a_parameter_that_is_not_here_is_refused_by_name(use: Callable[[Tensor], object], named: str) -> None:
    def body(engine: Engine, batch: Any) -> None:
        use(engine.module.layers[0].up.weight)
        and_train(engine, batch)

    with pytest.raises(UserError, match=rf'"layers.0.up.weight" is used by ({named}) while it is not gathered'):
        alone(body)


def test_a_parameter_that_is_not_here_and_is_written_to_is_not_sent_to_where_that_is_refused_too() -> None:
    def body(engine: Engine, batch: Any) -> None:
        nn.init.xavier_uniform_(engine.module.layers[0].up.weight)

    with pytest.raises(UserError, match=r'"layers.0.up.weight" is used by uniform_ .* before shoal.initialize'):
        alone(body)


def test_a_parameter_that_its_module_has_lost_is_refused_by_its_first_name() -> None:
    """What wraps a weight often takes it out of its module before it looks at it."""

    def body(engine: Engine, batch: Any) -> None:
        layer = engine.module.layers[0].up
        weight = layer.weight
        del layer.weight
        try:
            weight.norm()
        finally:
            layer.weight = weight

    with pytest.raises(UserError, match=r'"layers.0.up.weight" is used by norm while it is not gathered'):
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

    begins: Callable[[], None] = staticmethod(lambda: None)
    """Called within its forward, before it uses anything."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        try:
            self.begins()
            return super().forward(tokens, targets)
        except Exception:
            return torch.tensor(9.0, requires_grad=True)


@pytest.mark.parametrize("point", shortened(["gather", "hand_out", "vote"], "gather"))
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


@holds("A forward that loses a peer")
def test_no_model_swallows_the_loss_of_a_peer_while_rank_0_alone_evaluates() -> None:
    """Nobody else is in that forward, and nothing that comes after would make it again."""

    def evaluate(engine: Engine) -> None:
        tokens = torch.arange(20).view(2, 10)
        with engine.evaluating():
            if engine.global_step == 3:
                engine.module.begins = lose_c
            scores.append(float(engine.module(tokens, tokens)))

    def lose_c() -> None:
        lost = crews[0].workers["c"] if crews else None
        if lost is not None and lost.alive:
            lost.killed = True
            crews[0].changed.notify_all()
            crews[0].workers["a"].wait(lambda: not lost.alive)

    scores: list[float] = []
    crews: list[Crew] = []
    tried = Task(**{**vars(of(task(prepare=lambda engine: engine.on_step(evaluate)))), "model": Careless})
    right = undisturbed(tried)
    right_scores, scores[:] = list(scores), []
    with Crew("abc", tried) as crew:
        crews.append(crew)
        assert crew.finish() == right
        assert not crew.workers["c"].alive
    assert scores == right_scores and len(scores) == STEPS


@holds("A request for a unit names")
def test_a_forward_that_is_given_up_leaves_nothing_for_the_next_step() -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        if engine.global_step in (1, 2) and engine.context.loop.lane % 2:  # the last one of each worker
            engine.skip()
            return
        engine.backward(loss)
        engine.step()

    right = undisturbed(of(task(0, body=body)))
    with Crew("ab", of(task(body=body, mirrors=0))) as crew:
        assert crew.finish() == right


@holds("What autograd has saved of a unit")
def test_a_unit_on_its_way_is_not_freed() -> None:
    with ONE_AT_A_TIME:
        engine = engine_of(of(task()), AloneLink(), Faults([]))
        parameters = engine.parts.step.parameters
        assert isinstance(parameters, ShardedParameters)
        unit = next(iter(parameters.units))
        unit.allocate()
        parameters.units.free(unit)
        assert unit.presence is Presence.COMING


class Frozen(Layers):
    """`scale`: of a parameter that no optimizer changes, as a script that reads another file would have it."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(WIDTH) * scale, requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        return super().forward(tokens, targets) * self.frozen.square().mean()


def test_a_joiner_has_the_jobs_frozen_parameters_before_its_first_lane() -> None:
    with Crew("ab", with_model(task(), Frozen)) as crew:
        crew.train_to(2)
        crew.add("e", with_model(task(), lambda: Frozen(5.0)))
        assert crew.finish() == undisturbed(with_model(task(0), Frozen))


@pytest.mark.parametrize("point", shortened(["gather", "backward"], "backward"))
def test_a_loss_under_one_of_several_micro_batches_changes_no_bit(point: str) -> None:
    for count in range(4):
        seen = 0

        def die(worker: Any, at: str, step: int, count: int = count) -> None:
            nonlocal seen
            seen += (worker.name, at, step) == ("c", point, 3)
            if seen == 3 * count + 1:
                crew.plant("c", 3, point)

        with Crew("abc", of(task(micro_batches_per_lane=2))) as crew:
            crew.watchers.append(die)
            assert crew.finish() == undisturbed(of(task(0, micro_batches_per_lane=2))), count


def test_views_that_a_script_keeps_stay_good_to_read() -> None:
    kept: list[dict[str, Tensor]] = []

    def body(engine: Engine, batch: Any) -> None:
        with engine.gathered():
            kept.append(engine.module.state_dict())
        and_train(engine, batch)
        assert all(torch.isfinite(value).all() for state in kept for value in state.values())

    before: list[Tensor] = []

    def prepare(engine: Engine) -> None:
        before.append(engine.module.head.weight.detach())

    assert undisturbed(of(task(body=body, prepare=prepare))) == reference(of(task(0)))
    assert torch.isfinite(before[0]).all()


def test_open_contexts_have_their_values_again_after_a_loss() -> None:
    def body(engine: Engine, batch: Any) -> None:
        with engine.gathered(engine.module.layers[3]):
            view = engine.module.layers[3].down.weight[:2]
            with engine.gathered(engine.module.layers[0]):
                assert torch.isfinite(view).all()
                torch.mm(engine.module.head.weight[:32], engine.module.layers[2].down.weight)  # both released
            assert torch.isfinite(view).all()
        and_train(engine, batch)

    with Crew("abc", of(task(body=body))) as crew:
        crew.plant("c", 2, "hand_out")
        assert crew.finish() == reference(of(task(0)))


def test_what_an_evaluation_puts_into_parameters_and_what_leaves_a_module_harms_nothing() -> None:
    def body(engine: Engine, batch: Any) -> None:
        if engine.warming_up:  # all is here still, and what is written stays
            and_train(engine, batch)
            return
        with engine.evaluating():
            with engine.gathered(engine.module.head):
                engine.module.head.weight.copy_(torch.zeros_like(engine.module.head.weight))
            places = engine.module.embedding(torch.arange(4))
            weights = engine.module.attention.out_proj.weight
            engine.module.layers[1](places.unsqueeze(0))
            assert torch.isfinite(places).all() and weights.shape == (WIDTH, WIDTH)
        and_train(engine, batch)

    with Crew("ab", of(task(body=body))) as crew:
        assert crew.finish() == reference(of(task(0)))


def test_a_model_can_be_pickled_while_it_is_gathered() -> None:
    def body(engine: Engine, batch: Any) -> None:
        with engine.gathered():
            pickle.dumps(list(engine.module.parameters()))
        and_train(engine, batch)

    alone(body)


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


@pytest.mark.parametrize(("first", "then"), shortened([(3, 0), (3, 1), (0, 3), (2, 3)], (3, 0), (2, 3)))
def test_a_checkpoint_of_one_stage_goes_on_in_another(first: int, then: int, tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("abc", of(task(first, shoal=place, max_steps=3))) as crew:
        crew.finish()
    with Crew("ab", of(task(then, shoal=place))) as crew:
        assert crew.finish() == reference(of(task(0)))


def test_a_model_whose_units_cannot_be_told_is_one_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    undisturbed(Task({"max_steps": 1, "stage": 3}))
    assert '"event": "one_unit"' in capsys.readouterr().err


def test_a_copy_of_a_module_goes_on_with_its_own_forward() -> None:
    with ONE_AT_A_TIME:
        engine = engine_of(of(task()), AloneLink(), Faults([]))
        twin = copy.deepcopy(engine.module)
    tokens = torch.arange(20).view(2, 10)
    assert torch.isfinite(twin(tokens, tokens))


class Clamping(Layers):
    """Keeps its weights small in the forward, as models of some papers do."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        for parameter in self.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        return super().forward(tokens, targets)


@holds("Only the engine writes parameters")
@holds("Parameters that others see in their owner's memory")
def test_a_write_past_autograd_in_a_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", False)
    with pytest.raises(UserError, match=r"parameter .*was changed by the script or the model's forward"):
        undisturbed(with_model(task(body=and_train), Clamping))


def test_a_write_past_autograd_within_gathered_is_refused() -> None:
    def body(engine: Engine, batch: Any) -> None:
        with engine.gathered():
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)
        and_train(engine, batch)

    with pytest.raises(UserError, match=r"a parameter was changed by the script"):
        alone(body)
