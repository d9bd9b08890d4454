"""Exact bytes of tensors in a process: the counter of memory.py, the same for Shoal and for what it is compared with.

`preloaded(folder)` builds tensor_bytes.c and says what a process's environment needs; in that process `TensorBytes`
reads it. Counts every tensor on the CPU from its allocation to its end, on whatever thread, also those that no line of
Python sees. State that Shoal keeps in huge pages is not torch's: `in_torchs_memory` puts it there. Nor are parameters
that other workers of the host see (stage 3): `seen_bytes` counts these, and what lies beneath the flats.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it is for processes without Shoal too
    from shoal.blocks.sharded_memory import ShardedMemory, WholeMemory

MAPPING = re.compile("([0-9a-f]+)-[0-9a-f]+ ")
"""The first line that the kernel tells of a mapping, with its first address."""
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


def seen_bytes(memory: WholeMemory | ShardedMemory) -> int:
    """What a worker has taken besides: parameters of blocks that it holds, and units of which it has a copy now."""
    if memory.shared is None or memory.mapped is None:
        return 0
    first, last = memory.mapped.addresses
    copies, is_within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := MAPPING.match(line):
            is_within = first <= int(found[1], 16) < last
        elif is_within and line.startswith("Anonymous:"):
            copies += int(line.split()[1]) * 1024
    return memory.shared.taken_bytes + copies


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
