"""`deepspeed.checkpointing.checkpoint`: a function whose activations are made again in backward, called by a script."""

from __future__ import annotations

from typing import NoReturn

from shoal.deepspeed.surface import module_lacks
from shoal.training.activation_checkpointing import checkpoint_call as checkpoint

__all__ = ["checkpoint"]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(f"checkpointing.{name}")
