"""Activation checkpointing from the config: less is kept for backward, and no bit changes, whatever a module does."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy
import pytest
import shoal
import shoal.deepspeed as deepspeed
import torch
from crew import Crew, Task, engine_of, undisturbed
from matrices import shortened
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training import activation_checkpointing
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from tiers import check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from waiting_inputs import note_waiting_inputs

pytestmark = check("compiles")

WIDTH = 32
LAYERS = 3
CALLS = LAYERS + 1
OPTIONS: dict[str, Any] = {"max_steps": 3, "lanes": 2}


class Layer(nn.Module):
    """Draws from every generator, and has buffers that its forward writes, reads and replaces."""

    forwards: ClassVar[list[bool]] = []
    """One entry each: whether it was with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("power", torch.ones(()))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("past", torch.ones(()))
        self.register_buffer("large", torch.ones(1 << 15))

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.forwards.append(torch.is_grad_enabled())
        with torch.no_grad():
            self.power.mul_(0.9).add_(hidden.mean())
            self.past.data.add_(self.power.abs())
            self.large[0] += 1
        self.count = self.count + 1
        drawn = hidden * (random.random() + float(numpy.random.rand()))
        up = self.drop(self.norm(torch.relu(self.up(drawn)).flatten(0, 1))).view_as(hidden)
        factor = self.power.clone() + self.count + self.past.clone() + self.large[0].clone()
        return hidden + up * factor * scale


class Stack(nn.Module):
    """Its first layer is called again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in (*self.layers, self.layers[0]):
            hidden = layer(hidden, scale=0.5)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Calm(nn.Module):
    """As a transformer's layer: what compilers like."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 64), nn.Dropout(0.3), nn.Linear(64, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.as_tensor(self.down(self.drop(torch.relu(self.up(hidden)))))


class CalmStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(*(Calm() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.head(self.layers(self.embedding(tokens))).flatten(0, 1), targets.flatten()
        )


class CallingStack(Stack):
    """Checkpoints its layers itself, as scripts for DeepSpeed do."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in (*self.layers, self.layers[0]):
            hidden = deepspeed.checkpointing.checkpoint(layer, hidden, scale=0.5)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def task(modules: Any, model: Callable[[], nn.Module] = Stack, **more: Any) -> Task:
    """A small run in which these modules are checkpointed."""
    return Task({**OPTIONS, "shoal": {"activation_checkpointing": modules}}, model=model, **more)


PLAIN = task([])


def engine(of: Task) -> Engine:
    return engine_of(of, AloneLink(), Faults([]))


@rule(
    "What activation checkpointing makes again in backward finds the random generators and the buffers as the "
    "first forward found them, and leaves them as they are then",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.training.activation_checkpointing", "        _set_generators(self._first.generators)\n", ""),
        Edit(
            "shoal.training.activation_checkpointing",
            "        for one in self._first.changed:\n            one.part._buffers",
            "        for one in ():\n            one.part._buffers",
        ),
        Edit("shoal.training.activation_checkpointing", "            buffers[name] = buffer\n", "            pass\n"),
        Edit(
            "shoal.training.activation_checkpointing",
            "        return now.numel() <= LARGE_ELEMENTS and not torch.equal(now, self.value)\n",
            "        return False\n",
        ),
        Edit(
            "shoal.training.activation_checkpointing",
            "        return checkpoint(alike, *args, use_reentrant=False, **kwargs)\n    kept",
            "        return checkpoint(plain, *args, use_reentrant=False, **kwargs)\n    kept",
        ),
    ],
)
@pytest.mark.parametrize("modules", ["units", ["Layer"], ["Linear", "Embedding"]])
def test_what_is_made_again_has_the_bits_of_what_was_made_first(modules: Any) -> None:
    Layer.forwards.clear()
    assert undisturbed(task(modules)) == undisturbed(PLAIN)
    made = OPTIONS["max_steps"] * OPTIONS["lanes"] * CALLS
    assert len(Layer.forwards) == (3 if "Linear" not in modules else 2) * made, "both runs, and what is made again"


@holds("What activation checkpointing makes again")
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_a_script_checkpoints_by_deepspeeds_name_are_made_again_with_their_bits(stage: int) -> None:
    Layer.forwards.clear()
    assert undisturbed(Task({**OPTIONS, "stage": stage}, model=CallingStack)) == undisturbed(PLAIN)
    assert len(Layer.forwards) == 3 * OPTIONS["max_steps"] * OPTIONS["lanes"] * CALLS


def kept_bytes(of: Task) -> int:
    """What autograd keeps of a forward outside of checkpoints."""
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor.detach()

    made = engine(of)
    batch = next(iter(made))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        made.module(**batch)
    return sum(sizes)


def test_less_is_kept_for_backward() -> None:
    assert kept_bytes(task("units", CalmStack)) < 0.7 * kept_bytes(task([], CalmStack))


@holds("What activation checkpointing makes again")
@pytest.mark.parametrize("point", shortened(["forward", "backward", "exchange"], "backward"))
def test_a_job_with_it_survives_kills_with_the_bits_of_one_without(point: str) -> None:
    options = {"max_steps": 5, "lanes": 4}
    without = Task(options, model=Stack)
    with_it = Task({**options, "shoal": {"activation_checkpointing": "units"}}, model=Stack)
    with Crew("abc", with_it, odd={"c": without}) as crew:
        crew.plant("b", 2, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == undisturbed(without)


def test_an_evaluation_is_made_once() -> None:
    def evaluate(engine: Engine) -> None:
        with engine.evaluating():
            engine.module(tokens=torch.zeros(1, 2, dtype=torch.long), targets=torch.zeros(1, 2, dtype=torch.long))

    Layer.forwards.clear()
    undisturbed(task("units", in_loop=evaluate))
    steps = OPTIONS["max_steps"] * OPTIONS["lanes"] * CALLS
    assert (Layer.forwards.count(False), Layer.forwards.count(True)) == (steps, 2 * steps)


def test_a_graph_may_be_gone_through_twice() -> None:
    def twice(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        torch.autograd.grad(loss, list(engine.module.parameters())[:1], retain_graph=True)
        engine.backward(loss)
        engine.step()

    assert undisturbed(task("units", body=twice)) == undisturbed(PLAIN)


def test_a_forward_of_the_modules_own_is_made_again_too() -> None:
    def model() -> nn.Module:
        made = Stack()
        layer = made.layers[0]
        layer.forward = lambda hidden, scale: Layer.forward(layer, hidden, scale=scale) * 2  # type: ignore[assignment]
        return made

    assert undisturbed(task("units", model)) == undisturbed(task([], model))


def test_a_copy_is_a_module_like_any_other() -> None:
    memory = io.BytesIO()
    module = engine(task("units")).module
    torch.save(module, memory)
    memory.seek(0)
    for twin in (copy.deepcopy(module), torch.load(memory, weights_only=False)):
        Layer.forwards.clear()
        twin(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)).backward()
        assert len(Layer.forwards) == CALLS, "nothing is made again"
        assert twin.layers[0].power.item() != module.layers[0].power.item()


# ---- compiled


def compiled(of: Task, way: str) -> tuple[str, int]:
    """The fingerprint of a compiled run, and how many graphs there were."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    made = engine(of)
    call = torch.compile(made.module, backend="aot_eager") if way == "whole" else made.module
    if way == "layers":
        for layer in made.module.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager")
    for batch in made:
        made.backward(call(**batch))
        made.step()
    return str(made.fingerprint()), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("way", shortened(["whole", "layers"], "layers"))
def test_compiled_code_has_the_same_bits_with_it_and_no_graph_more(way: str) -> None:
    assert compiled(task("units", CalmStack), way) == compiled(task([], CalmStack), way)


@holds("What activation checkpointing makes again")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_module_that_the_compiler_gives_up_has_the_same_bits_too() -> None:
    fingerprint, graphs = compiled(task("units"), "whole")
    assert (fingerprint, graphs) == (undisturbed(PLAIN), 0)


# ---- host memory


def test_cpu_checkpointing_is_said_to_change_nothing_where_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    def reasons(of: Task, deferred: bool = False) -> list[str]:
        settled = replace(activation_config(of), cpu_checkpointing=True)
        with shoal.deferred() if deferred else nullcontext():
            model = Stack()
        capsys.readouterr()
        activation_checkpointing.checkpoint_activations(model, settled)
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        return [line["reason"] for line in lines if "changes nothing" in line["event"]]

    assert reasons(task("units")) == ["the model is on the CPU: its activations are in host memory already"]
    assert reasons(task("units"), deferred=True) == reasons(task("units"))
    assert reasons(PLAIN) == ["`shoal.activation_checkpointing` names no modules"]


def activation_config(of: Task) -> Any:
    return engine(of).context.config


def test_inputs_that_wait_in_host_memory_come_back_with_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = note_waiting_inputs(monkeypatch)
    monkeypatch.setattr(activation_checkpointing._Checkpointed, "__init__", _as_on_a_device)
    assert undisturbed(task("units", CalmStack)) == undisturbed(task([], CalmStack))
    assert waited


_MADE = activation_checkpointing._Checkpointed.__init__


def _as_on_a_device(self: Any, to_host: bool) -> None:
    _MADE(self, True)


# ---- refused


@pytest.mark.parametrize(
    ("modules", "model", "sentence"),
    [
        (["Block"], Stack, '`shoal.activation_checkpointing` names "Block", and no module of the model is of that '
         "class. Its classes: BatchNorm1d, Dropout, Embedding, Layer, Linear, ModuleList, Stack."),
        ("units", Layer, '`shoal.activation_checkpointing` is "units", and the model has no nn.ModuleList and no '
         "nn.Sequential of several modules. Name classes of modules within it: BatchNorm1d, Dropout, Linear."),
        (["Layer"], Layer, "`shoal.activation_checkpointing` is Layer, and the whole model alone is of that class. "
         "Name classes of modules within it: BatchNorm1d, Dropout, Linear."),
    ],
)  # fmt: skip
def test_modules_that_are_not_there_are_refused_and_those_that_are_named(
    modules: Any, model: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(UserError) as refusal:
        engine(task(modules, model))
    assert str(refusal.value) == sentence


class AppliedTwice(nn.Module):
    """A layer whose gradients autograd makes in two parts: each call's backward is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(256, WIDTH), Calm(), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1, 3))
def test_a_gradient_that_comes_in_two_parts_is_refused_in_every_stage_at_the_first_step(stage: int) -> None:
    made = engine(Task({**OPTIONS, "lanes": 1, "stage": stage}, model=AppliedTwice))
    batch = next(iter(made))
    with pytest.raises(UserError, match="use_reentrant=False"):
        made.backward(made.module(**batch))
