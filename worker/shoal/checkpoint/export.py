"""A checkpoint as a plain `model.safetensors`: the model's own names, in its own or another dtype.

Tied tensors are written once, and the metadata says which other names they have, as `engine.export` does. Tensor by
tensor, so that a model larger than memory can be exported; every block is verified on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from shoal_protos.errors import UserError

from shoal.blocks.host_memory import tensor_bytes
from shoal.checkpoint.container import Region, header
from shoal.checkpoint.errors import StorageFull
from shoal.checkpoint.named import Known, names, shows_masters, tensors
from shoal.checkpoint.reader import Reader
from shoal.checkpoint.storage import LocalStorage

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What `--dtype` takes; tensors of whole numbers and truth values keep their own."""


def dtype_named(name: str) -> torch.dtype:
    """Raises `UserError` naming what is allowed."""
    if name not in FLOATS:
        raise UserError(f"--dtype is {name}; expected {', '.join(FLOATS)}.")
    return FLOATS[name]


def export(reader: Reader, file: Path, dtype: torch.dtype | None) -> None:
    """Writes the file; it is whole or not there. An old one of that name is replaced. Raises `UserError`."""
    if not file.name or file.is_dir():
        raise UserError(f"{file} is a folder; name the file to write, such as {file / 'model.safetensors'}.")
    regions, at = list[Region](), 0
    for name, known in names(reader.manifest).items():
        regions.append(Region(name, _converted(known, dtype), known.shape, at))
        at += regions[-1].bytes
    metadata = {"format": "pt", **reader.manifest.layout.tied}
    beside = f".{file.name}.{os.getpid()}"
    try:
        LocalStorage(file.absolute().parent).write(beside, _stream(regions, header(regions, metadata), reader, dtype))
        file.with_name(beside).replace(file)
    except (OSError, StorageFull) as error:
        raise cannot_export(file, error) from error


def cannot_export(place: Path, why: BaseException) -> UserError:
    """What can be done about a place that takes no export."""
    reason = "there is no room" if isinstance(why, StorageFull) else f"{getattr(why, 'strerror', '') or why}"
    return UserError(f"cannot export the model to {place}: {reason}; choose a place that can be written and has room.")


def _converted(known: Known, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and known.dtype.is_floating_point else known.dtype


def _stream(regions: Sequence[Region], head: bytes, reader: Reader, dtype: torch.dtype | None) -> Iterator[memoryview]:
    yield memoryview(head)
    for region, (name, tensor) in zip(regions, tensors(reader, exact=shows_masters(dtype)), strict=True):
        assert region.name == name, f"{name} is where {region.name} was expected"
        yield tensor_bytes(tensor.to(region.dtype))
