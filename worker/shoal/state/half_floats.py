"""Half precision, as the config says: of parameters, rounded once at `initialize`, or of forwards alone, by autocast.

What a rounded module was before becomes its master weights. It is rounded as DeepSpeed's engine does
(`module.bfloat16()`, `module.half()`), buffers of floating point too. But DeepSpeed makes its master weights from the
rounded parameters; here they begin with the script's own values. Called when the state of training is made.

Under `Autocast` the forward computes in half precision where torch holds that to be safe; parameters stay as they are.
It reaches from the batch to `engine.backward`, and over an evaluation: each part of the module that a script calls, and
its loss, as in torch's own recipe (torch.amp, "Typical mixed precision training"). But without its cache of cast
weights: a weight that is used twice would have its gradients added up in half precision where the cache is kept, and in
its own where parameters come and go in between (ZeRO stage 3). Called by the loop. The scale of losses, which fp16
needs besides, is in core/loss_scale.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.cells.marks import local_of
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
    before = {info.name: local_of(parameter).data for info, parameter in pairs}
    for _, parameter in pairs:
        parameter.grad = None
    module.to(dtype)
    return [(replace(info, dtype=parameter.dtype), parameter) for info, parameter in pairs], before


class Autocast:
    """Autocast of one engine's loop; `begin` and `end` as often as may be."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._device = device.type
        self._dtype = getattr(torch, precision.autocast) if precision.autocast else None
        self._entered: torch.autocast | None = None

    def begin(self) -> None:
        """The loop gets a batch."""
        if self._dtype is not None and self._entered is None:
            self._entered = torch.autocast(self._device, self._dtype, cache_enabled=False)
            self._entered.__enter__()

    def end(self) -> None:
        """The loop is done with its forward. Copies of parameters in half precision are dropped."""
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context for forwards that belong to no micro-batch."""
        if self._dtype is None:
            yield
            return
        with torch.autocast(self._device, self._dtype, cache_enabled=False):
            yield
