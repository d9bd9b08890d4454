"""The device that a worker computes on, and what waits for what between it and the host. Accelerators are behind it.

A device works through what it is given in its own time: a call that returns has only given it something. What the host
hands on (to a peer, to a file, into a vote) has to have landed first, and memory that the device still reads or writes
must stay as it is. On the CPU all of it is over when the call returns: `HOST` waits for nothing and costs nothing.
Everything else takes the device from the module's parameters. Generators of random numbers and what makes kernels exact
are here too. Knows no group; besides this file only groups may know what kind of device it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.process.host_memory import host_memory


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

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in such memory."""

    def give_back(self, pinned: Tensor) -> None:
        """That memory is not needed any more: it serves others once the copies from it, which have begun, are over."""

    def mark(self) -> Any:
        """What this thread has given the device until now: whoever is given it comes after that."""

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

    def moment(self) -> Any:
        """When the device has done all that this thread has given it until now: an end of `seconds_between`."""

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        """Seconds from one moment to a later one; None: the device has not come to that yet."""


class HostDevice:
    """The CPU: a `Device`."""

    kind = torch.device("cpu")
    on_host = True

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.kind

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        return host_memory(elements, dtype)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def give_back(self, pinned: Tensor) -> None:
        """It goes with the last tensor that uses it."""

    def mark(self) -> None:
        """All of it is done."""

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

    def moment(self) -> float:
        return time.monotonic()

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin


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

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def give_back(self, pinned: Tensor) -> None:
        """torch's allocator of pinned memory waits for the copies that were begun from it and into it."""

    def mark(self) -> torch.Event:
        return self._current().record_event()

    def promise(self, target: Tensor) -> torch.Event:
        del target
        return self.mark()

    def to_host(self, source: Tensor, target: Tensor) -> DeviceCopy:
        self._out.wait_event(self._current().record_event())
        with on_stream(self._out):
            target.copy_(source.detach(), non_blocking=True)
        source.record_stream(self._out)  # freed meanwhile, its memory serves nobody before the copy is over
        return _Copying(self, self._out.record_event())

    def to_device(self, source: Tensor, target: Tensor, promised: torch.Event) -> DeviceCopy:
        self._in.wait_event(promised)
        with on_stream(self._in):
            target.detach().copy_(source, non_blocking=True)
        target.record_stream(self._in)
        return _Copying(self, self._in.record_event())

    @contextmanager
    def at_home(self) -> Iterator[None]:
        with on_stream(self._home):
            yield

    def settle(self) -> None:
        for stream in (self._current(), self._home, self._out, self._in):
            stream.synchronize()

    def moment(self) -> torch.Event:
        event = torch.Event(self.kind, enable_timing=True)
        event.record(self._current())
        return event

    def seconds_between(self, begin: torch.Event, end: torch.Event) -> float | None:
        return begin.elapsed_time(end) / 1e3 if end.query() else None

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
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """This thread's current stream, for a while. Not `with stream`, which one thread at a time can be in."""
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def device_of(tensors: Iterable[tuple[str, Tensor]]) -> Device:
    """Where a module's tensors lie; `tensors` with what they are called. What has no values yet follows the rest.

    Raises `UserError` where it cannot train.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in tensors:
        if tensor.device.type != "meta":
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
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or kind.type != accelerator.type:
        here = "none here" if accelerator is None else f"{accelerator.type} here"
        raise UserError(f"{name} lies on {kind}; expected cpu or the accelerator of this machine ({here}).")
    return Accelerator(kind)


# ---- what of an accelerator belongs to no tensor

ACCELERATOR_PRECISIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
"""Parts of `torch.backends` whose precision decides bits there."""
WORKSPACE = ":4096:8"
"""What deterministic cuBLAS needs (eight buffers of 4 MiB): docs.nvidia.com/cuda/cublas, "Results reproducibility"."""


@cache
def _backend() -> Any:
    """torch's module of this machine's accelerators (`torch.cuda` and the like); None: there are none that draw random
    numbers.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    found = None if kind is None else torch.get_device_module(kind)
    return found if hasattr(found, "get_rng_state_all") else None


def make_accelerator_exact() -> None:
    """Deterministic algorithms and no autotuning, where there are kernels that need it; before one is used."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over all memory that is found


def described(device: torch.device) -> str:
    """A kind of device, and what else of it decides bits: as a job's numeric identity has it."""
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of an NVIDIA GPU, without its prefix; empty for every other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def seed_accelerators(word: int) -> None:
    """Seeds their generators, also where none is in use yet: it takes the seed up then."""
    backend = _backend()
    if backend is not None:
        backend.manual_seed_all(word)


def accelerators_random_state() -> tuple[Tensor, ...]:  # each (bytes,) uint8
    """Where their generators stand, one a device; empty where none is in use."""
    backend = _backend()
    return tuple(backend.get_rng_state_all()) if backend is not None and backend.is_initialized() else ()


def restore_accelerators_random_state(
    states: Sequence[Tensor],  # each (bytes,) uint8
) -> None:
    """As `accelerators_random_state` returned it."""
    _backend().set_rng_state_all(list(states))
