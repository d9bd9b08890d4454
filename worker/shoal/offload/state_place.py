"""Where a worker keeps the state of its held blocks, as its config says: held blocks with the home of that place.

In memory or in a file, and updated beside the parameters or on the host of their device: each of both with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.segments import Segments
from shoal.blocks.state_home import InMemory
from shoal.blocks.update_place import BesideParameters, OnTheHost, UpdatePlace
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout
from shoal.offload.piece_store import PieceStore
from shoal.offload.state_file import StateFile
from shoal.offload.state_in_file import InFile, check_steps_in_parts
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
    device, parameters_on_host = place.device, place.parameters_on_host and not place.device.on_host
    if parameters_on_host:
        _check_parameters_on_host(place, keeps_weights)
    if place.folder is not None:
        check_steps_in_parts(optimizer)
    updated_on_host = not device.on_host and (place.on_host or place.folder is not None)
    update_place: UpdatePlace
    update_place = OnTheHost(device, parameters_on_host) if updated_on_host else BesideParameters(layout, optimizer)
    segments = Segments(layout, optimizer, parameters, update_place, keeps_weights)
    if place.folder is None:
        return HeldBlocks(InMemory(segments), tensors)
    return HeldBlocks(InFile(segments, PieceStore(layout, StateFile(place.folder))), tensors)


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
