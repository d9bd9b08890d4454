"""`deepspeed.moe`: layers of experts."""

from __future__ import annotations

from shoal.deepspeed.moe import layer

__all__ = ["layer"]
