"""A plain model file: tensors by name, read in parts, from safetensors, from a torch state dict, or from a folder that
`torch.distributed.checkpoint` wrote.

Nothing of a file's code is run. A torch file is mapped, not read, where it is of today's format.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.checkpoint.container import CODES, DTYPES
from shoal.checkpoint.dcp_folder import DcpFolder
from shoal.checkpoint.dcp_index import INDEX
from shoal.checkpoint.named import Known
from shoal.first_values.pretrained import Pretrained

WRAPPINGS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts keep a model's state dict among other things."""


MOST_REPEATS = 8
"""What tensors may share of a file, which views of one buffer do."""


class ModelFile(Protocol):
    """What a file holds. Tensors that are tied are there once."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Their other names, each with the one under which they are there."""

    @property
    def known(self) -> Mapping[str, Known]:
        """All tensors by name."""

    @property
    def states(self) -> Mapping[str, Mapping[str, Known]]:
        """Optimizer states by parameter and key: of its parameter's shape, or one number."""

    @property
    def left_out(self) -> Sequence[str]:
        """What else lies there."""

    @property
    def rates(self) -> Sequence[float]:
        """Learning rates that the optimizer had, each once. Nobody takes them over."""

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the tensor's dtype
        """Elements of a tensor, flat."""
        ...

    def state_part(self, name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,) of the state's dtype
        """Elements of one of `states`, flat."""
        ...


def open_model(file: Path) -> ModelFile:
    """Raises `UserError` for a file or folder that holds no model."""
    if file.is_dir():
        is_plain = not (file / INDEX).exists() and any(file.glob("*.safetensors"))
        return _Safetensors(Pretrained(file)) if is_plain else DcpFolder(file)
    try:
        with file.open("rb") as opened:
            head = opened.read(9)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        if head[8:9] == b"{":
            content: Any = Pretrained(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (UserError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"{file} is neither safetensors nor a torch state dict: {_reason(error)}") from None
    return _Safetensors(content) if isinstance(content, Pretrained) else _StateDict(content, file)


def _reason(error: Exception) -> str:
    """One line. torch says what it found between two pieces of advice on how to load what may run code."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    found = next((line for line in lines if "unsupported" in line.lower()), lines[0])
    return found.partition(" Please ")[0].strip()[:200]


class _ModelAlone:
    """A file without an optimizer."""

    states: Mapping[str, Mapping[str, Known]] = {}
    left_out: Sequence[str] = ()
    rates: Sequence[float] = ()

    def state_part(self, name: str, key: str, first: int, last: int) -> Tensor:  # noqa: ARG002
        raise KeyError(key)


class _Safetensors(_ModelAlone):
    """Two names of one tensor are two tensors there."""

    def __init__(self, source: Pretrained) -> None:
        self._source, self.tied = source, dict[str, str]()
        codes = {name: source.code(name) for name in sorted(source.names)}
        for name, code in codes.items():
            if code not in DTYPES:
                raise UserError(f'{source.path} holds "{name}" with dtype {code}, which a checkpoint cannot hold.')
        self.known = {name: Known(source.shape(name), DTYPES[code]) for name, code in codes.items()}

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,)
        return self._source.part(name, first, last)


class _StateDict(_ModelAlone):
    def __init__(self, content: Any, file: Path) -> None:
        self._tensors, self.tied = _once(_checked(content, file))
        _check_size(self._tensors, file)
        self.known = {name: Known(tuple(one.shape), one.dtype) for name, one in self._tensors.items()}

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,)
        return self._tensors[name].reshape(-1)[first:last]


def _checked(content: Any, file: Path) -> dict[str, Tensor]:
    for key in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{file} holds a {type(content).__name__}; expected a state dict, names with tensors.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f'{file} holds a {type(value).__name__} under "{name}"; expected a state dict, names with tensors.'
            )
        if value.dtype not in CODES:
            raise UserError(f'{file} holds "{name}" with dtype {value.dtype}, which a checkpoint cannot hold.')
    return dict(content)


def _check_size(tensors: Mapping[str, Tensor], file: Path) -> None:  # each of any shape
    """A file of any size can say that it repeats a number without end."""
    size, most = sum(one.numel() * one.itemsize for one in tensors.values()), MOST_REPEATS * file.stat().st_size
    if size > most:
        largest = max(tensors, key=lambda name: tensors[name].numel() * tensors[name].itemsize)
        raise UserError(
            f'{file} has {file.stat().st_size:,} bytes, and its tensors would have {size:,}: "{largest}", of shape '
            f"{tuple(tensors[largest].shape)}, repeats what is there (`expand`). Save `tensor.contiguous()` if that is "
            "meant."
        )


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors once, and their other names."""
    first: dict[tuple[int, torch.Size], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        kept = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if kept != name:
            tied[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied
