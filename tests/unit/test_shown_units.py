"""Stage 3 on one host, where units are shown in their owners' memory: what scripts write, fork and send."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from crew import Crew, undisturbed
from hard_units import LANES, Layers, and_train, of, task, with_model
from reference import reference
from rule import holds
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from tiers import check
from torch import Tensor, nn
from weights_bytes import in_a_child, taken_bytes, windows

pytestmark = check("trains many small jobs")


def alone(body: Callable[[Engine, Any], None], model: type[Layers] = Layers) -> str:
    return undisturbed(with_model(task(mirrors=0, body=body), model))


def trained_halving(body: Callable[[Engine, Any, type[Layers]], None]) -> str:
    """With a model that halves a weight past autograd in the forward, when `is_on`."""

    class Halving(Layers):
        is_on = False

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
            if self.is_on:
                self.layers[2].up.weight.data.mul_(0.5)
            return super().forward(tokens, targets)

    return alone(lambda engine, batch: body(engine, batch, Halving), Halving)


@holds("Only the engine writes parameters")
def test_a_write_past_autograd_is_refused_in_the_step_in_which_it_is_made() -> None:
    steps: list[int] = []

    def body(engine: Engine, batch: Any, halving: type[Layers]) -> None:
        steps.append(engine.global_step)
        halving.is_on = engine.global_step == 3
        and_train(engine, batch)

    with pytest.raises(UserError, match=r'parameter "layers.2.up.weight" was changed by the script'):
        trained_halving(body)
    assert steps.count(3) == 1 and max(steps) == 3


def test_what_a_forward_writes_past_autograd_and_puts_back_is_no_change() -> None:
    class Putting(Layers):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
            weight = self.layers[2].up.weight.data
            before = weight.clone()
            weight.mul_(0.5)
            weight.copy_(before)
            return super().forward(tokens, targets)

    assert alone(and_train, Putting) == reference(of(task(0)))


@holds("Only the engine writes parameters")
@pytest.mark.parametrize("is_first", [True, False])
def test_what_an_evaluation_writes_past_autograd_is_gone_when_it_is_over(is_first: bool) -> None:
    def body(engine: Engine, batch: Any, halving: type[Layers]) -> None:
        if not is_first:
            and_train(engine, batch)
        if not engine.warming_up:
            halving.is_on = True
            with engine.evaluating():
                engine.module(**batch)
            halving.is_on = False
        if is_first:
            and_train(engine, batch)

    assert trained_halving(body) == reference(of(task(0)))


def test_a_forked_child_keeps_nothing_of_what_is_shown_and_uses_only_what_was_gathered() -> None:
    """A data loader's worker lives for long, and its parent may die before it."""
    found: list[str] = []

    def body(engine: Engine, batch: Any) -> None:
        module = engine.module
        if engine.global_step == 2:
            assert windows() > 1
            found.append(in_a_child(lambda: (windows(), taken_bytes())))
            found.append(in_a_child(lambda: module(**batch)))
            with engine.gathered():
                right = module(**batch).item()
                found.append(in_a_child(lambda: module(**batch).item() == right))
            loss = module(**batch)
            found.append(in_a_child(loss.backward))
            engine.backward(loss)
            engine.step()
            return
        and_train(engine, batch)

    class Same(Layers):
        """Without dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Identity()

    assert alone(body, Same) == undisturbed(with_model(task(0), Same))
    refused = 'UserError: .*"embedding.weight".* used in a process that was forked from a worker'
    patterns = [r"\(0, 0\)", refused, "True", "UserError: .* used in a process that was forked"]
    for seen, pattern in zip(found, patterns * LANES, strict=True):
        assert re.match(pattern, seen), seen


@pytest.mark.parametrize("is_seen", [True, False])
def test_parameters_that_were_sent_to_another_process_train_on(is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch moves the memory of what it sends into that of a file, beneath all views."""
    if not is_seen:
        monkeypatch.setattr("shoal.blocks.sharded_memory.can_lie_in_pages", lambda _: False)

    def body(engine: Engine, batch: Any) -> None:
        if engine.global_step == 2:
            with engine.gathered():
                for value in engine.module.state_dict().values():
                    value.share_memory_()
        and_train(engine, batch)

    with Crew("ab", of(task(body=body))) as crew:
        assert crew.finish() == reference(of(task(0)))
