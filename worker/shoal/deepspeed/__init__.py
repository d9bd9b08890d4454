"""Scripts for DeepSpeed, elastic: `import shoal.deepspeed as deepspeed` in place of `import deepspeed`.

What is here is in docs/deepspeed.md; what is missing says so by name.
"""

from __future__ import annotations

from typing import NoReturn

from shoal.deepspeed import checkpointing, comm, elasticity, moe, pipe, utils, zero
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine
from shoal.deepspeed.hf_config import HfDeepSpeedConfig, stand_in_for_theirs
from shoal.deepspeed.initializing import add_config_arguments, initialize
from shoal.deepspeed.lone_group import init_distributed
from shoal.deepspeed.pipe import PipelineModule
from shoal.deepspeed.pipeline_engine import PipelineEngine
from shoal.deepspeed.surface import module_lacks
from shoal.session.error_hook import tell_errors_in_a_sentence

__all__ = [
    "DeepSpeedEngine", "HfDeepSpeedConfig", "PipelineEngine", "PipelineModule", "add_config_arguments", "checkpointing",
    "comm", "elasticity", "init_distributed", "initialize", "moe", "pipe", "utils", "zero",
]  # fmt: skip

stand_in_for_theirs()
tell_errors_in_a_sentence()


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(name)
