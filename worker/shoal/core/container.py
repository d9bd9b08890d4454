"""The form of a data file: safetensors, with a header that is known before the first byte of a tensor is written.

safetensors' own writer takes tensors and makes one copy of all; a checkpoint is written from a buffer that has the
file's order already. The dtype codes are the vocabulary of manifests too. Any safetensors library reads the files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.core.value_places import Places

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The format's name of every dtype that it knows."""

DTYPES = {code: dtype for dtype, code in CODES.items()}
LENGTH_BYTES = 8
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
LARGE_BYTES = 1 << 20
"""Data of this size begins at a page, so that it may go to a disk as it lies in memory."""


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor of a data file. `at` counts from the file's first byte in manifests, from the data's in a snapshot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def header(regions: Sequence[Region], metadata: Mapping[str, str]) -> bytes:
    """What stands before the data. The regions follow each other without a gap, from 0 on."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for region in regions:
        entries[region.name] = {
            "dtype": CODES[region.dtype],
            "shape": list(region.shape),
            "data_offsets": [region.at, region.at + region.bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    large = bool(regions) and regions[-1].at + regions[-1].bytes >= LARGE_BYTES
    text += b" " * (-(LENGTH_BYTES + len(text)) % (PAGE_BYTES if large else ALIGNMENT_BYTES))
    return struct.pack("<Q", len(text)) + text


def count_of(places: Places | None, first: int, stop: int) -> int:
    """How many of elements `[first, stop)` have a value; None: all."""
    return stop - first if places is None else places.before(stop) - places.before(first)


def ends_of(places: Places | None, bounds: Sequence[int]) -> list[int]:
    """How many values there are from the first bound to each of the others."""
    return [count_of(places, bounds[0], bound) for bound in bounds[1:]]
