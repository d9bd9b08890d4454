"""Where the state of blocks lies while it is held: what was read from a file, or came with a message, is brought there.

Tensors lie beside the parameters, or on the host (offload); the numbers that all blocks of a stretch share where the
optimizer itself has them: torch's own has some on the CPU, whatever the parameters are on. Called by held blocks.
"""

from __future__ import annotations

import torch

from shoal.blocks.loaded_state import State, probe_state
from shoal.core.layout import Bucket, Layout

WEIGHTS = "weights"
"""The key of parameters, where a block's are with its state and nowhere else."""


class BesideParameters:
    """The home of state that is updated on the device."""

    def __init__(self, layout: Layout, optimizer: torch.optim.Optimizer) -> None:
        self._device, self._user = layout.device, optimizer
        self._known: dict[tuple[int, torch.dtype], dict[str, torch.device]] = {}

    def bring(self, bucket: Bucket, state: State) -> State:  # each (elements of a stretch,), or ()
        """The same, there."""
        if self._device.type == "cpu":
            return state
        numbers, found = self._numbers_of(bucket), State()
        for key, value in state.items():
            found[key] = value.to(self._device if value.dim() else numbers.get(key, value.device))
        return found

    def _numbers_of(self, bucket: Bucket) -> dict[str, torch.device]:
        if bucket.is_frozen:  # no optimizer has seen it
            return {}
        kind = bucket.group, bucket.wide_dtype
        if kind not in self._known:
            state = probe_state(self._user, bucket, 2, self._device)
            self._known[kind] = {key: value.device for key, value in state.items() if not value.dim()}
        return self._known[kind]


class OnTheHost:
    """The home of state that is updated on the CPU; parameters are on `weights`."""

    def __init__(self, weights: torch.device) -> None:
        self._weights = weights

    def bring(self, _: Bucket, state: State) -> State:  # each (elements of a stretch,), or ()
        """The same, there."""
        return {key: value.to(self._weights if key == WEIGHTS else "cpu") for key, value in state.items()}
