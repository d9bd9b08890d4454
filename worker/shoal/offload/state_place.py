"""Where a worker keeps the state of the blocks that it holds, as its config says; and the held blocks of that place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout
from shoal.device import HOST, Device
from shoal.offload.filed_blocks import FiledBlocks, check_steps_in_parts
from shoal.offload.filed_device_blocks import DeviceStore, FiledDeviceBlocks
from shoal.offload.host_blocks import HostBlocks
from shoal.offload.host_parameters import FiledHostParameterBlocks, HostParameterBlocks
from shoal.offload.piece_store import PieceStore
from shoal.offload.state_file import StateFile


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
