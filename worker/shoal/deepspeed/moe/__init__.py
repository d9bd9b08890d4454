"""`deepspeed.moe`: layers of experts, and groups of their parameters."""

from __future__ import annotations

from shoal.deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
