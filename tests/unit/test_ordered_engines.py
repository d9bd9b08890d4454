"""Steps whose order of messages is known go by it, and say nothing over the host: whole engines on a strict wire."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from crew import Task, undisturbed
from integration.scripts import Adapted, Model
from late_device import LateDevice
from ordered_crew import OrderedCrew
from rule import Edit, rule
from shoal.exchange.traffic import LATE_UNIT
from shoal.group.learnt_order import LearntOrder, OutOfOrder, Post, PostPlace
from shoal.process.device import HOST
from shoal.training.engine import Engine
from tiers import check
from torch import Tensor

pytestmark = check("runs whole engines on a wire of the tests")


def late(options: dict[str, Any], **more: Any) -> Task:
    return Task({"max_steps": 8, **options}, device=LateDevice, **more)


def right(task: Task, in_loop: Callable[[Engine], None] = lambda _: None) -> str:
    return undisturbed(replace(task, device=lambda: HOST, in_loop=in_loop))


KNOWN_FROM = 4
"""The step from which the order of a world's steps is known: the first one is like no other, and two others must be
alike.
"""


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ("ab", {"stage": 1}), ("abc", {"stage": 0}), ("abc", {"stage": 1}), ("abc", {"stage": 2}),
        ("abc", {"stage": 3}), ("ab", {"stage": 3, "micro_batches_per_lane": 2}),
    ],
)  # fmt: skip
def test_a_steady_step_says_nothing_over_the_host(names: str, more: dict[str, Any]) -> None:
    task = late({**more, "lanes": 4})
    with OrderedCrew(names, task) as crew:
        assert crew.finish() == right(task)
        for asked in crew.asked.values():
            assert asked[KNOWN_FROM - 1]
            assert not any(asked[step] for step in range(KNOWN_FROM, 9))


@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_asks_says_no_more_over_the_host_than_one_message_for_each_that_is_carried(stage: int) -> None:
    """Of a member: what it has posted, at most each by itself, and the units that it lacks. Of rank 0: what the others
    carry, at most each by itself.
    """
    task = late({"stage": stage, "lanes": 4, "max_steps": KNOWN_FROM - 1}, model=lambda: Adapted(0.1, True))
    with OrderedCrew("abc", task) as crew:
        assert crew.finish() == right(task)
        asked = [crew.messages[name] for name in "abc"]
        (wire,) = crew.carrying.values()
        posts = Counter(way[0] if kind == "send" else way[1] for kind, way in wire.posts)
        units = posts if stage == 3 else Counter[int]()
    assert all(0 < asked[rank] <= posts[rank] + units[rank] for rank in (1, 2)), (asked, posts)
    assert 0 < asked[0] <= posts[1] + posts[2] + units[0], (asked, posts)


@pytest.mark.parametrize(
    ("stage", "point"),
    [(1, "exchange"), (1, "mirror"), (1, "in_vote"), (1, "hand_out"), (2, "backward"), (2, "exchange"), (3, "gather"),
     (3, "backward"), (3, "vote"), (3, "optimizer")],
)  # fmt: skip
def test_a_loss_in_a_step_whose_order_is_known_changes_no_bit(stage: int, point: str) -> None:
    task = late({"stage": stage, "max_steps": 12})
    with OrderedCrew("abc", task) as crew:
        crew.train_to(KNOWN_FROM)
        crew.plant("b", KNOWN_FROM + 1, point)
        crew.train_to(8)
        crew.add("d")
        assert crew.finish() == right(task)
        assert all(trust.holds for trust in crew.trust.values())


class Routes(Adapted):
    """Of whose units a forward uses some, in an order of their own."""

    way = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, way = self.embedding(tokens), Random(self.way)
        for adapter in way.sample(list(self.adapters), way.randint(1, len(self.adapters))):
            hidden = adapter(hidden)
        return Model.forward(self, tokens, targets) + 0.1 * hidden.square().mean()


def turn(engine: Engine) -> None:
    """Each lane goes a way of its own, and another one every sixth step."""
    loop = engine.context.loop
    engine.module.way = 100 * (engine.global_step // 6) + (0 if loop.is_warming_up else loop.lane)


def wander(seed: int) -> Callable[[Engine], None]:
    """In some steps all members look at parameters, or evaluate."""

    def look(engine: Engine) -> None:
        turn(engine)
        way = Random(seed * 100 + engine.global_step).random()
        if way < 0.2:
            with engine.gathered(), torch.no_grad():
                assert all(bool(one.isfinite().all()) for one in engine.module.parameters())
        elif way < 0.4:
            with engine.evaluating():
                for batch in engine.shard([{"tokens": torch.arange(16), "targets": torch.arange(16)}] * 8):
                    engine.report(loss=engine.module(**batch))

    return look


@rule(
    "A unit that goes to another member unasked is as of the boundary at which that member stands",
    "Devices",
    broken_by=Edit(
        "shoal.group.ordered",
        "            self._answers = None\n            self._left",
        "            self._left",
    ),
)
@pytest.mark.parametrize("seed", range(2))
def test_units_that_are_gathered_in_ever_other_ways_change_no_bit(seed: int) -> None:
    shoal = {"activation_checkpointing": ["Adapter"]} if seed % 2 else {}
    task = late({"stage": 3, "max_steps": 18, "shoal": shoal}, model=lambda: Routes(0.1, True), in_loop=wander(seed))
    with OrderedCrew("abc", task) as crew:
        crew.train_to(12)
        crew.kill("b")
        crew.train_to(13)
        crew.add("d")
        assert crew.finish() == right(task, turn)
        assert all(trust.holds for trust in crew.trust.values())
        late_ones = [way for wire in crew.wires.values() for kind, way in wire.posts if way[2] == LATE_UNIT]
        assert late_ones, "the order was never known, or no unit ever came otherwise"


def test_members_that_take_other_ways_for_ever_always_ask_and_say_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    def turn_always(engine: Engine) -> None:
        loop = engine.context.loop
        engine.module.way = 100 * engine.global_step + (0 if loop.is_warming_up else loop.lane)

    task = late({"stage": 3, "max_steps": 12}, model=lambda: Routes(0.1, True), in_loop=turn_always)
    with OrderedCrew("abc", task) as crew:
        assert crew.finish() == right(task, turn_always)
        assert all(asked[step] for asked in crew.asked.values() for step in range(1, 13))
        layout = crew.workers["a"].engine.context.state.held_layout
        units = {slot.parameter.unit for bucket in layout.buckets for slot in bucket.slots}
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "order_of_units_differs" in line]
    assert len(lines) == 3, "each member says it once, though its ways differ in seven more steps"
    assert all(line["level"] == "info" and line["unit"] in range(len(units)) for line in lines)


def test_an_evaluation_now_and_then_costs_the_steps_after_it_their_order_and_no_more() -> None:
    def look(engine: Engine) -> None:
        if engine.global_step == 6:
            with engine.evaluating():
                for batch in engine.shard([{"tokens": torch.arange(16), "targets": torch.arange(16)}] * 8):
                    engine.report(loss=engine.module(**batch))

    task = late({"stage": 3, "max_steps": 12}, model=lambda: Adapted(0.1, True), in_loop=look)
    with OrderedCrew("abc", task) as crew:
        assert crew.finish() == right(task)
        assert all(trust.holds for trust in crew.trust.values())
        for asked in crew.asked.values():
            assert not any(asked[step] for step in (4, 5, 6, 10, 11, 12))
        assert all(any(asked[step] for asked in crew.asked.values()) for step in (7, 8, 9))


def test_a_message_out_of_order_ends_the_world_and_the_next_ones_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[Post] = []

    def on_post(self: LearntOrder, post: Post, size: int) -> PostPlace:
        if self.repeats and not broken:
            broken.append(post)
            raise OutOfOrder("the test says so", post.peer)
        return real(self, post, size)

    real = LearntOrder.on_post
    monkeypatch.setattr(LearntOrder, "on_post", on_post)
    task = late({"stage": 1, "max_steps": 12})
    with OrderedCrew("abc", task) as crew:
        assert crew.finish() == right(task)
        assert broken and [trust.holds for trust in crew.trust.values()].count(False) == 1
        assert any(asked[12] for asked in crew.asked.values()), "nothing is tried again"
