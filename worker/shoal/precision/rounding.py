"""Parameters in half precision: the module is rounded once, at `initialize`; what it was before becomes the masters.

As DeepSpeed's engine does (`module.bfloat16()`, `module.half()`), buffers of floating point too. But DeepSpeed makes
its master weights from the rounded parameters; here they begin with the script's own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.config.training import Precision
from shoal.core.layout import Trainable


def half_dtype(precision: Precision) -> torch.dtype | None:
    """Of the parameters; None: the script's own."""
    return getattr(torch, precision.parameters) if precision.parameters else None


Pairs = list[tuple[Trainable, nn.Parameter]]
"""Parameters that get gradients, in registration order."""


def round_module(
    module: nn.Module, pairs: Sequence[tuple[Trainable, nn.Parameter]], dtype: torch.dtype | None
) -> tuple[Pairs, dict[str, Tensor]]:
    """Rounds all that floats to `dtype`; None: nothing. Returns the pairs as they are then, and the values before by
    name.
    """
    if dtype is None:
        return list(pairs), {}
    before = {info.name: parameter.data for info, parameter in pairs}
    for _, parameter in pairs:
        parameter.grad = None
    module.to(dtype)
    return [(replace(info, dtype=parameter.dtype), parameter) for info, parameter in pairs], before
