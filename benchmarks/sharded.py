"""What checkpoint.py compares with: PyTorch's own sharded training and torch.distributed.checkpoint, as its guide says.

The model under FSDP2, which shards parameters and AdamW's state as evenly as Shoal shards its blocks: every rank copies
and writes its own part only, the best case of DCP. (Plain DDP would copy the whole state on every rank.) Parameters
stay gathered between forward and backward. `async_save` has a gloo group of its own, as it must, and one stager for all
saves, so that its memory is used again. See
https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import Any

import model
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate


class Sharded:
    """One rank's model, optimizer and samples. All ranks call alike."""

    def __init__(self, size: str, micro_batch: int) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        self.module = model.build(size)
        for layer in self.module.blocks:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.module, mesh=mesh, reshard_after_forward=False)
        self.optimizer = model.adamw(self.module)
        self._windows, self._micro_batch = model.Windows(), micro_batch
        self._at, self._apart = dist.get_rank(), world
        self._own_group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def step(self) -> None:
        """One optimizer step; each rank trains the samples that it would under DDP."""
        first = self._at * self._micro_batch
        self._at += self._apart
        numbers = [(first + index) % len(self._windows) for index in range(self._micro_batch)]
        batch = default_collate([self._windows[number] for number in numbers])
        self.optimizer.zero_grad()
        self.module(**batch).backward()
        self.optimizer.step()

    def save(self, folder: str) -> None:
        dcp.save(self._state(), checkpoint_id=folder)

    def async_save(self, folder: str) -> Future[Any]:
        """Returns once the state is copied."""
        writing = dcp.async_save(
            self._state(), checkpoint_id=folder, process_group=self._own_group, async_stager=self._stager
        )
        assert isinstance(writing, Future)
        return writing

    def load(self, folder: str) -> None:
        """Into this world, whatever world has written it."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def _state(self) -> dict[str, Any]:
        parameters, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": parameters, "optimizer": optimizer}


def state_bytes(module: torch.nn.Module) -> int:
    """Parameters and AdamW's two moments, which is all that a checkpoint must hold."""
    return 3 * sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
