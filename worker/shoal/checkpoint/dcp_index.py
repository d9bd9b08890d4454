"""The index of a folder of `torch.distributed.checkpoint`: which tensors and values lie where.

Called by `model_file.py`. The index (`.metadata`) is a pickle. Nothing of it is run and none of torch's classes is made
of it: what it names becomes a `_Part` that holds what was saved. All that is used is checked here; whoever wrote it may
lie.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError

INDEX = ".metadata"
LARGEST = 1 << 63
"""No shape and no place in a file has such a number."""
DEEPEST = 100
"""Mappings within each other."""
_PARTS: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"device"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""What an index consists of, beside shapes and dtypes."""
ENUMERATIONS = {"MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING"}
"""Among these parts."""

Place = tuple[str, ...]
"""Where something was in the mapping that was saved."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes of one of the folder's files. `transforms`: how they were changed on their way there."""

    file: str
    start: int
    bytes: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor. `file_range`: None where the index does not say."""

    offsets: Shape
    sizes: Shape
    file_range: StoredBytes | None

    @property
    def ends(self) -> Shape:
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the index has it; whether its chunks cover it is not said."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """By the index's own names: tensors, other values (each a pickle), and the place of all of them."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredBytes | None]
    places: Mapping[str, Place]


def read_index(folder: Path) -> Index:
    """Raises `UserError` where there is none, or it is not one."""
    file = folder / INDEX
    if not file.is_file():
        raise UserError(
            f"{folder} is neither a torch.distributed.checkpoint folder nor one of safetensors files: it has no "
            f"{INDEX}, which is written last. Name the folder that holds it."
        )
    try:
        with file.open("rb") as opened:
            return _index_of(_Unpickler(opened).load())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    except Exception as error:  # a damaged pickle raises whatever the damage makes of it
        raise UserError(
            f"{file} is not the index of a torch.distributed.checkpoint folder: {first_line(error)}."
        ) from None


def first_line(error: BaseException) -> str:
    """What an error says, without the final stop."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


class _Part:
    """An object of a class that an index names, made without that class."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """An ordered mapping is filled so."""
        self.state[key] = value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PARTS.get(module, ()):
            return type(name, (_Part,), {})
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


def _member(kind: Any, name: Any) -> _Part:
    """Of an enumeration: Python 3.11.0 to 3.11.3 write it as an attribute of its class, all others as a call of it."""
    if getattr(kind, "__name__", "") not in ENUMERATIONS or not issubclass(kind, _Part):
        raise pickle.UnpicklingError("it names an attribute of something, which no index needs")
    made: _Part = kind(name)
    return made


def _index_of(found: Any) -> Index:
    """Raises `ValueError` for what no index has; of a lie also other errors."""
    if not _is_a("Metadata", found):
        raise ValueError("it holds something else")
    entries, storage, plan = (
        _mapping(found.state.get(key), key) for key in ("state_dict_metadata", "storage_data", "planner_data")
    )
    ranges = {_at(where): _range(info) for where, info in storage.items()}
    tensors, values = dict[str, StoredTensor](), dict[str, StoredBytes | None]()
    for name in sorted(entries):
        _check_name(name)
        if _is_a("TensorStorageMetadata", entries[name]):
            tensors[name] = _tensor(name, entries[name].state, ranges)
        else:
            values[name] = ranges.get((name, None))
    return Index(tensors, values, {name: _place(name, plan.get(name)) for name in sorted(entries)})


def _is_a(kind: str, found: Any) -> bool:
    return isinstance(found, _Part) and type(found).__name__ == kind and isinstance(found.state, dict)


def _mapping(found: Any, key: str) -> Mapping[Any, Any]:
    if isinstance(found, _Part):
        found = found.state
    if key == "planner_data" and not isinstance(found, dict):
        return {}  # other planners keep other things there
    if not isinstance(found, dict):
        raise ValueError(f"its {key} is a {type(found).__name__}")
    return found


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"it holds a {type(name).__name__} where a name is expected")
    if not name.isprintable():
        raise ValueError(f"it holds the name {name[:80]!a}, which is not printable")


def _place(name: str, found: Any) -> Place:
    """Keys of mappings are text, those of lists numbers."""
    if not found:
        return (name,)
    is_path = isinstance(found, tuple | list) and len(found) <= DEEPEST
    if not is_path or any(type(key) not in (str, int) for key in found):
        raise ValueError(f'the place of "{name}" in it is not a path of keys')
    for key in map(str, found):
        _check_name(key)
    return tuple(map(str, found))


def _at(where: Any) -> tuple[str, Shape | None]:
    offset = where.state.get("offset")
    return where.state["fqn"], None if offset is None else _numbers(offset)


def _range(info: Any) -> StoredBytes:
    file, transforms = info.state["relative_path"], info.state.get("transform_descriptors") or ()
    for name in (file, *transforms):
        _check_name(name)
    start, size = _numbers((info.state["offset"], info.state["length"]))
    return StoredBytes(file, start, size, tuple(transforms))


def _tensor(
    name: str, state: Mapping[str, Any], ranges: Mapping[tuple[str, Shape | None], StoredBytes]
) -> StoredTensor:
    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'"{name}" has no dtype in it')
    chunks = [(_numbers(one.state["offsets"]), _numbers(one.state["sizes"])) for one in state["chunks"]]
    if any(len(offsets) != len(sizes) for offsets, sizes in chunks):
        raise ValueError(f'a part of "{name}" has another number of offsets than of sizes')
    found = tuple(Chunk(offsets, sizes, ranges.get((name, offsets))) for offsets, sizes in chunks)
    return StoredTensor(_numbers(state["size"]), dtype, found)


def _numbers(found: Any) -> Shape:
    if not isinstance(found, tuple | list) or any(type(one) is not int or not 0 <= one < LARGEST for one in found):
        raise ValueError("it holds something else where a shape or a place is expected")
    return tuple(found)
