"""Held blocks of a model on a device of which the parameters lie in host memory too (stage 3), with their state there
or in a file.

On the device are the units that are gathered, and gradients. An update brings gradients down and nothing up: parameters
are updated where they lie, in pinned memory; what a worker holds of a unit is copied up when it gathers the unit, and
others are sent it from there. The bits are those of an update on the CPU with parameters on the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.blocks.held import MASTER, HeldBlocks
from shoal.blocks.loaded_state import State
from shoal.blocks.state_home import WEIGHTS, OnTheHost
from shoal.core.layout import Stretch
from shoal.device import HOST, Device
from shoal.offload.filed_device_blocks import FiledDeviceBlocks
from shoal.offload.host_blocks import HostBlocks


class ParametersOnHost(HeldBlocks):
    """Stands before the class that updates on the CPU: parameters are in pinned memory, with the state."""

    _device: Device

    def __init__(self, *given: Any) -> None:
        """`given`: what that class is given; it keeps weights."""
        super().__init__(*given)
        self._home = OnTheHost(HOST.kind)
        self._find_weights = self._device.pinned

    def _weights(self, stretch: Stretch, state: State, has_master: bool) -> Tensor:  # (elements,)
        """In pinned memory: copied there, where they came otherwise than by a fill."""
        bucket = self.layout.buckets[stretch.bucket]
        given = state.get(WEIGHTS, state[MASTER] if has_master else None)
        if given is not None and given.dtype == bucket.dtype and self._device.is_pinned(given):
            return given
        here = self._device.pinned(stretch.blocks * bucket.block_elements, bucket.dtype)
        return here.zero_() if given is None else here.copy_(given)


class HostParameterBlocks(ParametersOnHost, HostBlocks):
    """With their state in host memory."""


class FiledHostParameterBlocks(ParametersOnHost, FiledDeviceBlocks):
    """With their state in a file: an update carries it through memory piece by piece."""
