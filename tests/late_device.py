"""A device that is late, on the CPU: what a forgotten wait leads to is a wrong bit, or an assertion.

A copy lands when it is waited for, or some calls later; until then its target is all ones (NaN), and its source may be
changed by whoever does not wait. Pinned memory is all ones until something lands in it, and again when it was given
back. What is computed is computed at once: a device works through it in its order, which nothing can get wrong.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

SOON = 0.25
"""How probable it is that what is on its way lands at a call."""


NOTHING = torch.empty(0)


class Late:
    """A copy that has begun."""

    def __init__(self, device: LateDevice, source: Tensor, target: Tensor) -> None:
        self._device, self.source, self.target = device, source, target
        self.landed = False

    @property
    def has_landed(self) -> bool:
        self._device.pass_time()
        return self.landed

    def wait(self) -> None:
        self._device.land(self)

    def join(self) -> None:
        self._device.land(self)


class LateDevice:
    """A `Device`."""

    kind = torch.device("cpu")
    on_host = False
    host_memory: ClassVar[dict[int, Tensor]] = {}
    """What is in the host's memory and not pinned, as far as a test says so: on a CPU nothing else tells."""

    @classmethod
    def on_the_host(cls, memory: Tensor) -> Tensor:
        """The same; from now on no device holds it."""
        cls.host_memory[int(memory.untyped_storage()._cdata)] = memory
        return memory

    def __init__(self, seed: int = 0) -> None:
        self.copies = 0
        """That have begun."""
        self.down = self.up = 0
        """Bytes of those to the host, and of those to the device."""
        self.is_settled = True
        """Whether the host has waited for all that was given."""
        self._chance, self._lock = random.Random(seed), threading.RLock()
        self._on_their_way: list[Late] = []
        self._pinned: dict[int, Tensor] = {}

    # ---- memory

    def holds(self, tensor: Tensor) -> bool:
        return self._key(tensor) not in self._pinned and self._key(tensor) not in self.host_memory

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(elements, dtype=dtype)
        _spoil(memory)
        self._pinned[self._key(memory)] = memory
        return memory

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._pinned

    def give_back(self, pinned: Tensor) -> None:
        assert not self.holds(pinned), "this memory is not pinned"
        for copy in self._on_their_way:
            if self._key(copy.source) == self._key(pinned):
                copy.source = copy.source.clone()  # as torch's allocator does, which waits for the copy
            assert self._key(copy.target) != self._key(pinned), "given back while something is copied into it"
        _spoil(pinned)
        del self._pinned[self._key(pinned)]

    def mark(self) -> None:
        """What is computed is computed at once."""

    def promise(self, target: Tensor) -> object:
        _spoil(target)
        return target

    # ---- copies

    def to_host(self, source: Tensor, target: Tensor) -> Late:
        assert self.holds(source) and not self.holds(target)
        self.down += source.nbytes
        return self._begin(source, target)

    def to_device(self, source: Tensor, target: Tensor, promised: Any) -> Late:
        assert self.holds(target) and not self.holds(source)
        assert promised.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        self.up += source.nbytes
        return self._begin(source, target)

    def _begin(self, source: Tensor, target: Tensor) -> Late:
        assert source.numel() == target.numel() and source.dtype == target.dtype
        self.is_settled = False
        self.copies += 1
        _spoil(target)
        copy = Late(self, source.data, target.data)
        self._on_their_way.append(copy)
        return copy

    def land(self, copy: Late) -> None:
        """And all that began before it: they go on one stream."""
        with self._lock:
            while not copy.landed:
                first = self._on_their_way.pop(0)
                first.target.reshape(-1).copy_(first.source.reshape(-1))
                first.source = first.target = NOTHING  # a copy that is over keeps no memory
                first.landed = True

    def pass_time(self) -> None:
        with self._lock:
            if self._on_their_way and self._chance.random() < SOON:
                self.land(self._on_their_way[0])

    # ---- order

    def at_home(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None:
        with self._lock:
            if self._on_their_way:
                self.land(self._on_their_way[-1])
            self.is_settled = True

    def moment(self) -> float:
        return time.monotonic()

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin

    def _key(self, tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)


def _spoil(memory: Tensor) -> None:
    memory.data.reshape(-1).view(torch.uint8).fill_(0xFF)
