"""Held blocks of a model on a device of which the parameters lie in host memory too, with their state (stage 3).

On the device are the units that are gathered, and gradients. An update brings gradients down and nothing up: parameters
are updated where they lie, in pinned memory; what a worker holds of a unit is copied up when it gathers the unit, and
others are sent it from there. The bits are those of an update on the CPU with parameters on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.blocks.held import MASTER
from shoal.blocks.loaded_state import State
from shoal.blocks.state_home import WEIGHTS, OnTheHost
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout, Stretch
from shoal.device import HOST, Device
from shoal.offload.host_blocks import HostBlocks


class HostParameterBlocks(HostBlocks):
    """See the module's text."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        device: Device,
    ) -> None:
        super().__init__(layout, optimizer, parameters, tensors, device, keeps_weights=True)
        self._home = OnTheHost(HOST.kind)
        self._find_weights = device.pinned

    def _weights(self, stretch: Stretch, state: State, has_master: bool) -> Tensor:  # (elements,)
        """In pinned memory: copied there, where they came otherwise than by a fill."""
        bucket = self.layout.buckets[stretch.bucket]
        given = state.get(WEIGHTS, state[MASTER] if has_master else None)
        if given is not None and given.dtype == bucket.dtype and self._device.is_pinned(given):
            return given
        here = self._device.pinned(stretch.blocks * bucket.block_elements, bucket.dtype)
        return here.zero_() if given is None else here.copy_(given)
