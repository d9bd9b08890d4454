"""How the members of the first generation come to the same initial state: rank 0's."""

from __future__ import annotations

import torch

from shoal.exchange.letters import as_bytes_tensor
from shoal.exchange.routes import STARTED
from shoal.logs import get_logger
from shoal.state import TrainingState, digest_of, frozen_parameters
from shoal.world import World

log = get_logger("shoal")


def agree_on_the_start(world: World, state: TrainingState) -> None:
    """In the first generation rank 0's parameters and buffers replace the others', with a warning where they differ."""
    tensors = {
        **{f"bucket {i}": flat for i, flat in enumerate(state.flats)},
        **frozen_parameters(state.module),
        **{f"buffer {name}": buffer for name, buffer in state.module.named_buffers()},
    }
    group, digests = world.group, world.group.all_gather(as_bytes_tensor(digest_of(list(tensors.items())).encode()))
    others = [rank for rank in range(group.size) if not torch.equal(digests[rank], digests[0])]
    works = []
    if world.rank in others:
        log.warning("initial_state_replaced", rank=world.rank, by_rank=0,
                    hint="seed the script before it builds the model, torch.manual_seed(0)")  # fmt: skip
    for tensor in tensors.values():
        flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        if not flat.numel():
            continue
        if world.rank == 0:
            works += [group.send(flat, rank, STARTED) for rank in others]
        elif world.rank in others:
            group.receive(flat, 0, STARTED).wait()
    for work in works:
        work.wait()
    if world.rank in others:
        state.buffers.refresh()
