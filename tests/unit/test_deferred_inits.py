"""`shoal.deferred()` where one call fills more than a module's own: the shapes of `_init_weights` that models have.

What is freed is NaN first, as in test_sharded_parameters.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import shoal.blocks.unit_flats
import torch
from allocated_bytes import most_bytes
from crew import ONE_AT_A_TIME, Crew, engine_of, undisturbed
from hard_units import WIDTH, Layers, task, with_model, without_values
from integration.scripts import VOCABULARY
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from safetensors.torch import save_file
from shoal.core.units import unit_numbers
from shoal.first_values.deferred_values import checksum_of, deferred_values
from shoal.first_values.pretrained import Pretrained
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.state.training_state import Limits, TrainingState
from shoal.training.residency import residency_of
from shoal_protos.errors import UserError
from shoal_protos.runs import Runs
from tiers import check
from torch import Tensor, nn

pytestmark = check("trains many small jobs")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


class Attention(nn.Module):
    """Nothing is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + self.o(torch.tanh(self.q(x)))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH)
        self.register_buffer("places", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.places[1]


class Inner(nn.Module):
    """Has its own way, as a model within a model has."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.spread, self.scale = spread, nn.Parameter(torch.ones(WIDTH))
        self.lift = nn.Linear(WIDTH, WIDTH)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Inner):
            nn.init.ones_(module.scale)
            nn.init.normal_(module.lift.weight, 7.0, self.spread)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 8.0, self.spread)
            nn.init.normal_(module.bias, 9.0, self.spread)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return self.lift(x) * self.scale


class FromAbove(nn.Module):
    """Children and grandchildren are filled by calls for modules above them, as T5's and CLIP's are."""

    def __init__(self, spread: float = 0.1) -> None:
        super().__init__()
        self.spread = spread
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Feed()) for _ in range(4))
        self.inner = Inner(spread)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, FromAbove):
            module.shared.weight.data.normal_(mean=1.0, std=self.spread)
            nn.init.normal_(module.head.weight, 2.0, self.spread)
        elif isinstance(module, nn.Sequential):
            module[0].q.weight.data.normal_(mean=3.0, std=self.spread)
        elif isinstance(module, Attention):
            nn.init.normal_(module.o.weight, 4.0, self.spread)
        elif isinstance(module, Feed):
            for linear in (module.up, module.down):
                nn.init.normal_(linear.weight, 5.0, self.spread)
            module.places.copy_(torch.arange(3.0))
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(6.0)
            module.bias.data.zero_()
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.shared(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.inner(torch.tanh(hidden)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def built(model: Callable[[], nn.Module] = FromAbove, **given: Any) -> Callable[[], nn.Module]:
    return without_values(model, **given)


def filled(model: Callable[[], nn.Module], **given: Any) -> nn.Module:
    """As it is after `shoal.initialize`."""
    with ONE_AT_A_TIME:
        return engine_of(with_model(task(0), built(model, **given)), AloneLink(), Faults([])).module


@holds("Tensors that one call of an init touches")
def test_what_is_filled_from_above_is_filled_as_in_a_model_built_with_values() -> None:
    made, right = filled(lambda: FromAbove(0.0)).state_dict(), FromAbove(0.0).state_dict()
    right |= {f"inner.lift.{name}": torch.full_like(made[f"inner.lift.{name}"], value)
              for name, value in (("weight", 7.0), ("bias", 9.0))}  # fmt: skip
    assert made.keys() == right.keys()
    assert [name for name in made if not torch.equal(made[name], right[name])] == []


def walk(module: nn.Module) -> None:
    """An init that fills all that is in a module, whatever it is asked for."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.normal_(parameter, 1.0, 0.1)


@rule(
    "Tensors that one call of an init touches are made together, by all calls that touch any of them, in the "
    "order of `apply`: what else a worker makes changes no value",
    "A step",
    broken_by=Edit(
        "shoal.first_values.inits", "            parent[top(other)] = top(first)\n", "            top(other)\n"
    ),
)
@pytest.mark.parametrize(
    "model", [built(FromAbove), built(Layers, init=walk)], ids=["from above", "an init that walks"]
)
@pytest.mark.parametrize(
    ("stage", "workers"),
    shortened([(1, "a"), (2, "a"), (3, "a"), (2, "ab"), (3, "ab"), (3, "abcd")], (3, "abcd")),
)
def test_every_stage_and_world_begins_with_the_same_values(
    model: Callable[[], nn.Module], stage: int, workers: str
) -> None:
    with Crew(workers, with_model(task(stage, mirrors=len(workers) // 3), model)) as crew:
        if len(workers) > 2:
            crew.plant("b", 2, "gather")
        assert crew.finish() == reference(with_model(task(0), model))


def test_an_init_is_asked_for_every_module_in_the_order_of_apply() -> None:
    def note(module: nn.Module) -> None:
        asked.append(type(module).__name__)

    asked: list[str] = []
    Layers().apply(note)
    right, asked = asked, []
    places = built(Layers, init=note)()
    with pytest.raises(UserError, match="nothing fills them: places of Layers"):
        deferred_values(places, 0, {id(parameter): 0 for parameter in places.parameters()})
    assert asked == right


def test_an_init_that_goes_on_from_what_a_constructor_leaves_finds_it() -> None:
    def halve(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(300, 300), nn.Linear(300, 300)])

    weight = filled(Plain, init=halve).layers[1].weight.detach()
    bound = 0.5 * 300**-0.5
    assert weight.abs().max() <= bound < weight.abs().max() * 1.01


def test_constants_of_constructors_are_kept_where_nothing_else_is_written() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.rate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.5))
            self.register_buffer("places", torch.arange(4))
            self.written = nn.Parameter(torch.zeros(3))
            nn.init.normal_(self.written)
            self.set = nn.Parameter(torch.zeros(3))
            self.set.data[0] = 1.0

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Own(), Own()])

        def _init_weights(self, module: nn.Module) -> None:
            if self.whole and isinstance(module, Own):
                for one in (module.written, module.set):
                    nn.init.constant_(one, 7.0)

    Kept.whole = True
    kept = filled(Kept).layers[1]
    assert kept.scale.tolist() == [1, 1, 1] and kept.rate.item() == 2.5 and kept.places.tolist() == [0, 1, 2, 3]
    Kept.whole = False
    with pytest.raises(UserError, match=r'nothing fills them: written, set of Own "layers\.0"'):
        filled(Kept)


class Pairs(nn.Module):
    """Every tensor has a constructor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))


def test_what_an_init_writes_to_may_not_depend_on_values() -> None:
    def hidden(module: nn.Module) -> None:
        if isinstance(module, nn.Sequential):
            nn.init.zeros_(module[1].weight)
            if module[1].weight.device.type != "meta":
                nn.init.zeros_(module[0].q.weight)

    with pytest.raises(UserError, match=r'Sequential\) .* wrote to "layers\.0\.0\.q\.weight", and did not when it was'):
        filled(Pairs, init=hidden)


@pytest.mark.parametrize("init", [nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.sparse_, nn.init.dirac_])
def test_an_init_that_leaves_tensors_without_values_alone_fills_those_with_values(init: Callable[..., Tensor]) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Conv1d):
            init(module.weight.squeeze(2) if init is nn.init.sparse_ else module.weight, *given)

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(8, 8, 1, bias=False) for _ in range(2))

    given = (0.5,) if init is nn.init.sparse_ else ()
    weight = filled(Convolved, init=fill).layers[0].weight.detach().squeeze(2)
    if init is nn.init.orthogonal_:
        assert torch.dist(weight @ weight.t(), torch.eye(8)) < 1e-5
    elif init is nn.init.trunc_normal_:
        assert 1 < weight.abs().max() <= 2  # far beyond a constructor's values
    elif init is nn.init.sparse_:
        assert (weight == 0).sum() == 32
    else:
        assert torch.equal(weight, torch.eye(8))


def test_an_init_that_cannot_do_without_values_is_run_with_them() -> None:
    def normed(module: nn.Module) -> None:
        if isinstance(module, Attention):
            nn.init.normal_(module.q.weight)
            module.q.weight.div_(module.q.weight.norm().item())

    for layer in filled(Pairs, init=normed).layers:
        assert layer[0].q.weight.detach().norm().item() == pytest.approx(1.0)


def test_an_init_that_reaches_into_many_units_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def truncated(module: nn.Module) -> None:
        if isinstance(module, Layers):
            nn.init.trunc_normal_(module.places)

    for init, named in ((walk, ["Layers"]), (None, []), (truncated, [])):
        capsys.readouterr()
        model = built(FromAbove if init is None else Layers, init=init)()
        deferred_values(model, 0, unit_numbers(model))
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [line["module"] for line in lines if line["event"] == "initialised_together"] == named


def test_a_checksum_of_many_tensors_is_one_that_a_message_can_carry() -> None:
    many = [torch.full((8,), float(number)) for number in range(6_000)]
    torch.zeros(1, dtype=torch.int64)[0] = checksum_of(many)
    assert checksum_of(many) != checksum_of(many[::-1]) and checksum_of([]) != 0


# ---- memory


class Wide(nn.Module):
    """Eight units of a megabyte each, filled from above, embeddings and head by one call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 256)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)) for _ in range(8))
        self.head = nn.Linear(256, 512)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Sequential):
            for part in module:
                nn.init.normal_(part.weight)
                nn.init.zeros_(part.bias)
        if isinstance(module, Wide):
            nn.init.normal_(module.embedding.weight)
            nn.init.normal_(module.head.weight)


def test_what_one_call_fills_is_made_together_and_nothing_else_is() -> None:
    def begin() -> None:
        with shoal.deferred():
            model = Wide()
        limits = Limits(4, 0.0, 1, peers_on_host=False)
        state = TrainingState(model, torch.optim.AdamW(model.parameters()), None, limits, residency_of(3))
        state.begin_anew(Runs([(0, state.layout.blocks // 4)]))
        kept.append(state.held.home.state_bytes() + state.weights.bytes)

    kept: list[int] = []
    unit = 4 * 2 * 256 * 512
    most = most_bytes(begin)
    assert kept[0] <= most <= kept[0] + 1.1 * unit


# ---- weights from files


def test_weights_are_known_by_their_names_in_the_part_that_was_built_with_them(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model, self.bias = inner, nn.Parameter(torch.zeros(1))

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
            loss: Tensor = self.model(tokens, targets) + self.bias.sum()
            return loss

    torch.manual_seed(3)
    eager = FromAbove()
    save_file(eager.state_dict(), tmp_path / "a.safetensors")

    def eagerly() -> nn.Module:
        model = FromAbove()
        model.load_state_dict(eager.state_dict())
        return Wrapped(model)

    right = undisturbed(with_model(task(0), eagerly))
    wrapped = with_model(task(), lambda: Wrapped(built(weights=tmp_path)()))
    with Crew("ab", wrapped) as crew:
        assert crew.finish() == right


def test_weights_of_a_models_body_are_those_of_the_body_and_the_other_way_round(tmp_path: Path) -> None:
    class Body(nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    class WithHead(nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), nn.Linear(3, 3)

    for saved, model in ((Body, WithHead), (WithHead, Body)):
        content = saved().state_dict()
        save_file(content, tmp_path / "a.safetensors")
        made = filled(model, weights=tmp_path / "a.safetensors").state_dict()
        assert torch.equal(*(one[next(n for n in one if n.endswith("layers.1.weight"))] for one in (made, content)))


@rule(
    "A worker that reads weights with another content than the job's is refused before it trains",
    "A step",
    broken_by=Edit(
        "shoal.first_values.pretrained",
        "                total.update(sample.contiguous().view(torch.uint8).numpy().tobytes())\n",
        "                assert sample is not None\n",
    ),
)
def test_a_worker_whose_weights_have_another_content_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(3)
    content = FromAbove().state_dict()
    save_file(content, tmp_path / "a.safetensors")
    save_file(content, tmp_path / "same.safetensors")
    content["inner.lift.weight"].add_(1e-3)
    save_file(content, tmp_path / "b.safetensors")
    digests = {name: Pretrained(tmp_path / f"{name}.safetensors").identity() for name in ("a", "same", "b")}
    assert digests["a"] == digests["same"] != digests["b"]
    one, other = (with_model(task(), built(weights=tmp_path / f"{name}.safetensors")) for name in ("a", "b"))
    with Crew("ab", one, odd={"b": other}) as crew:
        crew.until("a refusal", lambda: bool(crew.workers["b"].failure))
        assert "content of the weights that shoal.deferred() reads is " in crew.workers["b"].failure
