"""Held blocks of a model on a device of which the parameters lie in host memory too (stage 3), with their state there
or in a file.

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
from shoal.offload.filed_device_blocks import DeviceStore, FiledDeviceBlocks
from shoal.offload.host_blocks import HostBlocks


class HostParameterBlocks(HostBlocks):
    """With their state in host memory."""

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
        return _pinned_weights(self._device, self.layout, stretch, state, has_master)


class FiledHostParameterBlocks(FiledDeviceBlocks):
    """With their state in a file: an update carries it through memory piece by piece."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        store: DeviceStore,
    ) -> None:
        super().__init__(layout, optimizer, parameters, tensors, store, keeps_weights=True)
        self._home = OnTheHost(HOST.kind)
        self._find_weights = store.device.pinned

    def _weights(self, stretch: Stretch, state: State, has_master: bool) -> Tensor:  # (elements,)
        return _pinned_weights(self._device, self.layout, stretch, state, has_master)


def _pinned_weights(
    device: Device,
    layout: Layout,
    stretch: Stretch,
    state: State,  # each (elements of the stretch,), or () for what all its blocks share
    has_master: bool,
) -> Tensor:  # (elements of the stretch,) of the bucket's dtype
    """In pinned memory: copied there, where they came otherwise than by a fill."""
    bucket = layout.buckets[stretch.bucket]
    given = state.get(WEIGHTS, state[MASTER] if has_master else None)
    if given is not None and given.dtype == bucket.dtype and device.is_pinned(given):
        return given
    here = device.pinned(stretch.blocks * bucket.block_elements, bucket.dtype)
    return here.zero_() if given is None else here.copy_(given)
