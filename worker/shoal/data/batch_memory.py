"""A batch on its way from a data worker: packed into memory without a name, of which a descriptor is sent.

Tensors and arrays are not copied on arrival: they lie in that memory, which goes with the last of them. Strides, shared
storages and the alignment of addresses stay, so that kernels give the bits that they give without data workers. Nothing
is left behind by a process that is killed: no file, no segment of shared memory with a name.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy
import torch
from torch import Tensor

HEADER = struct.Struct("<QQQ")
"""Bytes of the memory; of the pickle; number of buffers, whose places and lengths lie behind it."""
SPAN = struct.Struct("<QQ")
ALIGNMENT = 64


class _Bytes:
    """The bytes of a storage. An object of its own, so that tensors which share it share it afterwards."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage


class _Packer(pickle.Pickler):
    """Leaves what tensors hold to `buffers`, as Python's pickles of protocol 5 do it for arrays."""

    def __init__(self, target: BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(target, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        self._storages: dict[tuple[int, int], _Bytes] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is _Bytes:
            content: Any = value.storage.numpy()
            return _storage, (pickle.PickleBuffer(content),)
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        first, count = _extent(value)
        storage = value.untyped_storage()
        if storage.nbytes() <= 2 * count:
            first, count = 0, storage.nbytes()
        span = (storage.data_ptr() + first, count)
        if span not in self._storages:
            self._storages[span] = _Bytes(torch.empty(0, dtype=torch.uint8).set_(storage, first, (count,), (1,)))
        offset = value.storage_offset() - first // value.element_size()
        return _tensor, (self._storages[span], value.dtype, offset, tuple(value.shape), value.stride())


def _is_plain(value: Tensor) -> bool:
    """Whether its values are the bytes of its storage and nothing hangs on it."""
    at_rest = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
    return at_rest and not (value.numel() == 0 or value.is_quantized or value.is_conj() or value.is_neg())


def _extent(value: Tensor) -> tuple[int, int]:
    """First byte and number of bytes of the storage that the tensor reaches."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return int(value.storage_offset()) * value.element_size(), reach * value.element_size()


def _storage(buffer: Any) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _tensor(storage: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), offset, tuple(shape), tuple(stride))


def send(channel: socket.socket, value: Any) -> None:
    """Packs and sends. Raises what pickling raises, `OSError` where nobody receives any more."""
    packed, buffers = BytesIO(), list[memoryview]()
    _Packer(packed, buffers).dump(value)
    at = HEADER.size + packed.tell() + SPAN.size * len(buffers)
    spans = []
    for buffer in buffers:
        at += (_address(buffer) - at) % ALIGNMENT
        spans.append((at, buffer.nbytes))
        at += buffer.nbytes
    descriptor = _memory()
    try:
        os.ftruncate(descriptor, at)
        with mmap.mmap(descriptor, at) as memory:
            memory[HEADER.size : HEADER.size + packed.tell()] = packed.getbuffer()
            for number, (span, buffer) in enumerate(zip(spans, buffers, strict=True)):
                SPAN.pack_into(memory, HEADER.size + packed.tell() + SPAN.size * number, *span)
                memory[span[0] : span[0] + span[1]] = buffer
        socket.send_fds(channel, [HEADER.pack(at, packed.tell(), len(buffers))], [descriptor])
    finally:
        os.close(descriptor)


def receive(channel: socket.socket) -> Any:
    """What was sent. Raises `EOFError` where the sender is gone."""
    message, descriptors, _, _ = socket.recv_fds(channel, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise EOFError
    while len(message) < HEADER.size:
        message += _some(channel, HEADER.size - len(message))
    size, pickled, count = HEADER.unpack(message)
    try:
        memory = memoryview(mmap.mmap(descriptors[0], size, flags=_FLAGS))
    finally:
        os.close(descriptors[0])
    end = HEADER.size + pickled
    spans = [SPAN.unpack_from(memory, end + SPAN.size * number) for number in range(count)]
    return pickle.loads(memory[HEADER.size : end], buffers=[memory[at : at + length] for at, length in spans])


_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


def _some(channel: socket.socket, most: int) -> bytes:
    received = channel.recv(most)
    if not received:
        raise EOFError
    return received


def _address(buffer: memoryview) -> int:
    return int(numpy.frombuffer(buffer, dtype=numpy.uint8).__array_interface__["data"][0]) if buffer.nbytes else 0


def _memory() -> int:
    """A descriptor of memory that nobody else can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal-batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
