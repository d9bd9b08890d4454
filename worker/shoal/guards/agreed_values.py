"""The hyper-parameters that members update with and the modes that they train in are the same, as they decide its bits.

A loop's body sets them at its top, from `engine.global_step`. A member without lanes replays updates of blocks but runs
no body, so one that trains sends it the values of each step before the vote: then a step that has passed its vote is
updated alike everywhere, also where it is rolled forward. Joiners take them over, a checkpoint keeps them, the vote
compares them, and values that differ all the same fail the job.

What the bottom of a body sets, or leaves behind (an evaluation with `module.eval()` and no `module.train()`), would be
there on those alone that ran it: a rate is refused before the next batch (`SetInTime`), a part of the module in another
mode at the next backward (`ModuleModes`), in every world alike. Both are told of the moments of a step; the rest is
called by step.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
from shoal_protos.errors import JobFailed, UserError
from torch import nn

from shoal.core.units import plain_name
from shoal.exchange.packing import FramedSend, contents_of, receive_framed
from shoal.exchange.traffic import HYPER
from shoal.exchange.vote import Record
from shoal.exchange.world import World
from shoal.guards.step_guard import StepGuard
from shoal.optim.hyper import first_difference, hyper_parameters, load_into

WORDS = {True: "training", False: "evaluation"}

MODE_ADVICE = (
    "Call module.train() after an evaluation, or evaluate within `with engine.evaluating():`; to change a mode for "
    "good, set it at the top of the loop's body, from engine.global_step."
)


class ModuleModes(StepGuard):
    """Modes of one engine's module; `evaluating`: the parts in evaluation mode at the last backward, by name."""

    def __init__(self, module: nn.Module) -> None:
        parts = {plain_name(f"{name}.").removesuffix("."): part for name, part in module.named_modules()}
        self._names, self._parts = list(parts), list(parts.values())
        self._given: list[bool] = []
        """As the batch at hand was given out."""
        self._trained: list[bool] = []
        """At the last backward; empty before the first."""
        self.evaluating: list[str] = []

    def _now(self) -> list[bool]:
        return [part.training for part in self._parts]

    def on_batch(self) -> None:
        self._given = self._now()

    def before_backward(self, where: str, _: bool, /) -> None:
        """Raises `UserError` naming a part whose mode was changed after the last backward, and not by this body."""
        now = self._now()
        if now == self._trained:
            return
        for name, mode, given, before in zip(self._names, now, self._given, self._trained, strict=False):
            if mode == given != before:
                raise UserError(
                    f"{_named(name)} was put into {WORDS[mode]} mode between engine.step and the next batch, and was "
                    f"still in it at the backward ({where}). A worker that gets its first batch then would not be. "
                    f"{MODE_ADVICE}"
                )
        self._keep(now)

    def take_over(self, evaluating: Collection[str]) -> None:
        """The modes of another member, or of a checkpoint."""
        for name, part in zip(self._names, self._parts, strict=True):
            part.training = name not in evaluating
        self._keep(self._now())

    def _keep(self, modes: list[bool]) -> None:
        self._trained = modes
        self.evaluating = [name for name, mode in zip(self._names, modes, strict=True) if not mode]


def first_other_mode(mine: Collection[str], others: Collection[str]) -> str:
    """The first part that is in another mode; empty where none is."""
    for name in sorted(set(mine) ^ set(others)):
        return f"{_named(name)} is in {WORDS[name not in mine]} mode here and in {WORDS[name not in others]} mode there"
    return ""


def _named(name: str) -> str:
    return f'part "{name}" of the module' if name else "the module"


EVALUATING = "evaluating"
SAMPLES = "samples"


def agreed_values(optimizer: torch.optim.Optimizer, modes: ModuleModes, samples: int = 0) -> list[dict[str, Any]]:
    """What the vote compares: a mapping for each optimizer group, and one of modes and of the dataset's length, where
    the description did not have it.
    """
    return [*hyper_parameters(optimizer), {EVALUATING: modes.evaluating, SAMPLES: samples}]


def take_over_where_no_body_runs(world: World, optimizer: torch.optim.Optimizer, modes: ModuleModes) -> None:
    """Before the vote of a step: members without lanes get the values of the first member that has some, and the same
    stage of the model. Raises `WorldChanged`.
    """
    trainers, alike = world.plan.trainers, world.traffic.coordinates.of_stage
    first = next(rank for rank in trainers if rank in alike)
    if world.rank not in trainers:
        *hyper, agreed = json.loads(receive_framed(world.group, first, HYPER))
        load_into(optimizer, hyper)
        modes.take_over(agreed[EVALUATING])
    elif world.rank == first and len(trainers) < world.plan.world_size:
        content = json.dumps(agreed_values(optimizer, modes)).encode()
        standbys = (rank for rank in alike if rank not in trainers)
        for send in [FramedSend(world.group, rank, HYPER, content) for rank in standbys]:
            send.wait()


class SetInTime(StepGuard):
    """That a body sets no value between `engine.step` and its next batch: a member that gets its first lane then, a
    joiner above all, would never have run those lines.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._committed: tuple[Record | None, list[dict[str, Any]]] | None = None

    def on_commit(self, record: Record) -> None:
        """The update is done, and the scheduler has set its values."""
        self._committed = record, hyper_parameters(self._optimizer)

    def before_batch(self, _: object, record: Record | None, /) -> None:
        committed, self._committed = self._committed, None
        if committed is None or committed[0] is not record:  # it went back, or took another member's state over
            return
        difference = first_difference(hyper_parameters(self._optimizer), committed[1])
        if difference:
            raise UserError(
                f"a hyper-parameter was set between engine.step and the next batch: {difference} after the step. "
                "A worker that gets its first batch then would not have it. Set it at the top of the loop's body, "
                "from engine.global_step, or give a scheduler to shoal.initialize."
            )


def refuse_others(
    world: World, record: Record, optimizer: torch.optim.Optimizer, modes: ModuleModes, samples: int = 0
) -> None:
    """Raises `JobFailed` naming group and key, or the part of the module, where values differ between members that have
    the same stage of the model; all see it in the same vote.
    """
    if len(set(record.hypers)) <= 1:
        return
    firsts = world.traffic.coordinates.first_of_stage
    differing = (rank for rank, hyper in enumerate(record.hypers) if hyper != record.hypers[firsts[rank]])
    if (rank := next(differing, None)) is None:
        return
    first = firsts[rank]
    mine = agreed_values(optimizer, modes, samples)
    there_and_here = contents_of(world.group, (first, rank), json.dumps(mine).encode())
    (*there, modes_there), (*here, modes_here) = map(json.loads, there_and_here)
    difference = first_difference(here, there)
    if difference:
        raise JobFailed(
            f"the hyper-parameters of rank {rank} differ from rank {first}'s at step {record.step}: {difference}. "
            "Set them by a scheduler that reads no parameters, or by what all workers know alike, such as "
            "engine.global_step."
        )
    if modes_here[SAMPLES] != modes_there[SAMPLES]:
        raise JobFailed(
            f"the dataset that rank {rank} loops over has {modes_here[SAMPLES]} samples, rank {first}'s has "
            f"{modes_there[SAMPLES]}; give all workers the whole dataset: which of them reads which samples changes."
        )
    raise JobFailed(
        f"rank {rank} has trained in other modes than rank {first} at step {record.step}: "
        f"{first_other_mode(modes_here[EVALUATING], modes_there[EVALUATING])}. {MODE_ADVICE}"
    )
