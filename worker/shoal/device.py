"""The device that a worker computes on, and what waits for what between it and the host. The one seam to accelerators.

A device works through what it is given in its own time: a call that returns has only given it something. What the host
hands on (to a peer, to a file, into a vote) has to have landed first, and memory that the device still reads or writes
must stay as it is. On the CPU all of it is over when the call returns: `HOST` waits for nothing and costs nothing.
Everything else takes the device from the module's parameters. Knows no group; besides this file only groups may know
what kind of device it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.host_memory import host_memory


class DeviceCopy(Protocol):
    """A copy between device and host that has begun. Both ends stay as they are until it has landed."""

    @property
    def has_landed(self) -> bool:
        """Whether `wait` would not block."""

    def wait(self) -> None:
        """Blocks the host until it has landed."""

    def join(self) -> None:
        """Whatever this thread gives the device from now on finds it landed; the host does not wait."""


class Device(Protocol):
    """Where parameters, gradients and optimizer state lie. Any thread may call it."""

    kind: torch.device
    on_host: bool
    """Whether it is the host itself: nothing is ever on its way."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on it, and not in the host's memory."""

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        """`(elements,)` in host memory that the device copies to and from beside its work; without values."""

    def give_back(self, pinned: Tensor) -> None:
        """That memory is not needed any more: it serves others once the copies from it, which have begun, are over."""

    def promise(self, target: Tensor) -> Any:
        """From now on `target` may be written at any time by a `to_device` that gets what this returns; what this
        thread has given the device before still finds it as it is.
        """

    def to_host(self, source: Tensor, target: Tensor) -> DeviceCopy:
        """Begins a copy into pinned memory, of what `source` is once all that this thread has given is done."""

    def to_device(self, source: Tensor, target: Tensor, promised: Any) -> DeviceCopy:
        """Begins a copy from pinned memory. `promised`: what `promise(target)` returned."""

    def at_home(self) -> AbstractContextManager[object]:
        """A context for another thread than the training's: what it gives is worked through in one order with that."""

    def settle(self) -> None:
        """Blocks the host until all is done that this thread has given, and all copies have landed."""


class HostDevice:
    """The CPU: a `Device`."""

    kind = torch.device("cpu")
    on_host = True

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.kind

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        return host_memory(elements, dtype)

    def give_back(self, pinned: Tensor) -> None:
        """It goes with the last tensor that uses it."""

    def promise(self, target: Tensor) -> None:
        """Nothing reads it later."""

    def to_host(self, source: Tensor, target: Tensor) -> DeviceCopy:
        target.copy_(source.detach())
        return LANDED

    def to_device(self, source: Tensor, target: Tensor, promised: object) -> DeviceCopy:
        del promised
        target.detach().copy_(source)
        return LANDED

    def at_home(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None:
        """All is done."""


class _Landed:
    """A copy that was over at once."""

    has_landed = True

    def wait(self) -> None:
        """It has."""

    def join(self) -> None:
        """It has."""


LANDED = _Landed()
HOST = HostDevice()


class Accelerator:
    """A device of `torch.accelerator`: a `Device`. Copies go on two streams of their own, one each way."""

    on_host = False

    def __init__(self, kind: torch.device) -> None:
        self.kind = kind
        self._home = torch.accelerator.current_stream(kind)
        self._out, self._in = torch.Stream(kind), torch.Stream(kind)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.kind

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)

    def give_back(self, pinned: Tensor) -> None:
        """torch's allocator of pinned memory waits for the copies that were begun from it and into it."""

    def promise(self, target: Tensor) -> torch.Event:
        del target
        return self._current().record_event()

    def to_host(self, source: Tensor, target: Tensor) -> DeviceCopy:
        self._out.wait_event(self._current().record_event())
        with _on(self._out):
            target.copy_(source.detach(), non_blocking=True)
        source.record_stream(self._out)  # freed meanwhile, its memory serves nobody before the copy is over
        return _Copying(self, self._out.record_event())

    def to_device(self, source: Tensor, target: Tensor, promised: torch.Event) -> DeviceCopy:
        self._in.wait_event(promised)
        with _on(self._in):
            target.detach().copy_(source, non_blocking=True)
        target.record_stream(self._in)
        return _Copying(self, self._in.record_event())

    @contextmanager
    def at_home(self) -> Iterator[None]:
        with _on(self._home):
            yield

    def settle(self) -> None:
        for stream in (self._current(), self._home, self._out, self._in):
            stream.synchronize()

    def wait_on_device(self, event: torch.Event) -> None:
        """What this thread gives the device from now on comes after that."""
        self._current().wait_event(event)

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.kind)


class _Copying:
    """A copy on a stream."""

    def __init__(self, device: Accelerator, done: torch.Event) -> None:
        self._device, self._done = device, done

    @property
    def has_landed(self) -> bool:
        return self._done.query()

    def wait(self) -> None:
        self._done.synchronize()

    def join(self) -> None:
        self._device.wait_on_device(self._done)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """This thread's current stream, for a while. Not `with stream`, which one thread at a time can be in."""
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def device_of(tensors: Iterable[tuple[str, Tensor]]) -> Device:
    """Where a module's tensors lie; `tensors` with what they are called. Raises `UserError` where it cannot train."""
    found: dict[torch.device, str] = {}
    without_values = ""
    for name, tensor in tensors:
        if tensor.device.type == "meta":
            without_values = name
        else:
            found.setdefault(tensor.device, name)
    if len(found) > 1:
        (one, name), (other, another) = list(found.items())[:2]
        raise UserError(
            f"{name} lies on {one} and {another} on {other}; a worker trains on one device. Move the whole model there "
            'before shoal.initialize: model.to("cuda").'
        )
    kind, name = next(iter(found.items()), (HOST.kind, ""))
    if kind == HOST.kind:
        return HOST
    if without_values:
        raise UserError(
            f"{without_values} was built within shoal.deferred(), and {name} lies on {kind}; such models are trained "
            "on the CPU. Build all of it there, or none."
        )
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or kind.type != accelerator.type:
        here = "none here" if accelerator is None else f"{accelerator.type} here"
        raise UserError(f"{name} lies on {kind}; expected cpu or the accelerator of this machine ({here}).")
    return Accelerator(kind)
