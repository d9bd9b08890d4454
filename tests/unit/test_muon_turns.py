"""Turns of optimizers whose tensors are updated whole: those without a turn send nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from gan import Gan
from late_device import LateDevice
from memory_group import MemoryGroup
from ordered_crew import OrderedCrew
from rule import Edit, rule
from shoal.exchange.traffic import PARTS, RETURNED
from shoal.optim.several import several
from shoal.process.device import HOST, Device
from shoal.training.engine import Engine
from torch import Tensor, nn

TURNS = ("generator", "discriminator")


class Wide(Gan):
    """Whose matrices have several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 1))


def optimizers(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Gan)
    networks = dict(zip(TURNS, (model.generator, model.discriminator), strict=True))
    matrices = {name: [one for one in part.parameters() if one.dim() == 2] for name, part in networks.items()}
    rest = [one for one in model.parameters() if one.dim() == 1]
    return several(
        {name: torch.optim.Muon(of, 1e-2) for name, of in matrices.items()} | {"rest": torch.optim.AdamW(rest, 1e-3)}
    )


def both(model: Gan, real: Tensor) -> Tensor:
    return model.of_generator(real) + model.of_discriminator(real)


def gan(*turns: tuple[str, ...], device: Device = HOST, **options: Any) -> Task:
    """At each step those of one of these turns, one after the other."""

    def body(engine: Engine, batch: dict[str, Tensor]) -> None:
        engine.turn(*turns[engine.global_step % len(turns)], "rest")
        assert isinstance(engine.module, Gan)
        engine.backward(both(engine.module, batch["tokens"].float() / 255))
        engine.step()

    given = {"max_steps": 6, **options}
    return Task(given, Wide, optimizers, lambda _: None, body=body, device=lambda: device)


@pytest.mark.parametrize("tag", [PARTS, RETURNED])
def test_tensors_without_a_turn_are_in_no_message(tag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = Counter[str](), MemoryGroup.send

    def counted(self: MemoryGroup, tensor: Tensor, to: int, tag_of_it: int) -> Any:
        if tag_of_it == tag:
            sent.update(bytes=tensor.nbytes, messages=1)
        return send(self, tensor, to, tag_of_it)

    def of(*turn: str) -> Counter[str]:
        sent.clear()
        with Crew("abc", gan(turn, max_steps=2, mirrors=2)) as crew:
            crew.finish()
        return Counter(sent)

    monkeypatch.setattr(MemoryGroup, "send", counted)
    one, other, together = of("generator"), of("discriminator"), of(*TURNS)
    assert one["bytes"] and other["bytes"]
    assert one + other == together
    assert not of()


@rule(
    "Members agree on hyper-parameters before tensors are updated whole: one without lanes, whose body does not run, "
    "has the turns of the step at hand by then",
    "A step",
    broken_by=Edit(
        "shoal.training.step",
        "        take_over_where_no_body_runs(self._world, self._context.state.optimizer, self._context.state.modes)\n"
        "        norms = self._sums_of_squares()  # by whose turn it is\n"
        "        self._shape(norms)\n",
        "        norms = self._sums_of_squares()  # by whose turn it is\n"
        "        self._shape(norms)\n"
        "        take_over_where_no_body_runs(self._world, self._context.state.optimizer, self._context.state.modes)\n",
    ),
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bits_survive_a_death_and_a_join_in_turns_of_both(stage: int) -> None:
    turns = (("generator",), TURNS, (), ("discriminator",))
    with Crew("abc", gan(*turns, stage=stage, max_steps=9)) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "shape")
        crew.train_to(5)
        crew.add("d")
        assert crew.finish() == undisturbed(gan(*turns, max_steps=9))


@rule(
    "Members agree on turns before tensors without one are left out, so that those whose turns differ are refused by "
    "the vote and wait for nobody",
    "A step",
    broken_by=Edit(
        "shoal.exchange.shaping",
        "return turns if bool((rows == rows[0]).all()) else [False] * len(turns)",
        "return turns",
    ),
)
def test_a_member_whose_turn_differs_is_refused_in_a_sentence() -> None:
    with Crew("ab", gan(("generator",)), {"b": gan(("discriminator",))}) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert "turn of optimizer group 0 is " in crew.job.durable.reason


def test_a_wire_without_tags_learns_no_order_where_turns_may_change_messages() -> None:
    turns = [("generator",)] * 5 + [("discriminator",)]
    task = gan(*turns, max_steps=8, lanes=2)
    with OrderedCrew("ab", Task(**{**vars(task), "device": LateDevice})) as crew:
        assert crew.finish() == undisturbed(task)
        assert all(trust.holds for trust in crew.trust.values())
