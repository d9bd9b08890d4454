"""Held blocks of a model on a device whose state lies in a file: the update is made on the CPU, piece by piece.

A piece's state comes from the file into one of the few buffers, its gradient comes down, the optimizer's own step runs
on host memory on the training thread, its parameters go up, and its state goes back. While a piece is updated, the
gradient of the next comes down, and buffers before and after it are written and read. Where parameters have no master
weights they come down with the gradient. The bits are those of an update on the CPU, which is part of the numeric
identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.blocks.held import MASTER, OnUpdated, unheard
from shoal.blocks.loaded_state import State
from shoal.blocks.optimizer_step import Segment
from shoal.blocks.state_home import OnTheHost
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout, Stretch
from shoal.offload.filed_blocks import FiledBlocks
from shoal.offload.held_piece import HeldPiece
from shoal.offload.piece_store import PieceStore
from shoal.offload.transfers import Buffer
from shoal.offload.updated_parameters import bring_up
from shoal.process.device import Device, DeviceCopy


@dataclass(frozen=True, slots=True)
class _Coming:
    """What an update of a piece needs from the device, each (elements of the piece,) in pinned memory."""

    gradient: Tensor
    parameters: Tensor | None
    """Where no master weights tell them: a copy of those on the device, or where they lie in host memory."""
    copies: list[DeviceCopy]


@dataclass(frozen=True, slots=True)
class DeviceStore:
    """Pieces in a file, and the device that has their parameters."""

    pieces: PieceStore
    device: Device


class FiledDeviceBlocks(FiledBlocks):
    """See the module's text."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        store: DeviceStore,
        keeps_weights: bool = False,
    ) -> None:
        super().__init__(layout, optimizer, parameters, tensors, store.pieces, keeps_weights)
        self._device = store.device
        self._home = OnTheHost(layout.device)
        self._coming: list[_Coming] = []
        """Of the piece at hand, and of the next."""

    def _weights(self, stretch: Stretch, state: State, has_master: bool) -> Tensor:  # (elements,)
        return super()._weights(stretch, state, has_master).to(self.layout.device)

    # ---- the update

    def apply(
        self,
        gradients: BlockValues,  # reduced, on the device; what is not held is not read
        scale: float,
        on_updated: OnUpdated = unheard,
    ) -> None:
        self._coming.clear()
        super().apply(gradients, scale, on_updated)

    def _look_ahead(self, pieces: Sequence[HeldPiece], gradients: BlockValues) -> None:
        self._coming += [self._bring_down(piece, gradients) for piece in pieces[len(self._coming) :]]

    def _bring_down(self, piece: HeldPiece, gradients: BlockValues) -> _Coming:
        gradient = gradients.of(piece.stretch)
        here = self._device.pinned(gradient.numel(), gradient.dtype)
        copies, parameters = [self._device.to_host(gradient, here)], None
        if not self.layout.buckets[piece.stretch.bucket].has_masters:
            place = parameters = self._place_of(piece)
            if self._device.holds(place):
                parameters = self._device.pinned(place.numel(), place.dtype)
                copies.append(self._device.to_host(place, parameters))
        return _Coming(here, parameters, copies)

    def _place_of(self, piece: HeldPiece) -> Tensor:  # (elements,) of the bucket's dtype
        """Its parameters, as others get them."""
        if not self.keeps_weights:
            return self._parameters.of(piece.stretch)
        (place,) = self._memory.parts(piece.stretch)
        return place

    def _apply_to_piece(self, piece: HeldPiece, buffer: Buffer, gradients: BlockValues, scale: float) -> None:
        del gradients
        coming = self._coming.pop(0)
        for copy in coming.copies:
            copy.wait()
        state = piece.state(buffer)
        parameter = coming.parameters if coming.parameters is not None else state.pop(MASTER)
        segment = Segment(piece.stretch, parameter, has_master=coming.parameters is None, weights=None)
        self._twin.state[parameter].update(state)
        self.optimizer_step.make([segment], [coming.gradient], scale)
        self._device.give_back(coming.gradient)
        is_copied = bring_up(self._device, segment, self._place_of(piece)) is not None
        if is_copied and coming.parameters is not None:
            self._device.give_back(coming.parameters)
        self.store.keep(piece, buffer, self._state(segment))
        self._twin.state.pop(parameter, None)
