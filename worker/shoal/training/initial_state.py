"""How members come to the same initial state: rank 0's in the first generation, the job's frozen parameters later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.core.units import named_buffers
from shoal.exchange.packing import as_bytes_tensor
from shoal.exchange.traffic import STARTED
from shoal.exchange.world import World
from shoal.group.group import Group
from shoal.process.logs import get_logger
from shoal.state.training_state import TrainingState, digest_of, frozen_parameters

log = get_logger("shoal")


def agree_on_the_start(world: World, state: TrainingState) -> None:
    """In the first generation rank 0's parameters and buffers replace the others', with a warning where they differ.

    Called before the state begins with them.
    """
    tensors = {
        **state.stand_at_the_start().own(),
        **frozen_parameters(state),
        **{f"buffer {name}": buffer for name, buffer in named_buffers(state.module)},
    }
    copies = ((name, tensor.detach().clone()) for name, tensor in tensors.items())  # numpy would pin what is looked at
    group, digests = world.group, world.group.all_gather(as_bytes_tensor(digest_of(copies).encode()))
    others = [rank for rank in range(group.size) if not torch.equal(digests[rank], digests[0])]
    if world.rank in others:
        log.warning("initial_state_replaced", rank=world.rank, by_rank=0,
                    hint="seed the script before it builds the model, torch.manual_seed(0)")  # fmt: skip
    _replace(group, list(tensors.values()), 0, others)
    if world.rank in others:
        state.buffers.refresh()


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
