"""`shoal.deferred()`: a model built without memory has the same first values in every stage and world.

What is freed is NaN first, as in test_sharded_parameters.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import shoal.blocks.unit_flats
import torch
from allocated_bytes import most_bytes
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from hard_units import STEPS, WIDTH, Layers, and_train, task, with_model, without_values
from matrices import shortened
from reference import reference
from rule import Edit, rule
from safetensors.torch import load_file, save_file
from shoal.checkpoint.catalogue import resolve
from shoal.checkpoint.importing import import_model
from shoal.checkpoint.restore import load_model
from shoal.checkpoint.storage import LocalStorage
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.state.training_state import Limits, TrainingState
from shoal.training.engine import Engine
from shoal.training.residency import residency_of
from shoal_protos.errors import UserError
from shoal_protos.runs import Runs
from tiers import check
from torch import Tensor, nn

pytestmark = check("trains many small jobs")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


class Filled(Layers):
    """Frozen and tied parameters, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places)
        self.scale.fill_(2.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        places = self.norm(self.frozen(self.places))
        return super().forward(tokens, targets) * places.square().mean() * self.scale.mean()


def built(model: Callable[[], nn.Module] = Filled, **given: Any) -> Callable[[], nn.Module]:
    return without_values(model, **given)


FILLED = built()


def engine(one: Task) -> Engine:
    with ONE_AT_A_TIME:
        return engine_of(one, AloneLink(), Faults([]))


@rule(
    "First values of a model that was built without memory come from a seed of the module's name, whoever makes "
    "them, when, and as often as it takes",
    "A step",
    broken_by=Edit("shoal.first_values.deferred_values", '    seed_from(f"{seed} {call.purpose} {call.name}")\n', ""),
)
@pytest.mark.parametrize("precision", shortened([{}, {"bf16": {"enabled": True}}], {}))
@pytest.mark.parametrize(
    ("stage", "workers", "mirrors"),
    shortened(
        [(1, "a", 0), (2, "a", 0), (3, "a", 0), (0, "ab", 0), (2, "ab", 0), (3, "ab", 0), (3, "abcd", 1)],
        *((0, "ab", 0), (3, "abcd", 1)),
    ),
)
def test_every_stage_and_world_begins_with_the_same_values(
    precision: dict[str, Any], stage: int, workers: str, mirrors: int
) -> None:
    more = precision and {"precision": precision}
    with Crew(workers, with_model(task(stage, mirrors=mirrors, **more), FILLED)) as crew:
        crew.train_to(2)
        crew.add("e")
        assert crew.finish() == reference(with_model(task(0, **more), FILLED))


@pytest.mark.parametrize("point", shortened(["gather", "backward", "vote", "prepare"], "gather"))
def test_a_loss_changes_no_bit(point: str) -> None:
    with Crew("abc", with_model(task(), built())) as crew:
        crew.plant("c", 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == reference(with_model(task(0), FILLED))


def test_the_first_values_are_those_of_the_modules_own_code() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(300, 300), nn.LayerNorm(300)])

    model = built(Own)()
    state = engine(with_model(task(0), lambda: model)).context.state
    weight, bias = model.layers[0].weight, model.layers[0].bias
    bound = 300**-0.5
    assert not weight.is_meta and weight.abs().max() <= bound < weight.abs().max() * 1.01
    assert bias.abs().max() <= bound and weight.std() > 0.5 * bound
    assert torch.equal(model.layers[1].weight, torch.ones(300)) and not model.layers[1].bias.any()
    assert state.optimizer.param_groups[0]["params"][0] is weight  # an optimizer made before knows them


def test_a_models_own_way_to_fill_its_modules_is_kept_and_an_init_stands_in_its_place() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDTH))

    class HasOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Scaled()])
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                parameter.data.fill_(3.0)

    def fives(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 5.0)

    for given, value in (({}, 3.0), ({"init": fives}, 5.0)):
        model = built(HasOwn, **given)()
        engine(with_model(task(0), lambda model=model: model))
        assert {one for parameter in model.parameters() for one in parameter.detach().flatten().tolist()} == {value}


def test_all_that_nothing_fills_is_named_in_one_sentence() -> None:
    class Unfilled(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].register_buffer("mask", torch.rand(3))
            self.attention.table = torch.ones(3)

    with pytest.raises(
        UserError,
        match=r'nothing fills them: places of Unfilled; mask of Layer "layers\.2"; '
        r'table of MultiheadAttention "attention"\. Give their classes a reset_parameters\(\)',
    ):
        engine(with_model(task(), built(Unfilled)))


def test_what_a_model_reads_while_it_is_built_is_said() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = torch.linspace(0, 1, 3)[1].item()

    with pytest.raises(UserError, match=r"reads values while it is built.*device=\"cpu\""):
        built(Reading)()


def test_a_model_on_the_meta_device_that_was_built_elsewhere_is_refused() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Filled()

    with pytest.raises(UserError, match=r"lies on the meta device.*with shoal\.deferred\(\)"):
        engine(with_model(task(), build))


def test_an_init_that_draws_elsewhere_is_refused_when_workers_compare() -> None:
    chance = random.Random(1)

    def draw(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, chance.random())

    with (
        Crew("ab", with_model(task(), built(Layers, init=draw))) as crew,
        pytest.raises(AssertionError, match="are not the same on all workers"),
    ):
        crew.finish()


def test_the_scripts_own_random_numbers_go_on_as_if_nothing_had_been_made() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    for stage in (0, 3):
        one = with_model(task(stage), built())
        torch.manual_seed(1)
        state = torch.get_rng_state()
        engine(one)  # it seeds by itself, before the model is built
        torch.set_rng_state(state)
        model = built()()
        torch.manual_seed(1)
        engine(with_model(task(stage), lambda model=model: (torch.manual_seed(1), model)[1]))
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("optimizer", shortened([torch.optim.Adagrad, torch.optim.SGD], torch.optim.Adagrad))
def test_an_optimizer_that_makes_state_when_it_is_constructed_begins_as_with_values(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        more = {"initial_accumulator_value": 0.5} if optimizer is torch.optim.Adagrad else {}
        return optimizer(model.parameters(), lr=0.01, **more)

    def of_stage(stage: int) -> Task:
        return Task(**{**vars(with_model(task(stage), built())), "optimizer": make})

    right = undisturbed(of_stage(0))
    with Crew("ab", of_stage(3)) as crew:
        assert crew.finish() == right


# ---- memory


class Wide(nn.Module):
    """Eight units of a megabyte each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)) for _ in range(8))


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_a_worker_never_has_more_of_a_model_than_its_shards_and_one_unit(half: torch.dtype | None) -> None:
    def begin() -> None:
        with shoal.deferred():
            model = Wide()
        optimizer = torch.optim.AdamW(model.parameters())
        limits = Limits(4, 0.0, 1, half=half, peers_on_host=False)
        state = TrainingState(model, optimizer, None, limits, residency_of(3))
        state.begin_anew(Runs([(0, state.layout.blocks // 4)]))
        kept.append(state.held.home.state_bytes() + state.weights.bytes)

    kept: list[int] = []
    unit = 4 * 2 * 256 * 512
    most = most_bytes(begin)
    assert kept[0] <= most <= kept[0] + 1.1 * unit < 5 * unit


# ---- weights from files


def test_weights_are_read_by_name_and_only_what_is_not_there_is_made(tmp_path: Path) -> None:
    torch.manual_seed(3)
    eager = Filled()
    kept = {name: value for name, value in eager.state_dict().items() if not name.startswith("norm")}
    kept.pop("layers.4.up.weight")  # tied: known by its other name
    first = {name: kept.pop(name) for name in list(kept)[:4]}
    save_file(first, tmp_path / "a.safetensors")
    save_file(kept, tmp_path / "b.safetensors")

    def eagerly() -> nn.Module:
        model = Filled()
        model.load_state_dict({**first, **kept}, strict=False)
        model.layers[4].up.weight = model.layers[1].up.weight
        return model

    right = undisturbed(with_model(task(0), eagerly))
    weights = built(weights=tmp_path)
    assert undisturbed(with_model(task(0), weights)) == right
    with Crew("abc", with_model(task(), weights)) as crew:
        crew.plant("c", 2, "gather")
        assert crew.finish() == right


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"elsewhere": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r"none of the tensors of .* is of this model"):
        engine(with_model(task(), built(weights=path)))
    save_file({"places": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r'"places" has shape \(64, 32\), and \(2,\) in'):
        engine(with_model(task(), built(weights=path)))
    with pytest.raises(UserError, match="which does not exist"):
        built(weights=tmp_path / "none")()
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="is not a safetensors file"):
        engine(with_model(task(), built(weights=path)))


# ---- checkpoints, exports, other parts


@pytest.mark.parametrize(("first", "then"), shortened([(3, 0), (0, 3)], (0, 3)))
def test_a_checkpoint_goes_on_where_the_model_was_built_either_way(first: int, then: int, tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("ab", with_model(task(first, shoal=place, max_steps=3), built())) as crew:
        crew.finish()
    with Crew("ab", with_model(task(then, shoal=place), built() if then else Filled)) as crew:
        assert crew.finish() == undisturbed(with_model(task(0), built()))


def test_tensors_that_are_taken_by_name_go_before_those_that_would_be_made(tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    undisturbed(with_model(task(shoal=place, max_steps=2), built()))

    class Wider(Filled):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, self.head.out_features)

    allowed = {"checkpoint": {"path": str(tmp_path), "allow": ["new", "missing"]}}
    right = undisturbed(with_model(task(0, shoal=allowed), built(Wider)))
    assert right != undisturbed(with_model(task(0), built(Wider)))
    with Crew("ab", with_model(task(shoal=allowed), built(Wider))) as crew:
        assert crew.finish() == right


def test_a_worker_reads_of_tensors_that_are_taken_by_name_what_it_keeps(tmp_path: Path) -> None:
    torch.manual_seed(3)
    eager = Wide()
    save_file(eager.state_dict(), tmp_path / "a.safetensors")
    import_model(tmp_path / "a.safetensors", LocalStorage(tmp_path / "c"))
    found = resolve(None, str(tmp_path / "c"), print)
    assert found is not None
    with shoal.deferred():
        model = Wide()
    state = TrainingState(model, torch.optim.SGD(model.parameters()), None, Limits(4, 0.0, 1), residency_of(3))
    keeps = Runs([(0, state.layout.blocks // 4)])

    def begin() -> None:
        load_model(found.reader(), state, ())
        state.begin_anew(keeps)

    unit = 4 * 2 * 256 * 512
    assert most_bytes(begin) <= state.weights.bytes + 1.1 * unit < 4 * unit
    for stretch in state.layout.stretches(keeps):
        slots = state.layout.buckets[stretch.bucket].slots
        first, last = state.layout.elements(stretch)
        flat = torch.zeros(state.layout.buckets[stretch.bucket].elements)
        for slot in slots:
            values = eager.get_parameter(slot.parameter.name).detach().reshape(-1)
            flat[slot.start : slot.start + slot.parameter.elements] = values
        assert torch.equal(state.weights.of(stretch), flat[first:last])


def test_parts_that_were_built_with_values_keep_them() -> None:
    """As adapters that are put on a model without values."""

    def mixed() -> nn.Module:
        with shoal.deferred():
            model = Filled()
        model.layers[0].up.bias = nn.Parameter(torch.full((200,), 0.25))
        model.head = nn.Linear(WIDTH, model.head.out_features, bias=False)
        return model

    for stage in (0, 3):
        seen: list[float] = []

        def look(engine: Engine, batch: Any, seen: list[float] = seen) -> None:
            if engine.global_step == 0:
                with engine.gathered():
                    seen.append(float(engine.module.layers[0].up.bias.detach()[3]))
            and_train(engine, batch)

        found = undisturbed(Task(**{**vars(with_model(task(stage), mixed)), "body": look}))
        assert set(seen) == {0.25}
        assert stage == 0 or found == undisturbed(with_model(task(0), mixed))


def test_first_values_can_be_gathered_before_the_loop_and_exported(tmp_path: Path) -> None:
    def prepare(engine: Engine) -> None:
        with engine.gathered(engine.module.head):
            seen.append(engine.module.head.weight.detach().clone())

    seen: list[Tensor] = []
    for stage in (0, 3):

        def export(engine: Engine, batch: Any, stage: int = stage) -> None:
            if engine.global_step == STEPS - 1:
                engine.export(tmp_path / str(stage))
            and_train(engine, batch)

        undisturbed(with_model(task(stage, prepare=prepare, body=export), built()))
    assert torch.equal(*seen)
    whole, sharded = load_file(tmp_path / "0"), load_file(tmp_path / "3")
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[name], sharded[name]) for name in whole)
