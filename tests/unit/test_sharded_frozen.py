"""Frozen parameters where parameters are sharded (stage 3): in blocks as all others, without state, with equal bits.

What is freed is NaN first, as in test_sharded_parameters.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shoal
import shoal.blocks.unit_flats
import shoal.core.laying_out
import torch
from crew import Crew, Task, undisturbed
from hard_units import WIDTH, and_train, of, task
from integration.scripts import VOCABULARY
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from safetensors.torch import load_file
from shoal.blocks.loaded_state import WEIGHTS
from shoal.blocks.unit_flats import Presence
from shoal.blocks.update_place import BesideParameters
from shoal.core.laying_out import lay_out
from shoal.core.layout import FROZEN, Trainable
from shoal.training.engine import Engine
from shoal.training.sharded_parameters import ShardedParameters
from shoal_protos.acts import DrainWorker
from shoal_protos.errors import UserError
from shoal_protos.runs import Runs
from tiers import check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = check("trains many small jobs")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)


class Adapted(nn.Module):
    """A frozen layer, with two small matrices beside it that are trained, or with none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 400).requires_grad_(False)
        self.back = nn.Linear(400, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.bfloat16), requires_grad=False)
        self.down, self.up = (nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)) if rank else (None, None)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        found = self.back(torch.tanh(self.base(self.norm(x + self.shift))))
        return x + (found if self.down is None else found + self.up(self.down(x)))


class Adapters(nn.Module):
    """Frozen embeddings, adapted layers, layers that are frozen whole; one is used twice, some are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(rank) for rank in (0, 2, 0, 0, 2, 0, 2, 0, 0, 0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.numbers = nn.Parameter(torch.arange(3), requires_grad=False)  # in no block: it cannot be added up

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.embedding(tokens)
        for layer in self.layers[:5]:
            hidden = layer(hidden)
        hidden = checkpoint(lambda x: self.layers[6](self.layers[5](x)), hidden, use_reentrant=False)
        for layer in [*self.layers[7:], self.layers[3]]:
            hidden = layer(hidden)
        hidden = hidden * self.layers[2].norm.weight.detach().norm() * self.numbers[1]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def adapters(stage: int = 3, model: Any = Adapters, **more: Any) -> Task:
    return Task(**{**vars(of(task(stage, **more))), "model": model})


@rule(
    "Frozen blocks count in no sum, norm or fingerprint: all of that goes by the numbers without them, which are "
    "the same in every stage",
    "A step",
    broken_by=Edit(
        "shoal.core.layout",
        "        numbers, spans = self._frozen_blocks, list[Span]()\n",
        "        return runs\n        numbers, spans = self._frozen_blocks, list[Span]()\n",
    ),
)
@rule(
    "A backward frees a unit with frozen parameters when no node still to run has saved anything of it: no "
    "gradient tells",
    "A step",
    broken_by=Edit(
        "shoal.training.gathered_units",
        "            if unit.has_frozen and not is_needed and not self.is_awaited(unit):\n",
        "            if unit.has_frozen and not is_needed and not self.is_awaited(unit) and False:\n",
    ),
)
@pytest.mark.parametrize(
    "more",
    shortened(
        [{}, {"precision": {"bf16": {"enabled": True}}}, {"gradient_clipping": 0.1}, {"micro_batches_per_lane": 2}],
        {"precision": {"bf16": {"enabled": True}}},
    ),
)
@pytest.mark.parametrize(("workers", "mirrors"), shortened([("a", 0), ("ab", 0), ("abcd", 1)], ("abcd", 1)))
def test_every_world_ends_as_one_worker_in_stage_0(more: dict[str, Any], workers: str, mirrors: int) -> None:
    with Crew(workers, adapters(mirrors=mirrors, **more)) as crew:
        crew.train_to(2)
        crew.add("e")
        assert crew.finish() == reference(adapters(0, **more))


@pytest.mark.parametrize(
    "point",
    shortened(
        ["forward", "gather", "backward", "mirror", "fill", "vote", "hand_out", "prepare"],
        "gather",
        "mirror",
    ),
)
def test_a_loss_anywhere_changes_no_bit(point: str) -> None:
    with Crew("abc", adapters()) as crew:
        crew.plant("c", 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == reference(adapters(0))


def test_blocks_of_a_large_frozen_part_are_larger_than_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shoal.core.laying_out, "MOST_FROZEN_BLOCKS", 16)
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    sizes: set[int] = set()

    def note(engine: Engine) -> None:
        sizes.update(bucket.block_elements for bucket in engine.context.state.held_layout.buckets)

    with Crew("abc", adapters(prepare=note, shoal=place, max_steps=4)) as crew:
        crew.plant("c", 3, "gather")
        crew.train_to(2)
        crew.add("d")
        crew.finish()
    assert len(sizes) == 2
    with Crew("ab", adapters(shoal=place)) as crew:
        assert crew.finish() == undisturbed(adapters(0))


def test_a_script_that_writes_to_them_is_refused_as_for_others() -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        with engine.gathered(engine.module.layers[0]), torch.no_grad():
            engine.module.layers[0].base.weight.mul_(2)
        engine.backward(loss)
        engine.step()

    with pytest.raises(UserError, match=r'parameter "layers\.0\.base\.weight" was changed by the script'):
        undisturbed(adapters(body=body))


def test_a_drained_worker_takes_no_frozen_parameter_with_it() -> None:
    with Crew("abc", adapters(mirrors=0)) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        assert crew.finish() == reference(adapters(0))


@pytest.mark.parametrize(("first", "then"), [(3, 0), (0, 3), (3, 3)])
def test_a_checkpoint_has_them_once_and_goes_on_in_any_stage(first: int, then: int, tmp_path: Path) -> None:
    """What the script has frozen there is another thing in the second run: the checkpoint's values count."""

    class Other(Adapters):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data.mul_(2)

    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 1}}
    with Crew("abc", adapters(first, shoal=place, max_steps=3)) as crew:
        crew.finish()
    files = list(tmp_path.glob("frozen-*"))
    frozen = {name: one for name, one in Adapters().named_parameters() if not one.requires_grad}
    assert len(files) == 1 and load_file(files[0]).keys() == frozen.keys()
    with Crew("ab", adapters(then, Other, shoal=place)) as crew:
        assert crew.finish() == reference(adapters(0))
    assert list(tmp_path.glob("frozen-*")) == files


def test_a_loss_while_the_first_save_reads_them_costs_that_save_alone(tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}
    with Crew("abc", adapters(shoal=place, mirrors=1)) as crew:
        crew.plant("c", 2, "save")
        assert crew.finish() == reference(adapters(0))
    with Crew("ab", adapters(0, shoal=place)) as crew:
        assert crew.finish() == reference(adapters(0))


def test_they_lie_in_files_as_little_as_in_the_optimizer(tmp_path: Path) -> None:
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with Crew("ab", adapters(**offload)) as crew:
        crew.plant("b", 3, "vote")
        crew.train_to(2)
        crew.add("c")
        assert crew.finish() == reference(adapters(0))


def test_an_export_and_a_deferred_model_have_them(tmp_path: Path) -> None:
    def shift(module: nn.Module) -> None:
        if isinstance(module, Adapted):
            module.shift.fill_(0.5)

    def built() -> nn.Module:
        with shoal.deferred(init=shift):
            model = Adapters()
        model.numbers = nn.Parameter(torch.arange(3), requires_grad=False)
        return model

    for stage in (0, 3):

        def export(engine: Engine, batch: Any, stage: int = stage) -> None:
            if engine.global_step == 3:
                engine.export(tmp_path / str(stage))
            and_train(engine, batch)

        with Crew("ab", adapters(stage, built, body=export)) as crew:
            crew.train_to(1)
            crew.add("c")
            crew.finish()
    whole, sharded = load_file(tmp_path / "0"), load_file(tmp_path / "3")
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[name], sharded[name]) for name in whole)


# ---- memory, numbers


@holds("A backward frees a unit with frozen parameters")
def test_a_worker_keeps_its_share_and_a_backward_gathers_few_units() -> None:
    most: list[int] = []
    shares: set[int] = set()

    def look(engine: Engine, batch: Any) -> None:
        parameters, weights = engine.parts.step.parameters, engine.context.state.weights
        assert isinstance(parameters, ShardedParameters)
        if not engine.warming_up:
            shares.add(weights.bytes)
            assert all(unit.presence is Presence.OUT for unit in parameters.units)
        loss = engine.module(**batch)
        here = lambda _: most.append(sum(unit.presence is not Presence.OUT for unit in parameters.units))  # noqa: E731
        if not engine.warming_up:
            loss.register_hook(here)
            for layer in engine.module.layers:
                if layer.down is not None:
                    layer.down.bias.register_hook(here)
        engine.backward(loss)
        engine.step()

    whole = sum(parameter.nbytes for parameter in Adapters().parameters())
    with Crew("abcd", adapters(mirrors=0, body=look)) as crew:
        crew.finish()
    assert most and max(most) <= 5  # of 12; one was touched out of turn, and is kept
    assert max(shares) < 0.45 * whole


class HalfBase(nn.Module):
    """A frozen base in bfloat16, and as much in float32 that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(self._base(), nn.Linear(256, 128, bias=False)) for _ in range(4))

    def _base(self) -> nn.Module:
        return nn.Linear(128, 256, bias=False).to(torch.bfloat16).requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.embedding(tokens)
        for base, layer in self.layers:
            hidden = hidden + layer(base(hidden.to(torch.bfloat16)).float())
        return nn.functional.cross_entropy(hidden, targets.flatten()[:1].expand(hidden.shape[0], 128) % 16)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_report_of_memory_counts_them_as_the_estimate_does(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    undisturbed(adapters(stage, HalfBase))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    report = next(line for line in lines if line["event"] == "memory")
    frozen = sum(one.nbytes for one in HalfBase().parameters() if not one.requires_grad)
    trained = sum(one.nbytes for one in HalfBase().parameters() if one.requires_grad)
    assert report["parameters"] == pytest.approx(frozen + trained, rel=0.02)
    assert report["measured_bytes"] == pytest.approx(report["estimated_bytes"], rel=0.02)


@holds("Frozen blocks count in no sum")
def test_blocks_of_what_is_trained_have_the_same_order_and_content_with_frozen_ones_and_without() -> None:
    trained = [Trainable(f"t{index}", (5_000 * (index + 1),), torch.float32, index % 2, index) for index in range(5)]
    frozen = [Trainable(f"f{index}", (90_000,), torch.bfloat16, FROZEN, index) for index in range(5)]
    both = [one for pair in zip(trained, frozen, strict=True) for one in pair]
    plain, full = lay_out(trained), lay_out(both)
    assert full.trained == plain and full.trained.digest() == plain.digest() and plain.trained is plain
    for start in range(0, full.blocks, 3):
        runs = Runs([(start, min(full.blocks, start + 7))])
        kept = [one for one in full.stretches(runs) if not full.buckets[one.bucket].is_frozen]
        assert plain.runs(kept) == full.trained_runs(runs)
        assert full.runs(kept) == full.without_frozen(runs)


def test_no_optimizer_is_asked_where_the_state_of_frozen_blocks_lies() -> None:
    class Asked(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise AssertionError("an update was tried")

    frozen = lay_out([Trainable("f", (5_000,), torch.float32, FROZEN, 0)])
    home = BesideParameters(replace(frozen, device=torch.device("meta")), Asked([torch.zeros(1)]))
    assert home.bring(frozen.buckets[0], {WEIGHTS: torch.ones(3)})[WEIGHTS].is_meta
