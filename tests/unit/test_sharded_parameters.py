"""Stage 3: the same bits as stage 0 whatever a model does with its parameters, through losses anywhere, joins, saves.

What is freed is NaN first, and so is memory before anything comes into it: whatever is read too early or too late is
a wrong bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import shoal.blocks.sharded_memory
import shoal.blocks.unit_flats
from crew import Crew, Task, undisturbed
from hard_units import LANES, STEPS, WIDTH, Layer, Layers, and_train, of, task
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from integration.scripts import VOCABULARY
from matrices import examples, shortened
from random_modules import PRECISIONS, RandomModel
from random_modules import optimizer_of as optimizer_of_random
from reference import reference
from rule import Edit, holds, rule
from shoal.blocks.released import Released
from shoal.blocks.unit_flats import Presence, Unit
from shoal.training.engine import Engine
from shoal.training.gathered_units import GatheredUnits
from shoal.training.sharded_parameters import ShardedParameters
from shoal_protos.acts import DrainWorker
from torch import Tensor, nn


@pytest.fixture(autouse=True, params=["seen", "copied"])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are seen in their owners' memory, as on one host, or copied, as between hosts."""
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    if request.param == "copied":
        monkeypatch.setattr(shoal.blocks.sharded_memory, "can_lie_in_pages", lambda _: False)


@rule(
    "A request for a unit names the vote that it is as of: one for a vote to which the owner has not come waits "
    "there, and nobody votes while a unit is on its way to it",
    "A step",
    broken_by=[
        Edit(
            "shoal.exchange.unit_fetch",
            "        if key > self._key:\n"
            "            self._early.append((key, peer, unit))\n"
            "        elif key == self._key:\n",
            "        if key[1] >= 0 <= self._key[1]:\n",
        ),
        Edit(
            "shoal.training.sharded_parameters",
            "    def before_vote(self) -> None:\n        self.units.settle()\n        self.units.free_all()\n",
            "    def before_vote(self) -> None:\n",
        ),
    ],
)
@rule(
    "What autograd has saved of a unit brings the unit back before it is read, and a unit with receives in "
    "flight is not freed in a group that is open",
    "A step",
    broken_by=[
        Edit(
            "shoal.training.sharded_parameters",
            "        unit, saved = packed\n        self._get(unit)\n",
            "        unit, saved = packed\n",
        ),
        Edit(
            "shoal.training.gathered_units",
            "        if unit.presence is Presence.HERE:\n            self.watch",
            "        if unit.presence is not Presence.OUT:\n            self.watch",
        ),
    ],
)
@pytest.mark.parametrize(
    "precision",
    shortened(
        [{}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "auto_cast": True}}],
        {"bf16": {"enabled": True, "auto_cast": True}},
    ),
)
@pytest.mark.parametrize(
    ("workers", "mirrors"), shortened([("a", 0), ("ab", 0), ("abc", 1), ("abcd", 2)], ("a", 0), ("abcd", 2))
)
def test_every_world_ends_as_one_worker_in_stage_0(precision: dict[str, Any], workers: str, mirrors: int) -> None:
    precision = precision and {"precision": precision}
    with Crew(workers, of(task(mirrors=mirrors, **precision))) as crew:
        crew.train_to(2)
        crew.add("e")
        assert crew.finish() == reference(of(task(0, **precision)))


@pytest.mark.parametrize(
    "point",
    shortened(
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
        "backward",
        "mirror",
        "hand_out",
    ),
)
def test_a_loss_anywhere_in_a_step_changes_no_bit(point: str) -> None:
    with Crew("abc", of(task())) as crew:
        crew.plant("c", 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == reference(of(task(0)))


@holds("What autograd has saved of a unit")
@pytest.mark.parametrize("gathers", shortened(range(0, 40, 3), 3, 27))
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
        assert crew.finish() == reference(of(task(0)))


@rule(
    "A forward that loses a peer takes part in the change and runs again in its outermost call; no `except "
    "Exception` of a model stops that",
    "A step",
    broken_by=[
        Edit(
            "shoal.training.sharded_parameters",
            "            except WorldChanged:\n                self._end_call()\n",
            "            except ZeroDivisionError:\n                self._end_call()\n",
        ),
        Edit("shoal.group.group", "class WorldChanged(BaseException):", "class WorldChanged(Exception):"),
    ],
)
def test_a_forward_that_loses_a_peer_runs_again_by_itself() -> None:
    """The script sees one call that takes longer."""
    calls: list[int] = []

    def count(engine: Engine, batch: Any) -> None:
        calls.append(1)
        engine.backward(engine.module(**batch))
        engine.step()

    with Crew("abc", of(task(body=count))) as crew:
        crew.plant("c", 3, "gather")
        assert crew.finish() == reference(of(task(0)))
    assert len(calls) <= LANES * (STEPS + 2)


@holds("A request for a unit names")
def test_an_owner_that_is_behind_answers_when_it_has_come_so_far() -> None:
    """One worker goes on to the next forward while another has not made the update yet."""

    def hold(worker: Any, point: str, step: int) -> None:
        if (worker.name, point) == ("b", "optimizer") and step < STEPS:
            worker.wait(lambda: crew.workers["a"].engine.global_step >= step)

    with Crew("ab", of(task(mirrors=0))) as crew:
        crew.watchers.append(hold)
        assert crew.finish() == reference(of(task(0)))


def test_two_losses_one_during_the_recovery_from_the_other() -> None:
    with Crew("abcd", of(task(mirrors=2))) as crew:
        crew.plant("d", 3, "gather")
        crew.plant("c", 3, "promote")
        assert crew.finish() == reference(of(task(0)))


def test_a_drained_worker_takes_no_parameter_with_it() -> None:
    with Crew("abc", of(task(mirrors=0))) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        assert crew.finish() == reference(of(task(0)))


POINTS = ("forward", "gather", "backward", "vote", "fill", "begin")


@given(st.integers(0, 1 << 30), st.sampled_from(PRECISIONS), st.sampled_from(POINTS), st.data())
@settings(
    max_examples=examples(6), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)
def test_a_random_module_has_the_same_bits_in_stage_3_through_a_loss_and_a_join(
    number: int, precision: dict[str, Any], point: str, data: st.DataObject
) -> None:
    lanes, micro_batches = data.draw(st.integers(2, 5)), data.draw(st.sampled_from([1, 1, 2]))
    names = "abcd"[: data.draw(st.integers(2, min(4, lanes)))]
    options = {"max_steps": 5, "lanes": lanes, "micro_batches_per_lane": micro_batches, "precision": precision}

    def of_stage(stage: int) -> Task:
        model, optimizer = (lambda: RandomModel(number, is_half=bool(precision))), optimizer_of_random(number)
        return Task({**options, "stage": stage}, model=model, optimizer=optimizer)

    right = reference(of_stage(0))
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
        assert all(isinstance(one, Released) for unit in parameters.units for one in unit.parameters)
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


def test_a_forward_gathers_no_unit_that_it_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes next is what came next here in the call before: the head's tied weight is no embedding."""
    begun: list[int] = []
    begin = GatheredUnits.begin

    def note(units: GatheredUnits, unit: Unit) -> None:
        if unit.presence is Presence.OUT:
            begun.append(unit.number)
        begin(units, unit)

    monkeypatch.setattr(GatheredUnits, "begin", note)
    seen: list[list[int]] = []

    def look(engine: Engine, batch: Any) -> None:
        begun.clear()
        loss = engine.module(**batch)
        if engine.global_step > 2:
            seen.append(list(begun))
        engine.backward(loss)
        engine.step()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    undisturbed(Task(**{**vars(of(task(mirrors=0, body=look))), "model": Tied}))
    assert seen and all(gathered == [0, 1, 2, 3, 0] for gathered in seen), seen
