"""Tensors and other values of a folder of `torch.distributed.checkpoint`: checked against its files, then read.

Called by `model_file.py`. What a file holds must be what the index says: the same shape and dtype, every element once.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.checkpoint.dcp_index import Chunk, Index, StoredBytes, StoredTensor, first_line
from shoal.checkpoint.named import Known
from shoal.core.container import CODES

VALUE_BYTES = 1 << 20
"""Of a pickled number, far less."""
READ_BYTES = 1 << 20
"""What is in the cache while its checksum is made."""


class FolderTensors:
    """What `index` names of a folder. Has the tensor in memory that was read last, and no other."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._whole: tuple[str, Tensor] | None = None
        """What was read last, flat."""

    # ---- what is there

    def known(self, name: str) -> Known:
        """Raises `UserError` where a checkpoint cannot hold it, or not all of it is there, once."""
        entry = self._index.tensors[name]
        if entry.dtype not in CODES:
            raise UserError(f'{self._folder} holds "{name}" with dtype {entry.dtype}, which a checkpoint cannot hold.')
        for chunk in entry.chunks:
            self._check_chunk(name, entry, chunk)
        elements, found = math.prod(entry.shape), sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if elements != found or _overlap(entry.chunks):
            there = f"{found:,} are there" if elements != found else "some of its parts overlap"
            raise UserError(
                f'{self._folder} is damaged: "{name}" has shape {entry.shape}, which is {elements:,} elements, and '
                f"{there}. Save it again, or copy the whole folder."
            )
        return Known(entry.shape, entry.dtype)

    def _check_chunk(self, name: str, entry: StoredTensor, chunk: Chunk) -> None:
        is_inside = len(chunk.ends) == len(entry.shape) and all(map(int.__le__, chunk.ends, entry.shape))
        if not is_inside or chunk.file_range is None:
            raise UserError(
                f'{self._folder} is damaged: a part of "{name}" with offsets {chunk.offsets} and shape {chunk.sizes} '
                f"{'is in no file' if is_inside else f'does not lie in its shape {entry.shape}'}."
            )
        self._check_range(name, chunk.file_range)
        least = math.prod(chunk.sizes) * entry.dtype.itemsize
        if chunk.file_range.bytes < least:
            raise UserError(
                f'{self._folder} is damaged: a part of "{name}" with shape {chunk.sizes} takes {least:,} bytes, and '
                f"{chunk.file_range.bytes:,} are there."
            )

    def _check_range(self, name: str, file_range: StoredBytes) -> None:
        path, end = self._folder / file_range.file, file_range.start + file_range.bytes
        if Path(file_range.file).name != file_range.file or not path.is_file():
            raise UserError(
                f'{self._folder} lacks the file {file_range.file}, which holds "{name}"; copy the whole folder.'
            )
        if path.stat().st_size < end:
            raise UserError(
                f'{path} has {path.stat().st_size:,} bytes, and "{name}" ends at byte {end:,}; copy the whole folder.'
            )
        if file_range.transforms:
            raise UserError(
                f'{path} holds "{name}" in another form ({", ".join(file_range.transforms)}); save it without '
                "extensions."
            )

    # ---- values

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the tensor's dtype
        """Elements of a tensor, flat."""
        if self._whole is None or self._whole[0] != name:
            self._whole = None
            self._whole = name, self._read(name)
        return self._whole[1][first:last]

    def _read(self, name: str) -> Tensor:  # (elements,)
        entry = self._index.tensors[name]
        if len(entry.chunks) == 1:
            return self._chunk(name, entry, entry.chunks[0]).reshape(-1)
        try:
            found = torch.zeros(entry.shape, dtype=entry.dtype)
        except RuntimeError:
            size = math.prod(entry.shape) * entry.dtype.itemsize
            raise UserError(f'{self._folder} holds "{name}" of {size:,} bytes, for which memory is lacking.') from None
        for chunk in entry.chunks:
            found[tuple(map(slice, chunk.offsets, chunk.ends))] = self._chunk(name, entry, chunk)
        return found.reshape(-1)

    def _chunk(self, name: str, entry: StoredTensor, chunk: Chunk) -> Tensor:  # of the chunk's shape
        assert chunk.file_range is not None, "checked when its shape was asked for"
        found = self._loaded(name, chunk.file_range)
        is_plain = type(found) in (Tensor, nn.Parameter) and found.device.type == "cpu" and not found.is_sparse
        if not is_plain or (found.shape, found.dtype) != (chunk.sizes, entry.dtype):
            raise UserError(
                f'{self._folder} is damaged: "{name}" cannot be read: a part of it is {_described(found)}, and by the '
                f"index {entry.dtype} of shape {chunk.sizes}."
            )
        plain: Tensor = found.detach()
        return plain

    def value(self, name: str) -> Any:
        """What is no tensor: a number, most often. Raises `UserError` where it is damaged or large."""
        file_range = self._index.values[name]
        if file_range is None:
            raise UserError(f'{self._folder} is damaged: "{name}" is in no file.')
        self._check_range(name, file_range)
        if file_range.bytes > VALUE_BYTES:
            raise UserError(f'{self._folder} has {file_range.bytes:,} bytes of "{name}", where a number is expected.')
        return self._loaded(name, file_range)

    def _loaded(self, name: str, file_range: StoredBytes) -> Any:
        try:
            with (self._folder / file_range.file).open("rb") as file:
                file.seek(file_range.start)
                content = io.BytesIO(file.read(file_range.bytes))
            _check_records(content)
            content.seek(0)
            return torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # torch's own words advise to run it
            why = "it is neither a plain tensor nor a plain value"
        except Exception as error:  # damage raises whatever it makes of the file
            why = first_line(error)
        raise UserError(f'{self._folder} is damaged: "{name}" cannot be read: {why}.')


def _check_records(content: io.BytesIO) -> None:
    """Checks what torch does not when it loads: each record's CRC, unless whoever saved it left all of them out (0).

    Raises `zipfile.BadZipFile`. Older forms of torch's files have none.
    """
    if not zipfile.is_zipfile(content):
        return
    with zipfile.ZipFile(content) as records:
        if sum(record.file_size for record in records.infolist()) > content.getbuffer().nbytes:
            raise zipfile.BadZipFile("its records are larger than it is")
        for record in records.infolist():
            if not record.CRC:
                continue
            with records.open(record) as data:
                while data.read(READ_BYTES):
                    pass


def _overlap(chunks: Iterable[Chunk]) -> bool:
    """Whether two boxes have an element in common. Along the axis with the most cuts few lie beside each other."""
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(filled) < 2 or not filled[0].sizes:
        return len(filled) > 1
    axis = max(range(len(filled[0].sizes)), key=lambda one: len({chunk.offsets[one] for chunk in filled}))
    filled.sort(key=lambda chunk: chunk.offsets[axis])
    for number, chunk in enumerate(filled):
        for other in islice(filled, number + 1, None):
            if other.offsets[axis] >= chunk.ends[axis]:
                break
            if all(map(int.__lt__, chunk.offsets, other.ends)) and all(map(int.__lt__, other.offsets, chunk.ends)):
                return True
    return False


def _described(
    found: Any,  # a tensor of any shape, or anything else
) -> str:
    return f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
