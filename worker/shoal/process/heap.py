"""The C library's heap: what a step frees stays with the process, because the next step takes as much again.

By default glibc gives memory back to the kernel wherever the end of its heap is free, which it is after each backward;
so every step met new pages for its activations and for what it receives. A step of 10M parameters had 3,800 page faults
and paid for them with 3 to 4 % of its time. The peak of a process is what it was; it is not
given back between steps. Knows no tensors. See mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES = (1 << 31) - 1
"""So much may be free at the end of the heap: the most that mallopt takes."""
MMAP_BYTES = 32 << 20
"""Smaller blocks come from the heap: the most that mallopt takes."""
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Whether freed memory is kept from now on: not where the user has tuned the heap, nor where it is not glibc's."""
    variables = os.environ if environ is None else environ
    if any(name in variables for name in USERS_OWN) or "glibc.malloc." in variables.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(parameter, value) == 1
        for parameter, value in ((M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES))
    )
