"""Where a worker keeps the state of its held blocks, as its config says, and the held blocks of that place.

`ParametersOnHost`: a device's model has its parameters in host memory too (stage 3), with their state there or in a
file. On the device are gathered units and gradients. An update brings gradients down and nothing up: parameters are
updated where they lie, in pinned memory; what a worker holds of a unit is copied up when it gathers the unit, and
others are sent it from there. The bits are those of an update on the CPU with parameters on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.held import MASTER, HeldBlocks
from shoal.blocks.loaded_state import State
from shoal.blocks.state_home import WEIGHTS, OnTheHost
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout, Stretch
from shoal.offload.filed_blocks import FiledBlocks, check_steps_in_parts
from shoal.offload.filed_device_blocks import DeviceStore, FiledDeviceBlocks
from shoal.offload.host_blocks import HostBlocks
from shoal.offload.piece_store import PieceStore
from shoal.offload.state_file import StateFile
from shoal.process.device import HOST, Device


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where optimizer state and master weights are: beside the parameters, if nothing else is said."""

    folder: str | None = None
    """In a file there."""
    on_host: bool = False
    """In host memory: where parameters are on the host, that is beside them."""
    device: Device = HOST
    """Where forwards compute."""
    parameters_on_host: bool = False
    """Whether the parameters of held blocks are in host memory too."""


def held_blocks(
    place: StatePlace,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    parameters: BlockValues,
    tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
    keeps_weights: bool = False,
) -> HeldBlocks:
    """Of a worker that keeps its state there. Raises `UserError` where it cannot."""
    given, device = (layout, optimizer, parameters, tensors), place.device
    parameters_on_host = place.parameters_on_host and not device.on_host
    if parameters_on_host:
        _check_parameters_on_host(place, keeps_weights)
    if place.folder is None:
        if parameters_on_host:
            return HostParameterBlocks(*given, device, keeps_weights)
        if place.on_host and not device.on_host:
            return HostBlocks(*given, device, keeps_weights)
        return HeldBlocks(*given, keeps_weights)
    check_steps_in_parts(optimizer)
    store = PieceStore(layout, StateFile(place.folder))
    if parameters_on_host:
        return FiledHostParameterBlocks(*given, DeviceStore(store, device), keeps_weights)
    if not device.on_host:
        return FiledDeviceBlocks(*given, DeviceStore(store, device), keeps_weights)
    return FiledBlocks(*given, store, keeps_weights)


def _check_parameters_on_host(place: StatePlace, keeps_weights: bool) -> None:
    """Raises `UserError` where they cannot be there."""
    given = f'`zero_optimization.offload_param.device` is "cpu" and the model is on {place.device.kind}'
    if not keeps_weights:
        raise UserError(
            f"{given}; below ZeRO stage 3 every worker has all parameters there. Set `zero_optimization.stage`: 3, or "
            "leave `offload_param` out."
        )
    if not place.on_host and place.folder is None:
        raise UserError(
            f"{given}; parameters are updated where they lie, so their optimizer state cannot be on the device: set "
            '`zero_optimization.offload_optimizer: {"device": "cpu"}`, or "nvme" with a folder.'
        )


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
