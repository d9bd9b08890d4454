"""Tensors of safetensors files by name, read in parts: what a model that was built without memory begins with.

A file, or a folder of files with or without `model.safetensors.index.json`. Nothing is read but what is asked for.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from shoal_protos.errors import UserError
from torch import Tensor

INDEX = "model.safetensors.index.json"
SAMPLE_ELEMENTS = 256


class Pretrained:
    """Raises `UserError` where there is nothing to read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _files(path):
            self._file_of.update(dict.fromkeys(self._reader(file).keys(), file))
        if not self._file_of:
            raise UserError(f"{path} holds no tensors; expected a safetensors file, or a folder of such.")

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._file_of)

    def identity(self) -> str:
        """A digest of names, shapes and dtypes, and of two samples of every tensor's content: all of it would take as
        long as reading the files whole, and other weights differ in every tensor. Where a sample lies is in no file.
        """
        total = hashlib.sha256()
        for name in sorted(self._file_of):
            part = self._reader(self._file_of[name]).get_slice(name)
            total.update(f"{name} {part.get_dtype()} {part.get_shape()}\n".encode())
            elements = torch.Size(self.shape(name)).numel()
            place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            for first in (0, place % max(1, elements - SAMPLE_ELEMENTS)):
                sample = self.part(name, first, min(elements, first + SAMPLE_ELEMENTS))
                total.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:32]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `names`."""
        return tuple(self._reader(self._file_of[name]).get_slice(name).get_shape())

    def code(self, name: str) -> str:
        """The format's name of the dtype of one of `names`."""
        return str(self._reader(self._file_of[name]).get_slice(name).get_dtype())

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the file's dtype
        """Elements of a tensor, flat. Raises `UserError` where they cannot be read."""
        file = self._file_of[name]
        try:
            reader, shape = self._reader(file), self.shape(name)
            if not shape:
                return _tensor(reader.get_tensor(name)).reshape(-1)[first:last]
            row = max(1, torch.Size(shape[1:]).numel())
            begin, end = first // row, -(-last // row)
            rows = _tensor(reader.get_slice(name)[begin:end]).reshape(-1)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}.") from error
        return rows[first - begin * row : last - begin * row]

    def _reader(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} is not a safetensors file that can be read: {error}.") from error
        return self._open[file]


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if not index.exists():
        return sorted(path.glob("*.safetensors"))
    try:
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {error!r}.") from error
    for file in files:
        if not file.exists():
            raise UserError(f"{index} names {file.name}, which does not exist.")
    return files
