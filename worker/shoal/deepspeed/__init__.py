"""Scripts for DeepSpeed, elastic: `import shoal.deepspeed as deepspeed` in place of `import deepspeed`.

What is here is in docs/deepspeed.md; what is missing says so by name.
"""

from __future__ import annotations

from typing import NoReturn

from shoal.deepspeed import checkpointing, comm, elasticity, moe, zero
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine
from shoal.deepspeed.hf_config import HfDeepSpeedConfig, stand_in_for_theirs
from shoal.deepspeed.initializing import add_config_arguments, init_distributed, initialize
from shoal.deepspeed.surface import module_lacks

__all__ = [
    "DeepSpeedEngine", "HfDeepSpeedConfig", "add_config_arguments", "checkpointing", "comm", "elasticity",
    "init_distributed", "initialize", "moe", "zero",
]  # fmt: skip

stand_in_for_theirs()


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(name)
