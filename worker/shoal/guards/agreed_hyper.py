"""The hyper-parameters that members update with and the modes that they train in are the same: those whom the loop's
body does not run for take them over, and values that differ all the same fail the job.

The body may set a rate from `engine.global_step`, at its top. A member without lanes replays updates of blocks but runs
no body, so one that trains sends it the values of each step before the vote: then a step that has passed its vote is
updated alike everywhere, also where it is rolled forward.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from shoal_protos.errors import JobFailed, UserError

from shoal.exchange.packing import FramedSend, receive_framed
from shoal.exchange.traffic import DIGESTS, HYPER
from shoal.exchange.vote import Record
from shoal.exchange.world import World
from shoal.group.group import Group
from shoal.guards import module_modes
from shoal.guards.module_modes import ModuleModes
from shoal.guards.step_guard import StepGuard
from shoal.optim.hyper import first_difference, hyper_parameters, load_into

EVALUATING = "evaluating"
SAMPLES = "samples"


def agreed_values(optimizer: torch.optim.Optimizer, modes: ModuleModes, samples: int = 0) -> list[dict[str, Any]]:
    """What the vote compares: a mapping for each optimizer group, and one of modes and of the dataset's length, where
    the description did not have it.
    """
    return [*hyper_parameters(optimizer), {EVALUATING: modes.evaluating, SAMPLES: samples}]


def take_over_where_no_body_runs(world: World, optimizer: torch.optim.Optimizer, modes: ModuleModes) -> None:
    """Before the vote of a step: whoever has no lanes gets the values of the first member that has. Raises
    `WorldChanged`.
    """
    source, standbys = world.plan.trainers[0], [rank for rank in world.plan.ranks if not world.plan.lanes_of(rank)]
    if world.rank in standbys:
        *hyper, agreed = json.loads(receive_framed(world.group, source, HYPER))
        load_into(optimizer, hyper)
        modes.take_over(agreed[EVALUATING])
    elif world.rank == source and standbys:
        content = json.dumps(agreed_values(optimizer, modes)).encode()
        for send in [FramedSend(world.group, rank, HYPER, content) for rank in standbys]:
            send.wait()


class SetInTime(StepGuard):
    """That a body sets no value between `engine.step` and its next batch: whoever gets its first lane then, a joiner
    above all, would never have run those lines.
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
    group: Group, record: Record, optimizer: torch.optim.Optimizer, modes: ModuleModes, samples: int = 0
) -> None:
    """Raises `JobFailed` naming group and key, or the part of the module, where members' values differ; all see it in
    the same vote.
    """
    if len(set(record.hypers)) <= 1:
        return
    rank = next(r for r, hyper in enumerate(record.hypers) if hyper != record.hypers[0])
    mine = agreed_values(optimizer, modes, samples)
    content = json.dumps(mine).encode()
    others = [peer for peer in range(group.size) if peer != group.rank]
    sends = [FramedSend(group, peer, DIGESTS, content) for peer in others] if group.rank in (0, rank) else []
    theirs = {peer: json.loads(receive_framed(group, peer, DIGESTS)) for peer in (0, rank) if peer != group.rank}
    for send in sends:
        send.wait()
    (*here, modes_here), (*there, modes_there) = theirs.get(rank, mine), theirs.get(0, mine)
    difference = first_difference(here, there)
    if difference:
        raise JobFailed(
            f"the hyper-parameters of rank {rank} differ from rank 0's at step {record.step}: {difference}. "
            "Set them by a scheduler that reads no parameters, or by what all workers know alike, such as "
            "engine.global_step."
        )
    if modes_here[SAMPLES] != modes_there[SAMPLES]:
        raise JobFailed(
            f"the dataset that rank {rank} loops over has {modes_here[SAMPLES]} samples, rank 0's has "
            f"{modes_there[SAMPLES]}; give all workers the whole dataset: which of them reads which samples changes."
        )
    raise JobFailed(
        f"rank {rank} has trained in other modes than rank 0 at step {record.step}: "
        f"{module_modes.first_difference(modes_here[EVALUATING], modes_there[EVALUATING])}. {module_modes.ADVICE}"
    )
