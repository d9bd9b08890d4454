"""Autocast: the forward computes in half precision where torch holds that to be safe; parameters stay as they are.

From the batch to `engine.backward`, and in an evaluation: whatever part of the module a script calls, and its loss, as
in torch's own recipe (torch.amp, "Typical mixed precision training"). But without its cache of cast weights: a weight
that is used twice would have its gradients added up in half precision where the cache is kept, and in its own where
parameters come and go in between (ZeRO stage 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.config.training import Precision


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
