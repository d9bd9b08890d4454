"""Several optimizers over one model: a GAN whose networks have each a class, a schedule and a turn of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train, undisturbed
from gan import Gan, body
from shoal.optim.several import Several, several
from shoal.optim.several import schedules as schedules_over
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR


def of_each(model: nn.Module) -> dict[str, Optimizer]:
    """SGD of two kinds of groups, one of which keeps nothing, and Adam."""
    assert isinstance(model, Gan)
    first, last = model.generator[0], model.generator[2]
    groups = [{"params": [*first.parameters()], "momentum": 0.9}, {"params": [*last.parameters()]}]
    return {"generator": SGD(groups, 0.05), "discriminator": Adam(model.discriminator.parameters(), 1e-3)}


def schedules_of(optimizers: dict[str, Optimizer]) -> dict[str, Any]:
    return {
        "discriminator": StepLR(optimizers["discriminator"], 2, gamma=0.5),
        "generator": ExponentialLR(optimizers["generator"], 0.9),
    }


def gan(stage: int, **options: Any) -> Task:
    def schedule(optimizer: Optimizer) -> Any:
        assert isinstance(optimizer, Several)
        return schedules_over(schedules_of(dict(zip(optimizer.names, optimizer.members, strict=True))), optimizer)

    return Task(
        {"max_steps": 7, "stage": stage, **options},
        model=Gan,
        optimizer=lambda model: several(of_each(model)),
        scheduler=schedule,
        body=body,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_world_ends_as_one_worker(stage: int, tmp_path: Path) -> None:
    """Through a kill before the generator has any state, a joiner after it, and going on from a checkpoint in another
    world.
    """
    right = undisturbed(gan(0))
    with Crew("abc", gan(stage)) as crew:
        crew.train_to(1)
        crew.plant("b", 2, "exchange")
        crew.train_to(4)
        crew.add("d")
        assert crew.finish() == right


def test_at_one_lane_they_train_as_torchs_two_do() -> None:
    """In all bits."""
    batches: list[Tensor] = []

    def noted(engine: Engine, batch: Any) -> None:
        batches.append(batch["tokens"].float() / 255)
        body(engine, batch)

    with ONE_AT_A_TIME:
        task = gan(1, max_steps=6, lanes=1)
        task = Task(task.options, model=Gan, optimizer=task.optimizer, scheduler=task.scheduler, body=noted)
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        torch.manual_seed(0)
        plain = Gan()
    optimizers = of_each(plain)
    schedules = schedules_of(optimizers)
    for one in optimizers.values():
        one._opt_called = True  # type: ignore[attr-defined]
    for step, real in enumerate(batches):
        turn = "generator" if step % 3 == 2 else "discriminator"
        plain.zero_grad()
        (plain.of_generator(real) if turn == "generator" else plain.of_discriminator(real)).backward()
        optimizers[turn].step()
        for one in schedules.values():
            one.step()
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
