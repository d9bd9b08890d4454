"""Held blocks of a model on a device whose state lies in the host's memory: the update is made on the CPU.

Gradients come down, the optimizer's own step runs on host memory on the training thread, parameters go up; part by
part, so that the next part comes down while one is updated, and one goes up while the next is. Where parameters have no
master weights, and so no place on the host, each update brings them down too: whatever has written to them since, a
hand-out say, counts. The bits are those of an update on the CPU, which is part of the numeric identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from shoal_protos.runs import NO_BLOCKS, Runs
from torch import Tensor

from shoal.blocks.fill_memory import FillMemory
from shoal.blocks.held import (
    HeldBlocks,
    OnUpdated,
    parts_of,
    trained_segments,
    unheard,
)
from shoal.blocks.loaded_state import State
from shoal.blocks.optimizer_step import Segment
from shoal.blocks.state_home import WEIGHTS, OnTheHost
from shoal.blocks.values import BlockValues
from shoal.core.layout import Layout, Stretch
from shoal.offload.updated_parameters import bring_up
from shoal.optim.twin import give_back_own_values, may_step_in_parts, take_over_hyper_parameters
from shoal.process.device import Device, DeviceCopy
from shoal.process.host_memory import host_memory

Coming = list[tuple[Tensor, list[DeviceCopy]]]
"""By segment, (elements,) of its gradient on the host, and what has to land before its update."""


class HostBlocks(HeldBlocks):
    """See the module's text."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        device: Device,
        keeps_weights: bool = False,
    ) -> None:
        super().__init__(layout, optimizer, parameters, tensors, keeps_weights)
        self._device = device
        self._home = OnTheHost(layout.device)
        self._expected_here = FillMemory(layout, NO_BLOCKS, host_memory)
        self._going: list[DeviceCopy] = []
        """Parameters of the last update, on their way up."""

    # ---- to hold, to take

    def expect(self, runs: Runs) -> None:
        super().expect(runs)
        self._expected_here = FillMemory(self.layout, runs, host_memory)

    def join(self) -> None:
        super().join()
        self._expected_here = FillMemory(self.layout, NO_BLOCKS, host_memory)

    def memory_for(self, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        """Parameters have a place of their own."""
        memory = self._expected if key == WEIGHTS else self._expected_here
        return memory.part(stretch, key, dtype)

    def _segment(self, stretch: Stretch, state: State) -> Segment:
        segment = super()._segment(stretch, state)
        is_updated = not (segment.has_master or self.layout.buckets[stretch.bucket].is_frozen)
        if not (is_updated and self._device.holds(segment.parameter)):
            return segment
        here = self._device.pinned(segment.parameter.numel(), segment.parameter.dtype)
        self._twin.state[here] = self._twin.state.pop(segment.parameter, {})
        return Segment(stretch, here, has_master=False, weights=segment.weights)

    def _weights(self, stretch: Stretch, state: State, has_master: bool) -> Tensor:  # (elements,)
        return super()._weights(stretch, state, has_master).to(self.layout.device)

    def bytes_by_place(self) -> dict[str, int]:
        """With the copies of parameters that the host updates; those that lie with the state are counted as weights."""
        own = [one.parameter for one in self._segments if not one.has_master and one.parameter is not one.weights]
        copies = sum(parameter.nbytes for parameter in own if not self._device.holds(parameter))
        return {"state": self.state_bytes() + copies}

    # ---- the update

    def apply(
        self,
        gradients: BlockValues,  # reduced, on the device; what is not held is not read
        scale: float,
        on_updated: OnUpdated = unheard,
    ) -> None:
        take_over_hyper_parameters(self._twin, self._user)
        for copy in self._going:
            copy.wait()
        self._going.clear()
        parts = parts_of(trained_segments(self._segments, self.layout, self._twin), may_step_in_parts(self._user))
        coming = self._bring_down(parts[0].segments, gradients)
        for index, part in enumerate(parts):
            following = self._bring_down(parts[index + 1].segments, gradients) if index + 1 < len(parts) else []
            self._update(part.segments, coming, scale)
            coming = following
            on_updated(part.first_bucket)
        give_back_own_values(self._twin, self._user)

    def _bring_down(self, segments: Sequence[Segment], gradients: BlockValues) -> Coming:
        found: Coming = []
        for segment in segments:
            gradient = gradients.of(segment.stretch)
            here = self._device.pinned(gradient.numel(), gradient.dtype)
            copies, place = [self._device.to_host(gradient, here)], self._place_of(segment)
            if not segment.has_master and self._device.holds(place):
                copies.append(self._device.to_host(place, segment.parameter))
            found.append((here, copies))
        return found

    def _place_of(self, segment: Segment) -> Tensor:  # (elements,) of the bucket's dtype
        """Its parameters, as others get them."""
        return self._parameters.of(segment.stretch) if segment.weights is None else segment.weights

    def _update(self, segments: list[Segment], coming: Coming, scale: float) -> None:
        for _, copies in coming:
            for copy in copies:
                copy.wait()
        self.optimizer_step.make(segments, [gradient for gradient, _ in coming], scale)
        for gradient, _ in coming:
            self._device.give_back(gradient)
        copies_up = (bring_up(self._device, segment, self._place_of(segment)) for segment in segments)
        self._going += [copy for copy in copies_up if copy is not None]
