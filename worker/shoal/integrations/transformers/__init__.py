"""Trainer scripts of Hugging Face, elastic: `from shoal.integrations.transformers import Trainer` in place of theirs.

What is honoured, and what is refused, is in docs/transformers.md.
"""

from __future__ import annotations

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        f'{error.name} is not installed: install "shoal[transformers]"', name=error.name
    ) from None

from shoal.integrations.transformers.engine_config import put_deepspeed_aside
from shoal.integrations.transformers.trainer import Seq2SeqTrainer, Trainer

put_deepspeed_aside()

__all__ = ["Seq2SeqTrainer", "Trainer"]
