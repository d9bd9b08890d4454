"""Units that are compiled each, in stage 3: changes of the world compile nothing again, and change no bit. And a whole
model that is compiled late, in stage 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import shoal.blocks.unit_flats
import torch
from crew import Crew, Task, undisturbed
from shoal.blocks.released import Arriving
from shoal.training.engine import Engine
from tiers import check
from torch import Tensor, nn
from torch import compile as imported_compile
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

pytestmark = check("compiles")

WIDTH = 32


class Layer(nn.Module):
    """As a transformer's: what compilers like."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def compile_layers(engine: Engine) -> None:
    for layer in engine.module.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")


def graphs() -> int:
    """Of this process until now: workers are threads of one here, so of all of them."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_loss_and_a_join_compile_nothing_again_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many graphs as one worker's, whichever unit, worker and world they are for: one for each stretch between two
    modules with parameters, where a unit may be gathered.
    """
    monkeypatch.setattr(shoal.blocks.unit_flats, "POISON", True)
    options: dict[str, Any] = {"max_steps": 6, "stage": 3, "mirrors": 1}
    task = Task(options, model=Stack, prepare=compile_layers)
    torch.compiler.reset()
    counters.clear()
    with Crew("abc", task) as crew:
        crew.train_to(1)
        before = graphs()
        crew.plant("b", 3, "backward")
        crew.train_to(4)
        crew.add("d")
        fingerprint = crew.finish()
    after = graphs()
    torch.compiler.reset()
    counters.clear()
    with Crew("a", task) as crew:
        assert crew.finish() == fingerprint == undisturbed(Task(options, model=Stack))
    assert before == after == graphs() > 0
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_only_what_modules_do_is_traced_and_nothing_that_is_done_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Shoal's own, and of Python's that it calls, a compiler would walk over what other threads change."""
    traced: set[str] = set()
    trace = convert_frame.trace_frame

    def recording(code: CodeType, *rest: Any, **named: Any) -> Any:
        traced.add(code.co_filename)
        return trace(code, *rest, **named)

    monkeypatch.setattr(convert_frame, "trace_frame", recording)
    torch.compiler.reset()
    options: dict[str, Any] = {"max_steps": 2, "stage": 3, "mirrors": 1}
    with Crew("ab", Task(options, model=Stack, prepare=compile_layers)) as crew:
        crew.finish()
    assert traced == {__file__}
    torch.compiler.reset()


def compile_by_method(module: nn.Module) -> None:
    module.compile(backend="aot_eager")


def compile_by_name(module: nn.Module) -> None:
    """As a script that began with `from torch import compile`."""
    module._compiled_call_impl = imported_compile(module._call_impl, backend="aot_eager")


@pytest.mark.parametrize("compile_it", [compile_by_method, compile_by_name])
@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:The .grad attribute")  # other engines have hooks
def test_a_model_that_is_first_compiled_while_parameters_are_coming_has_all_of_them_then(
    compile_it: Callable[[nn.Module], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would trace how they come, which happens once; it ends with a SpeculationLogDivergence."""
    late: list[int] = []
    torch.compiler.reset()
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 0)  # nothing was compiled in this process

    def coming(engine: Engine) -> int:
        return sum(isinstance(one, Arriving) for one in engine.module.parameters())

    def compile_late(engine: Engine) -> None:
        if engine.global_step == 2 and engine.module._compiled_call_impl is None:
            late.append(coming(engine))
            compile_it(engine.module)
            assert not coming(engine)
        elif engine.global_step > 2:
            assert not coming(engine), "compiled code reads past their class"

    task = Task({"max_steps": 5, "stage": 1, "mirrors": 1}, model=Stack, in_loop=compile_late)
    with Crew("abc", task) as crew:
        crew.plant("c", 4, "vote")
        assert crew.finish() == undisturbed(Task({"max_steps": 5, "stage": 1}, model=Stack))
    assert max(late) > 0
    torch.compiler.reset()
