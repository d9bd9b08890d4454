"""Model, optimizer and scheduler in the engine's hands: what a script gives, and what it must not call any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crew import Task, undisturbed
from integration.scripts import scheduler_of
from rule import Edit, holds, rule
from shoal.guards.arguments import check_given
from shoal.training.engine import Engine
from shoal.training.start import initialize
from shoal_protos.errors import UserError
from torch import nn

OPTIONS = {"max_steps": 3}


def optimizer_of(engine: Engine) -> torch.optim.Optimizer:
    return engine.context.state.optimizer


CALLS: list[tuple[Callable[[Engine], Any], str]] = [
    (lambda e: optimizer_of(e).step(), r"remove optimizer\.step\(\) from the loop and call engine\.step\(\)"),
    (
        lambda e: e.context.state.scheduler.step(),
        r"remove scheduler\.step\(\) from the loop, where it would run once per",
    ),
    (lambda e: optimizer_of(e).state_dict(), r"lies in blocks on all workers.*engine\.save_checkpoint\(\)"),
    (lambda e: optimizer_of(e).load_state_dict({}), r"load_state_dict was called in the loop.*checkpoint\.resume"),
    (
        lambda e: optimizer_of(e).add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        r"give the optimizer all its parameters before",
    ),
    (
        lambda e: optimizer_of(e).register_step_pre_hook(print),
        r"^a step hook was registered on the optimizer after shoal.initialize; it would never be called.*callback",
    ),
    (
        lambda e: optimizer_of(e).register_step_post_hook(print),
        r"^a step hook was registered on the optimizer after shoal.initialize; it would never be called.*callback",
    ),
]


@rule(
    "Only the engine calls the optimizer and the scheduler, once per step; a script that calls them, or reads "
    "state that is kept in blocks, gets an error that says so",
    "A step",
    broken_by=Edit(
        "shoal.optim.hyper",
        "    if not isinstance(scheduler, _Taken):\n",
        "    if scheduler is None:\n",
    ),
)
@pytest.mark.parametrize(("call", "sentence"), CALLS)
@pytest.mark.parametrize("place", ["in_loop", "step"])
def test_what_the_engine_does_itself_is_refused_to_the_script(call: Any, sentence: str, place: str) -> None:
    with pytest.raises(UserError, match=sentence):
        undisturbed(Task(OPTIONS, **{place: call}))


@holds("Only the engine calls the")
@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_scheduler_in_the_engines_hands_stays_what_it_was(name: str) -> None:
    """Its kind, its state and its rates: those of the same scheduler that a plain loop steps."""
    kept: list[Any] = []

    def made(optimizer: torch.optim.Optimizer) -> Any:
        kept.append(scheduler_of(optimizer, name))
        return kept[-1]

    losses: list[float] = []

    def note(engine: Engine) -> None:
        engine.on_step(lambda engine: losses.append(float(engine.loss or 0.0)))

    undisturbed(Task(OPTIONS, scheduler=made, prepare=note))
    mine = kept[-1]
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 1e-3}, {"params": [nn.Parameter(torch.zeros(1))]}]
    theirs = scheduler_of(torch.optim.AdamW(groups, lr=3e-3), name)
    for loss in losses:
        theirs.optimizer.step()
        theirs.step(loss) if name == "ReduceLROnPlateau" else theirs.step()
    assert isinstance(mine, type(theirs)) and type(mine).__name__ == name
    assert repr(mine.state_dict()) == repr(theirs.state_dict())


def test_an_optimizer_may_load_its_state_before_the_loop_and_be_copied() -> None:
    def load(engine: Engine) -> None:
        optimizer = optimizer_of(engine)
        fresh = copy.deepcopy(optimizer)
        optimizer.load_state_dict(type(fresh).state_dict(fresh))

    assert undisturbed(Task(OPTIONS, prepare=load)) == undisturbed(Task(OPTIONS))


MODEL = nn.Linear(4, 4)


class Nested(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@pytest.mark.parametrize(
    ("model", "optimizer", "sentence"),
    [
        ([MODEL, MODEL], None, r"model is a list; expected one torch\.nn.*Module\. An engine trains one model: put"),
        (None, None, r"model is a NoneType; expected one"),
        (MODEL, [], r"optimizer is an empty list; expected one torch\.optim\.Optimizer at least\."),
        (MODEL, [adam(MODEL), 0.1], r"optimizer\[1\] is a float; expected one torch\.optim\.Optimizer\."),
        (MODEL, {"head": torch.optim.SGD}, r"optimizer\['head'\] is the class SGD; expected an object of it, SGD\("),
        (MODEL, {0: adam(MODEL)}, r"optimizer is a dict; expected one torch\.optim\.Optimizer\."),
        (Nested(nn.LazyLinear(4)), None, r'parameter "part\.weight" has no shape yet \(a lazy module\); run one batch'),
        (Nested(nn.LazyBatchNorm1d(affine=False)), None, r'buffer "part\.running_mean" has no shape yet'),
        (Nested(nn.Embedding(3, 3, max_norm=1.0)), None, r'module "part" has max_norm=1\.0: its forward would change'),
        (Nested(nn.EmbeddingBag(3, 3, max_norm=2.0)), None, r'module "part" has max_norm=2\.0'),
        (Nested(nn.Embedding(3, 3, sparse=True)), None, r'module "part" makes sparse gradients'),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name_before_anything_is_built(
    model: Any, optimizer: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check_given(model, optimizer, None)
    with pytest.raises(UserError, match=sentence):
        initialize(model=model, config={}, dataset=None, optimizer=optimizer)


def test_a_list_of_schedulers_has_some() -> None:
    with pytest.raises(UserError, match=r"scheduler is an empty tuple; expected one .*LRScheduler at least\."):
        check_given(MODEL, adam(MODEL), ())
    with pytest.raises(UserError, match=r"scheduler\[0\] is a NoneType; expected one .*LRScheduler\."):
        check_given(MODEL, adam(MODEL), [None])
