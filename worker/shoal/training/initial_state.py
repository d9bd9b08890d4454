"""How members come to the same initial state: rank 0's in the first generation, the job's frozen parameters later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.checkpoint.writer import TakenStates
from shoal.core.cell_part import COMMON, DIVISIONS, Division
from shoal.core.layout import Layout
from shoal.core.misses import Missed, Misses
from shoal.core.units import named_buffers
from shoal.exchange.packing import as_bytes_tensor
from shoal.exchange.traffic import STARTED
from shoal.exchange.world import World
from shoal.group.group import Group
from shoal.state.training_state import TrainingState, digest_of, frozen_parameters

log = get_logger("shoal")


def agree_on_the_start(world: World, state: TrainingState) -> None:
    """In the first generation rank 0's parameters and buffers replace the others', with a warning where they differ. In
    cells it is the lowest rank that has the parameter, and the lowest at a coordinate for its buffers.

    Called before the state begins with them.
    """
    begins, part = state.stand_at_the_start().own(), state.layout.part
    by_division = {one: dict[str, Tensor]() for one in DIVISIONS}
    for name, value in begins.items():
        by_division[Division(name in part.of_expert, name in part.own)][name] = value
    by_division[COMMON] |= frozen_parameters(state)
    buffers = {f"buffer {name}": buffer for name, buffer in named_buffers(state.module)}
    ranks, coordinates = world.plan.ranks, world.traffic.coordinates
    if not world.plan.homes:
        replaced = _take_over_from(0, ranks, world, by_division[COMMON] | buffers)
    else:
        for division, tensors in by_division.items():
            holders = coordinates.holders(division)
            _take_over_from(holders[0], holders, world, tensors)
        replaced = _take_over_from(coordinates.mates[0], coordinates.mates, world, buffers)
        _check_copies(world, state.layout, begins)
    if replaced:
        state.buffers.refresh()


def _check_copies(world: World, layout: Layout, begins: Mapping[str, Tensor]) -> None:
    """Raises `UserError`, on all members alike, where copies differ that stages have of a parameter."""
    for tie in sorted({one.name for one in layout.part.ties.values()}):
        copies = {one.place: copy for copy, one in sorted(layout.part.ties.items()) if one.name == tie}
        own = begins.get(copies.get(layout.part.place, ""))
        digest = digest_of([] if own is None else [(tie, own)])
        rows, firsts = world.group.all_gather(as_bytes_tensor(digest.encode())), dict[int, Tensor]()
        for member, row in zip(world.plan.members, rows, strict=True):
            place, within = divmod(member.coordinate, layout.part.of_stage)
            if place in copies and not torch.equal(row, firsts.setdefault(within, row)):
                first, *_, last = sorted(copies.values())
                raise UserError(
                    f'parameters "{first}" and "{last}" are tied as "{tie}", and begin with different values; give '
                    "them the same ones within the function of cell.stages, as by torch.manual_seed before each is "
                    "made."
                )


def _take_over_from(source: int, ranks: Sequence[int], world: World, tensors: Mapping[str, Tensor]) -> bool:
    """Those of one rank replace the others' of `ranks`, where they differ; returns whether they did here. All members
    of a world call it alike.
    """
    copies = ((name, tensor.detach().clone()) for name, tensor in tensors.items())  # numpy would pin what is looked at
    group, digests = world.group, world.group.all_gather(as_bytes_tensor(digest_of(copies).encode()))
    others = [rank for rank in ranks if not torch.equal(digests[rank], digests[source])]
    if world.rank in others:
        log.warning("initial_state_replaced", rank=world.rank, by_rank=source,
                    hint="seed the script before it builds the model, torch.manual_seed(0)")  # fmt: skip
    _replace(group, list(tensors.values()), source, others)
    return world.rank in others


def check_made(world: World, state: TrainingState) -> None:
    """After the state has begun: what members have made of a model that was built without memory is alike.

    Raises `UserError` where it is not.
    """
    deferred = state.originals.deferred if state.originals is not None else None
    if deferred is None:
        return
    rows = world.group.all_gather(deferred.sums)
    for unit, sums in enumerate(rows.t().tolist()):
        if len({one for one in sums if one}) > 1:
            raise UserError(
                f'the first values of parameter "{deferred.first_name(unit)}", or of others of its unit, are not the '
                "same on all workers. A reset_parameters() or init may draw random numbers from torch's, numpy's and "
                "Python's own generators, and from nothing else."
            )


def agree_on_misses(world: World, state: TrainingState) -> None:
    """After the state has begun: what parameters have missed by then is the job's, and where a cell divides them a
    member knows it of its own.
    """
    if not world.plan.homes:
        return
    mine = [2 * one.updates + one.is_new for one in state.misses.of]
    rows = world.group.all_gather(torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()
    found = [*state.misses.of]
    for member, row in zip(world.plan.members, rows, strict=True):
        for number in chain.from_iterable(state.layout.parameter_numbers[member.coordinate]):
            found[number] = Missed(row[number] // 2, bool(row[number] % 2))
    state.misses = Misses(tuple(found))


def check_registered_alike(world: World, state: TrainingState) -> None:
    """Raises `UserError` where what the script has registered begins with other tensors at another coordinate of a
    cell: a checkpoint has one member's alone.
    """
    if not world.plan.homes:
        return
    taken = TakenStates.of(state.registered)
    digests = world.group.all_gather(as_bytes_tensor(digest_of(taken.tensors.items()).encode()))
    firsts = dict[int, Tensor]()
    for member, digest in zip(world.plan.members, digests, strict=True):
        firsts.setdefault(member.coordinate, digest)
    if any(not torch.equal(digest, firsts[0]) for digest in firsts.values()):
        raise UserError(
            f"what the script has registered ({', '.join(state.registered)}) differs between the coordinates of a "
            "cell, and a checkpoint keeps it once for all of them. Register what all processes of a cell have alike, "
            "or leave checkpoint.path out."
        )


def share_frozen(group: Group, state: TrainingState, source: int, targets: Sequence[int]) -> None:
    """Frozen parameters of `source` replace those of `targets`. Called by these; others need not."""
    _replace(group, list(frozen_parameters(state).values()), source, targets)


def _replace(group: Group, tensors: Sequence[Tensor], source: int, targets: Sequence[int]) -> None:
    works = []
    for tensor in tensors:
        packed = tensor.detach().contiguous()
        content = packed.reshape(-1).view(torch.uint8) if packed.numel() else torch.empty(0, dtype=torch.uint8)
        if group.rank == source and content.numel():
            works += [group.send(content, rank, STARTED) for rank in targets]
        elif group.rank in targets and content.numel():
            group.receive(content, source, STARTED).wait()
            if not tensor.is_contiguous():
                tensor.detach().copy_(packed)
    group.wait(works)
