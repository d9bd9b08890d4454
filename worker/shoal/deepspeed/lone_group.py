"""The group of this process alone that scripts for DeepSpeed make by `init_distributed`: workers meet elsewhere.

A cell of several processes is a default group of its own, which takes its place (pipe.py).
"""

from __future__ import annotations

import sys
from typing import Any

from shoal_protos.training_log import get_logger
from torch import distributed
from torch._C._distributed_c10d import HashStore

log = get_logger("shoal")
_is_made = False
"""Whether this process has made it. Nothing here keeps it, so that its socket is freed when it is destroyed."""


def init_distributed(*_: Any, **__: Any) -> None:
    """Gives torch.distributed a group of this process alone, of which a DistributedSampler can be made: workers meet
    through the controller. Errors are told as before: every worker would be torch's rank 0.
    """
    global _is_made
    if distributed.is_available() and not distributed.is_initialized():
        hook = sys.excepthook
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        sys.excepthook = hook
        _is_made = True
        means = "workers meet through the controller; torch.distributed knows this process alone"
        log.info("deepspeed.init_distributed", means=means)


def leave() -> None:
    """Makes room for a cell, where torch's default group is the one that `init_distributed` has made."""
    global _is_made
    if _is_made and distributed.is_initialized() and distributed.get_world_size() == 1:
        distributed.destroy_process_group()
    _is_made = False
