"""What the loop's body draws before the forward changes no bit, however the module is called."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from crew import Crew, Task, engine_of, undisturbed
from rule import Edit, holds, rule
from shoal.data.seeds import HOOK
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from torch import Tensor, nn

TASK = Task({"max_steps": 3, "dropout": 0.5})


class Plain(nn.Module):
    """Two parts that scripts may call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.drop(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_parts(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """As scripts do that have their own forward outside the module."""
    hidden = module.get_submodule("drop")(module.get_submodule("embedding")(tokens))
    logits = module.get_submodule("head")(hidden)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fingerprint(
    model: Callable[[], nn.Module], forward: Callable[..., Tensor], before: Callable[[Engine], object]
) -> str:
    """Of a small run in a world of one. `forward(module, **batch)`; `before(engine)` is the body's beginning."""
    task = Task({"max_steps": 2, "lanes": 2}, model=model)
    engine = engine_of(task, AloneLink(), Faults([]))
    for batch in engine:
        before(engine)
        engine.backward(forward(engine.module, **batch))
        engine.step()
    return str(engine.fingerprint())


def draw(_: Engine) -> None:
    torch.rand(3)
    random.random()
    numpy.random.rand()


def evaluate_by_hand(engine: Engine) -> None:
    """As scripts do that know nothing of `engine.evaluating`."""
    with torch.no_grad():
        engine.module(tokens=torch.randint(0, 256, (2, 4)), targets=torch.randint(0, 256, (2, 4)))


def call(module: nn.Module, **batch: Tensor) -> Tensor:
    return module(**batch)  # type: ignore[no-any-return]


@rule(
    "… and a third time, from a separate seed, when the micro-batch's first forward begins, however the module "
    "is called, so that what one worker's loop draws before it shifts nothing; not within `evaluating()`",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.data.seeds", '            seed_everything(self._seed, *self._place, purpose="forward")\n', ""
    ),
    after="torch, `random` and numpy are",
)
@pytest.mark.parametrize("before", [draw, evaluate_by_hand])
@pytest.mark.parametrize("forward", [call, by_parts])
def test_what_the_body_draws_before_the_forward_changes_no_bit(
    forward: Callable[..., Tensor], before: Callable[[Engine], object]
) -> None:
    assert fingerprint(Plain, forward, before) == fingerprint(Plain, forward, lambda _: None)


def test_a_forward_without_gradients_is_seeded_too() -> None:
    """As of a frozen backbone, or of a target network."""

    def forward(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = module.get_submodule("drop")(module.get_submodule("embedding")(tokens))
        return nn.functional.cross_entropy(module.get_submodule("head")(hidden).flatten(0, 1), targets.flatten())

    assert fingerprint(Plain, forward, draw) == fingerprint(Plain, forward, lambda _: None)


@holds("… and a third time, from a separate")
def test_draws_on_one_rank_alone_change_no_bit() -> None:
    task = Task(TASK.options, in_loop=lambda engine: draw(engine) if engine.rank == 0 else None)
    with Crew("abc", task) as crew:
        crew.train_to(1)
        crew.kill("b")
        assert crew.finish() == undisturbed(TASK)


def test_later_forwards_of_a_micro_batch_go_on_drawing() -> None:
    module = Plain()
    seen: list[bool] = []

    def twice(module: nn.Module, **batch: Tensor) -> Tensor:
        first, second = module(**batch), module(**batch)
        seen.append(torch.equal(first, second))
        return (first + second) / 2

    fingerprint(lambda: module, twice, lambda _: None)
    assert seen and not any(seen)


def test_the_hook_is_there_only_from_the_yield_to_the_forward() -> None:
    counted: list[int] = []

    def count(module: nn.Module) -> None:
        counted.append(sum(HOOK in part._forward_pre_hooks for part in module.modules()))

    class Looking(Plain):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            count(self)
            return super().forward(tokens, targets)

    def look(engine: Engine) -> None:
        count(engine.module)
        with engine.evaluating():
            count(engine.module)

    fingerprint(Looking, call, look)
    assert counted == [4, 0, 0] * 4


def test_a_module_can_be_copied_and_pickled_while_the_hook_is_there() -> None:
    copies: list[Any] = []

    def keep(engine: Engine) -> None:
        memory = io.BytesIO()
        torch.save(engine.module, memory)
        memory.seek(0)
        copies.extend([copy.deepcopy(engine.module), torch.load(memory, weights_only=False)])

    right = fingerprint(Plain, call, lambda _: None)
    assert fingerprint(Plain, call, keep) == right
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for kept in copies:
        kept.eval()(tokens=torch.zeros(1, 1, dtype=torch.long), targets=torch.zeros(1, 1, dtype=torch.long))
        assert torch.equal(torch.get_rng_state(), state), "a copy's forward is nobody's micro-batch"
        assert not any(HOOK in part._forward_pre_hooks for part in [kept])


@holds("… and a third time, from a separate")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("way", ["before", "after", "in place", "a function"])
def test_compiled_modules_are_seeded_before_their_graph(way: str) -> None:
    """Whole graphs, and no second compilation: the hook is called, not traced."""
    compiler: dict[str, Any] = {"backend": "eager", "fullgraph": way != "a function"}

    def run(before: Callable[[Engine], object]) -> str:
        torch.compiler.reset()
        calls: list[Any] = []

        def model() -> nn.Module:
            module = Plain()
            if way == "in place":
                module.compile(**compiler)
            calls.append(torch.compile(module, **compiler) if way in ("before", "after") else module)
            if way == "a function":
                calls.append(torch.compile(lambda **batch: module(**batch) * 1, **compiler))
            return calls[0] if way == "before" else module

        return fingerprint(model, lambda _, **batch: calls[-1](**batch), before)

    with torch._dynamo.config.patch(error_on_recompile=True):
        right = run(lambda _: None)
        assert run(draw) == right
    assert way == "a function" or run(evaluate_by_hand) == right
