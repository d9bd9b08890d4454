"""The memory of a process on its host: tensors in huge pages, tensors as bytes, and a heap that keeps what is freed.

What is large and lives long gets huge pages, where the system gives them, and so does what the heap of a worker grows
by. Such memory is found at a fifth of the cost, and digesting and copying it is a fifth to two fifths cheaper than in
pages of 4 KiB, which makes checkpoints that much cheaper to take and to read. And a killed process is gone sooner: what
its memory takes to be given back others lack, and only then its port refuses connections, which proves its death to
other hosts. Elsewhere it is memory like any other.

After `keep_freed_memory`, which is called when a worker starts, the C library's heap keeps what a step frees: the next
step takes as much again. By default glibc gives memory back to the kernel wherever the end of its heap is free, which
it is after each backward; so every step met new pages for its activations and for what it receives. A step of 10M
parameters had 3,800 page faults and paid for them with 3 to 4 % of its time. The peak of a process is what it was; it
is not given back between steps. See mallopt(3). Memory of devices is in device.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def host_memory(elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
    """Zeros, whose memory goes with the last tensor that uses it."""
    count = elements * dtype.itemsize
    if count < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(elements, dtype=dtype)
    region = mmap.mmap(-1, count + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without huge pages; the last part of a page stays in small ones
        region.madvise(mmap.MADV_HUGEPAGE, first, count // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.frombuffer(region, dtype=dtype, count=elements, offset=first)


class ReusedMemory:
    """Memory of one tensor after the other: for what is read or made of many large ones. It is as large as the largest
    one, and the system finds it once.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:  # of that shape and dtype
        """With any values. What was taken before is void."""
        count = math.prod(shape) * dtype.itemsize
        if self._memory.numel() < count:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the smaller one goes before the larger one comes
            self._memory = host_memory(count, torch.uint8)
        return self._memory[:count].view(dtype).view(shape)


def memory_on(device: torch.device, elements: int, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
    """Zeros for what is large and lives long, wherever a model is."""
    if device.type == "cpu":
        return host_memory(elements, dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def tensor_bytes(
    tensor: Tensor,  # of any shape and dtype
) -> memoryview:
    """The bytes of a tensor in memory order: its own memory, to be read or written, where it is contiguous."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES = (1 << 31) - 1
"""So much may be free at the end of the heap: the most that mallopt takes."""
MMAP_BYTES = 32 << 20
"""Smaller blocks come from the heap: the most that mallopt takes."""
BLOCK_BYTES, HEAP_BLOCKS = MMAP_BYTES - (64 << 10), 32
"""What the heap grows by at the start, so many times: 1 GiB. Each must be smaller than what lies apart."""
APART_BYTES = 128 << 10
"""What is larger lies apart from the heap; so glibc begins."""
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Whether freed memory is kept from now on: not where the user has tuned the heap, nor where it is not glibc's."""
    is_kept = _tuned({M_MMAP_THRESHOLD: MMAP_BYTES, M_TRIM_THRESHOLD: TRIM_BYTES}, environ)
    if is_kept and hasattr(mmap, "MADV_HUGEPAGE"):
        _grow_in_huge_pages()
    return is_kept


@cache
def _grow_in_huge_pages() -> None:
    """Takes addresses for what the heap will hold. Memory comes when they are written first, and then in huge pages.
    Once: what a second engine's blocks begin with would lie there, and each would take a huge page.
    """
    library, size = ctypes.CDLL(None), ctypes.c_size_t(BLOCK_BYTES)
    library.malloc.restype = ctypes.c_void_p
    blocks = [found for _ in range(HEAP_BLOCKS) if (found := library.malloc(size))]
    for block in blocks:
        first = block + -block % HUGE_PAGE_BYTES
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(MMAP_BYTES), mmap.MADV_HUGEPAGE)  # up to the next one's
    for block in blocks:
        library.free(ctypes.c_void_p(block))


def give_back_freed_memory() -> bool:
    """Whether what is large goes back to the system from now on where it is freed, as `keep_freed_memory` says. By
    default glibc does so only until the first of its size is freed, and what is read in turn piles up beside it.
    """
    return _tuned({M_MMAP_THRESHOLD: APART_BYTES})


def _tuned(values: Mapping[int, int], environ: Mapping[str, str] | None = None) -> bool:
    variables = os.environ if environ is None else environ
    if any(name in variables for name in USERS_OWN) or "glibc.malloc." in variables.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(parameter, value) == 1 for parameter, value in values.items())
