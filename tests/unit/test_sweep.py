"""The end of a script, and many engines in one: each goes with its module, and its last save comes to its end."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet, ref

import pytest
import torch
from crew import Task, engine_of, train
from integration.scripts import Model
from shoal.process.faults import Faults
from shoal.process.forks import OPEN_FILES
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal.training.exit import _Ending, serve_at_exit
from tiers import check
from torch.utils.data import default_collate

pytestmark = check("collects garbage until all is gone")


def shared_descriptors() -> set[str]:
    """Memory that this process shares with others of its host, or could."""
    return {file.name for file in OPEN_FILES.iterdir() if file.is_file() and "memfd:shoal" in str(file.readlink())}


def trained(task: Task) -> Engine:
    engine = engine_of(task, AloneLink(), Faults([]))
    serve_at_exit(engine)
    train(engine, task, lambda: None)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        *({"stage": stage} for stage in range(4)),
        {"stage": 3, "precision": {"bf16": {"enabled": True}}, "offload": "cpu"},
        {"stage": 3, "shoal": {"activation_checkpointing": ["Linear"]}},
    ],
    ids=lambda options: json.dumps(options),
)
def test_an_engine_that_the_script_has_let_go_frees_its_memory(options: dict[str, Any]) -> None:
    before = shared_descriptors()
    for _ in range(2):
        engine = trained(Task({"max_steps": 2, **options}))
        kept = [ref(engine), ref(engine.module), ref(engine.context.state)]
        del engine
        gc.collect()
        assert [one() for one in kept] == [None] * 3
        assert shared_descriptors() <= before


def test_a_model_whose_parameters_are_sharded_can_be_used_when_its_engine_is_gone() -> None:
    task = Task({"max_steps": 2, "stage": 3})
    engine = trained(task)
    model, batch = engine.module.eval(), default_collate([task.data()[0], task.data()[1]])
    with torch.no_grad(), engine.gathered():
        before = model(**batch)
    engine_gone = ref(engine)
    del engine
    gc.collect()
    assert engine_gone() is None
    with torch.no_grad():
        assert torch.equal(model(**batch), before)


class Marked(torch.autograd.Function):
    """Whose node is told of by its context."""

    nodes: ClassVar[WeakSet[Any]] = WeakSet()

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.mark = Mark()
        Marked.nodes.add(ctx.mark)
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Mark:
    """Lives as long as the context that has it."""


class Bounded(Model):
    """Its last node keeps what it has made."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Marked.apply(super().forward(tokens, targets)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_micro_batch_that_is_skipped_after_its_forward_leaves_no_activations(stage: int) -> None:
    most = []

    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        if engine.global_step % 2:
            engine.skip()
        else:
            engine.backward(loss)
            engine.step()
        del loss
        most.append(len(Marked.nodes))

    task = Task({"max_steps": 4, "stage": stage}, model=lambda: Bounded(0.1, True), body=body)
    train(engine_of(task, AloneLink(), Faults([])), task, lambda: None)
    assert most and max(most) == 0


def test_a_save_that_an_engine_has_begun_is_whole_when_the_engine_is_gone(tmp_path: Path) -> None:
    task = Task({"max_steps": 2, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}})
    engine = trained(task)
    while not engine.parts.saving.busy and not list(tmp_path.glob("*/manifest.json")):
        engine.training.vote()
    del engine
    gc.collect()
    assert len(list(tmp_path.glob("*/manifest.json"))) == 1


def test_a_script_that_never_gets_to_its_loop_has_ended_at_step_0() -> None:
    engine = engine_of(Task({"max_steps": 2}), AloneLink(), Faults([]))
    result = _Ending(engine)._result()
    assert (result.step, result.failure) == (
        0, "the script ended at step 0 of 2; go through the loop to its end, or call engine.stop()."
    )  # fmt: skip


def stopped(engine: Engine) -> bool:
    if engine.global_step == 2:
        engine.stop()
    return False


@pytest.mark.parametrize(
    ("leaves", "is_named"),
    [(lambda engine: engine.global_step == 2, True), (lambda _: False, False), (stopped, False)],
    ids=["breaks", "trains", "stops"],
)
def test_a_script_alone_that_leaves_its_loop_early_says_once_what_it_has_not_trained(
    leaves: Callable[[Engine], bool],
    is_named: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)  # of a test that has failed
    engine = engine_of(Task({"max_steps": 5}), AloneLink(), Faults([]))
    serve_at_exit(engine)
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
        if leaves(engine):
            break
    assert "ended_early" not in capsys.readouterr().err
    del engine, batch
    gc.collect()
    lines = [line for line in capsys.readouterr().err.splitlines() if "ended_early" in line]
    expected = '"step": 2, "last_step": 5, "means": "the script left its loop before the end; '
    assert [expected in line for line in lines] == [True] * is_named


def test_a_script_alone_that_an_error_ended_says_no_more_than_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("no such column"), raising=False)
    engine = engine_of(Task({"max_steps": 5}), AloneLink(), Faults([]))
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
        break
    engine.context.untrained.tell()
    assert "ended_early" not in capsys.readouterr().err
