"""What checkpoint.py compares with: PyTorch's own training and torch.distributed.checkpoint, as its guide says.

`sharded`: the model under FSDP2, which shards parameters and AdamW's state as evenly as Shoal shards its blocks: every
rank copies and writes its own part only, the best case of DCP. Parameters stay gathered between forward and backward.
`replicated`: under plain DDP, which is what most jobs of this size use: every rank has the whole state, copies it, and
writes the part that DCP gives it. `async_save` has a gloo group of its own, as it must, and one stager for all saves,
so that its memory is used again. Its thread may have the niceness of Shoal's writer, which costs training less and
takes longer. See https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html.
"""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import Future
from typing import Any

import model
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shoal.checkpoint.saver import NICE
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate


class NiceWriter(dcp.FileSystemWriter):
    """Writes on a thread that leaves the cores to training, as Shoal's does."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # the thread ends with the save
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


class Trained:
    """One rank's model, optimizer and samples, and their saves. All ranks call alike."""

    def __init__(self, module: nn.Module, micro_batch: int) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)
        world = dist.get_world_size()
        self.module = module
        self.optimizer = model.adamw(module)
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
        return self._async_save(dcp.FileSystemWriter(folder))

    def nice_async_save(self, folder: str) -> Future[Any]:
        """`async_save` whose thread has the niceness of Shoal's writer."""
        return self._async_save(NiceWriter(folder))

    def _async_save(self, writer: dcp.FileSystemWriter) -> Future[Any]:
        writing = dcp.async_save(
            self._state(), storage_writer=writer, process_group=self._own_group, async_stager=self._stager
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


def sharded(size: str, micro_batch: int) -> Trained:
    """Under FSDP2."""
    gpt, mesh = model.build(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in gpt.blocks:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(gpt, mesh=mesh, reshard_after_forward=False)
    return Trained(gpt, micro_batch)


def replicated(size: str, micro_batch: int) -> Trained:
    """Under plain DDP."""
    parallel = nn.parallel.DistributedDataParallel(model.build(size), gradient_as_bucket_view=True)
    return Trained(parallel, micro_batch)


def state_bytes(module: torch.nn.Module) -> int:
    """Parameters and AdamW's two moments, which is all that a checkpoint must hold."""
    return 3 * sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
