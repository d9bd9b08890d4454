"""The wire of NVIDIA's devices: NCCL's sends and receives, one communicator for each generation.

Run on one GPU that several members shared, never on several (docs/devices.md). Members know without asking whether a
group has a wire: each says at the rendezvous which device it has, and NCCL is used where all have one of their own.
Only `abort` ends a wait, as everywhere: the process group's own watchdog, which would end the process, is off, and its
time-out is a day. What is carried goes on a stream of its own, behind what the device was given when a message was
posted. Called by the session's builder thread, and by ordered.py.

`NcclStore` has the one value that NCCL asks for while it connects: rank 0 has it and all others wait for it, over the
host's group. Called on the builder's thread only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.group.build import Cancellation
from shoal.group.gloo import FOREVER, GlooGroup
from shoal.group.group import RESERVED_TAGS, Group, WorldChanged
from shoal.group.ordered import CarriedMessage
from shoal.process.device import Accelerator, on_stream

WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Read by a process group when it is made (ProcessGroupNCCL.hpp)."""


def own_device(kind: torch.device) -> bytes:
    """What tells this device from all others of any machine; empty where it cannot take part."""
    if kind.type != "cuda" or not dist.is_nccl_available():
        return b""
    return str(torch.cuda.get_device_properties(kind).uuid).encode()


def build_nccl(host: GlooGroup, device: Accelerator, cancellation: Cancellation) -> NcclWire:
    """Connects the devices of all members of `host`. Raises `WorldChanged`."""
    os.environ.update(WATCHDOG_OFF)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = FOREVER
    store = NcclStore(host)
    try:
        backend = nccl(store, host.rank, host.size, options)
        cancellation.on_cancel(backend.abort)
        backend.eager_connect_single_device(device.kind)
    except RuntimeError as error:
        raise WorldChanged(f"the devices of {host.size} workers could not be connected by NCCL: {error}") from None
    return NcclWire(backend, store, device)


class NcclWire:
    """A `Wire`."""

    def __init__(self, backend: Any, store: NcclStore, device: Accelerator) -> None:
        self._backend, self._store, self._kind = backend, store, device.kind
        self._stream = torch.Stream(device.kind)
        self._group: Any = dist.ProcessGroup(store, backend.rank(), backend.size())
        """As sends and receives are grouped through it: `_start_coalescing` is the way of `batch_isend_irecv`."""
        self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._group._register_backend(device.kind, dist.ProcessGroup.BackendType.NCCL, backend)

    def carry(self, messages: Sequence[CarriedMessage]) -> Callable[[], None]:
        with on_stream(self._stream):
            for message in messages:
                self._stream.wait_event(message.given)
            self._group._start_coalescing(self._kind)
            for message in messages:
                act = self._group.send if message.post.sends else self._group.recv
                act([message.tensor], message.post.peer, 0)
            work = self._group._end_coalescing(self._kind)
            work.wait()
            done = self._stream.record_event()
        return done.synchronize

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        """What still runs of an aborted communicator ends, and only then may its buffers serve others."""
        self._backend.abort()
        self._stream.synchronize()


STORE_TAG = RESERVED_TAGS + 4


class NcclStore(Store):
    """Values that rank 0 sets, in the order in which the others get them. A reference must be kept as long as a process
    group uses it.
    """

    def __init__(self, host: Group) -> None:
        super().__init__()
        self._host = host

    def set(self, key: str, value: str | bytes) -> None:
        del key
        content = value.encode() if isinstance(value, str) else bytes(value)
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        size = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
        others = [peer for peer in range(self._host.size) if peer != self._host.rank]
        works = [self._host.send(message, peer, STORE_TAG) for peer in others for message in (size, body)]
        self._host.wait(works)

    def get(self, key: str) -> bytes:
        del key
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._host.wait([self._host.receive(size, 0, STORE_TAG)])
        body = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        self._host.wait([self._host.receive(body, 0, STORE_TAG)])
        return body.numpy().tobytes()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """`get` waits."""

    def has_extended_api(self) -> bool:
        return False
