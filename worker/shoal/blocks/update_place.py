"""The place where an update of blocks is made, and where their state is brought for it: beside the parameters, or not.

`BesideParameters` is their own device; `OnTheHost` the host of it: gradients come down, the optimizer's own step runs
on host memory on the training thread, parameters go up; part by part, so that the next part comes down while one is
updated, and one goes up while the next is. Parameters without master weights have no place on the host, so each update
brings them down too: all that has written to them since, a hand-out say, counts. The bits are those of an update on the
CPU, which is part of the numeric identity.

With the state parameters may be in host memory too (stage 3). On the device are gathered units and gradients then; an
update brings nothing up: parameters are updated where they lie, in pinned memory. What a worker holds of a unit is
copied up when it gathers the unit, and others are sent it from there. Called by segments and homes of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.blocks.loaded_state import WEIGHTS, State, probe_state
from shoal.blocks.optimizer_step import OptimizerStep, Segment
from shoal.core.layout import Bucket, Layout
from shoal.process.device import HOST, Device, DeviceCopy
from shoal.process.host_memory import host_memory, memory_on


@dataclass(frozen=True, slots=True)
class Coming:
    """What an update needs of a segment besides its state."""

    gradient: Tensor  # (elements of the segment,)
    parameters: Tensor  # (elements of the segment,) of the bucket's dtype: where others read them
    copies: list[DeviceCopy]
    """That have to land first."""


class BesideParameters:
    """The numbers that all blocks of a stretch share lie where the optimizer has them: torch's own some on the CPU."""

    updates_in_place = True
    """Whether parameters without master weights are updated where others read them."""

    def __init__(self, layout: Layout, optimizer: torch.optim.Optimizer) -> None:
        self._device, self._user = layout.device, optimizer
        self._known: dict[tuple[int, torch.dtype], dict[str, torch.device]] = {}

    def bring(self, bucket: Bucket, state: State) -> State:  # each (elements of a stretch,), or ()
        """What was read from a file, or came with a message, there."""
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

    def memory(self, elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        """For state that is received."""
        return memory_on(self._device, elements, dtype)

    weights_memory = memory

    def weights(
        self,
        given: Tensor | None,  # (elements,) of any dtype
        elements: int,
        dtype: torch.dtype,
    ) -> Tensor:  # (elements,) of `dtype`
        """Parameters that are with the state, there; None: memory that a reader fills."""
        return self.weights_memory(elements, dtype) if given is None else given.to(dtype)

    def updated(
        self,
        parameters: Tensor,  # (elements,)
    ) -> Tensor:  # (elements,) of the same dtype
        """What is updated of parameters without master weights: these, or memory into which they come each time."""
        return parameters

    def give_back(
        self,
        updated: Tensor,  # (elements,)
        parameters: Tensor,  # (elements,)
    ) -> None:
        """What `updated` has found for these parameters."""

    def begin_update(self) -> None:
        """An update of all that is held begins."""

    def bring_down(
        self,
        gradient: Tensor,  # (elements of a segment,)
        parameters: Tensor,  # (elements of a segment,): where others read them
        _: Tensor | None,  # (elements of a segment,): what is updated of them
    ) -> Coming:
        """Begins to bring what an update needs."""
        return Coming(gradient, parameters, [])

    def leave_out(self, coming: Coming) -> None:
        """What was brought is here, and no update follows."""

    def update(self, step: OptimizerStep, segments: Sequence[Segment], coming: Sequence[Coming], scale: float) -> None:
        """One step on these segments; what they have become is then where others read it, or on its way there."""
        step.make(segments, [one.gradient for one in coming], scale)
        masters = [(one.parameters, of.parameter) for of, one in zip(segments, coming, strict=True) if of.has_master]
        if masters:
            rounded, wide = zip(*masters, strict=True)
            torch._foreach_copy_(rounded, wide)


class OnTheHost:
    """Of a model on this device, with the methods of `BesideParameters`. `with_parameters`: where parameters are with
    the state, host memory has them too.
    """

    updates_in_place = False

    def __init__(self, device: Device, with_parameters: bool) -> None:
        self._device, self._with_parameters = device, with_parameters
        self._weights = HOST.kind if with_parameters else device.kind
        self._going: list[DeviceCopy] = []
        """Parameters of the last update, on their way up."""

    def bring(self, _: Bucket, state: State) -> State:  # each (elements of a stretch,), or ()
        return {key: value.to(self._weights if key == WEIGHTS else "cpu") for key, value in state.items()}

    def memory(self, elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        return host_memory(elements, dtype)

    def weights_memory(self, elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        if self._with_parameters:
            return self._device.pinned(elements, dtype)
        return memory_on(self._device.kind, elements, dtype)

    def weights(
        self,
        given: Tensor | None,  # (elements,) of any dtype
        elements: int,
        dtype: torch.dtype,
    ) -> Tensor:  # (elements,) of `dtype`
        """In pinned memory they are copied, where they came otherwise than by a fill."""
        if given is not None and not self._with_parameters:
            return given.to(dtype).to(self._weights)
        if given is not None and given.dtype == dtype and self._device.is_pinned(given):
            return given
        here = self.weights_memory(elements, dtype)
        return here.zero_() if given is None else here.copy_(given)

    def updated(
        self,
        parameters: Tensor,  # (elements,)
    ) -> Tensor:  # (elements,) of the same dtype
        if not self._device.holds(parameters):
            return parameters
        return self._device.pinned(parameters.numel(), parameters.dtype)

    def give_back(
        self,
        updated: Tensor,  # (elements,)
        parameters: Tensor,  # (elements,)
    ) -> None:
        if updated is not parameters:
            self._device.give_back(updated)

    def begin_update(self) -> None:
        """All that the last one has sent up has left: this one writes to the same memory."""
        for copy in self._going:
            copy.wait()
        self._going.clear()

    def bring_down(
        self,
        gradient: Tensor,  # (elements of a segment,)
        parameters: Tensor,  # (elements of a segment,)
        updated: Tensor | None,  # (elements of a segment,); None: master weights
    ) -> Coming:
        here = self._device.pinned(gradient.numel(), gradient.dtype)
        copies = [self._device.to_host(gradient, here)]
        if updated is not None and self._device.holds(parameters):
            copies.append(self._device.to_host(parameters, updated))
        return Coming(here, parameters, copies)

    def leave_out(self, coming: Coming) -> None:
        for copy in coming.copies:
            copy.wait()
        self._device.give_back(coming.gradient)

    def update(self, step: OptimizerStep, segments: Sequence[Segment], coming: Sequence[Coming], scale: float) -> None:
        for one in coming:
            for copy in one.copies:
                copy.wait()
        step.make(segments, [one.gradient for one in coming], scale)
        for one in coming:
            self._device.give_back(one.gradient)
        copies_up = (bring_up(self._device, of, one.parameters) for of, one in zip(segments, coming, strict=True))
        self._going += [copy for copy in copies_up if copy is not None]


class CopiesOnHost(BesideParameters):
    """Where copies of blocks that others own lie, of a model on this device: in pinned host memory, parameters that are
    with the state too. They are updated on the device, as their owners' are: the home brings them up piece by piece.
    """

    def __init__(self, layout: Layout, optimizer: torch.optim.Optimizer, device: Device) -> None:
        super().__init__(layout, optimizer)
        self.device = device

    def bring(self, bucket: Bucket, state: State) -> State:  # each (elements of a stretch,), or ()
        found, going = super().bring(bucket, {key: one for key, one in state.items() if not one.dim()}), []
        for key, value in state.items():
            if value.dim():
                found[key], copies = self._brought_down(value)
                going += copies
        for copy in going:
            copy.wait()
        return found

    def _brought_down(
        self,
        value: Tensor,  # (elements,)
    ) -> tuple[Tensor, list[DeviceCopy]]:  # (elements,) on the host
        """Where it is to lie, and what has to land there first."""
        if self.device.is_pinned(value):
            return value, []
        here = self.memory(value.numel(), value.dtype)
        if self.device.holds(value):
            return here, [self.device.to_host(value, here)]
        return here.copy_(value), []

    def memory(self, elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        return self.device.pinned(elements, dtype)

    weights_memory = memory

    def weights(
        self,
        given: Tensor | None,  # (elements,) of any dtype
        elements: int,
        dtype: torch.dtype,
    ) -> Tensor:  # (elements,) of `dtype`
        if given is not None and given.dtype == dtype:
            return given
        here = self.weights_memory(elements, dtype)
        return here.zero_() if given is None else here.copy_(given)

    def bring_up(
        self,
        value: Tensor,  # (elements,) on the host, or ()
    ) -> Tensor:  # the same on the device; () as it is
        """What this thread gives the device from now on finds it there; the host does not wait."""
        if not value.dim() or self.device.holds(value):
            return value
        there = memory_on(self.device.kind, value.numel(), value.dtype)
        self.device.to_device(value, there, self.device.promise(there)).join()
        return there


UpdatePlace = BesideParameters | OnTheHost


def bring_up(
    device: Device,
    segment: Segment,  # updated; its parameter is (elements,) on the host
    parameters: Tensor,  # (elements,) of the bucket's dtype, on the device or on the host
) -> DeviceCopy | None:
    """Begins to copy them to where others read them, master weights rounded; all that reads there on the device comes
    after.

    None: they are there already, as where they are on the host. The copy reads the segment's parameter where that has
    no master weights, which may change only when it is done.
    """
    rounded = segment.parameter
    if not device.holds(parameters):
        if segment.has_master:
            parameters.copy_(rounded)
        return None
    if segment.has_master:
        rounded = device.pinned(parameters.numel(), parameters.dtype)
        rounded.copy_(segment.parameter)
    copy = device.to_device(rounded, parameters, device.promise(parameters))
    copy.join()
    if segment.has_master:
        device.give_back(rounded)
    return copy
