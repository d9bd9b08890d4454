"""Exact bytes of tensors in a process: the counter of memory.py, the same for Shoal and for what it is compared with.

`preloaded(folder)` builds tensor_bytes.c and says what a process's environment needs; in that process `TensorBytes`
reads it. Counts every tensor on the CPU from its allocation to its end, on whatever thread, also those that no line of
Python sees. State that Shoal keeps in huge pages is not torch's: `in_torchs_memory` puts it there.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def preloaded(folder: Path) -> dict[str, str]:
    """Variables of a process that is to be counted. `folder`: where the library is built."""
    library = folder / "tensor_bytes.so"
    if not library.exists():
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return {"LD_PRELOAD": str(library)}


def in_torchs_memory() -> None:
    """Before Shoal holds anything: blocks of any size come from torch's allocator."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        del mmap.MADV_HUGEPAGE


class TensorBytes:
    """Of this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "tensor_bytes_now"):
            raise RuntimeError("this process was not started with the variables of tensor_bytes.preloaded(folder)")
        self._now, self._most = library.tensor_bytes_now, library.tensor_bytes_most
        self._now.restype = self._most.restype = ctypes.c_size_t
        self.forget_most = library.tensor_bytes_forget_most
        """From now on `most` is anew."""

    @property
    def now(self) -> int:
        return int(self._now())

    @property
    def most(self) -> int:
        """At one time since `forget_most`."""
        return int(self._most())
