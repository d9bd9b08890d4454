"""A folder of `torch.distributed.checkpoint`: its index, and its tensors and other values, checked and read.

Called by `model_file.py`. The index (`.metadata`) is a pickle. Nothing of it is run and none of torch's classes is made
of it: what it names becomes a `_Part` that holds what was saved. All that is used is checked here; its writer may lie.
What a file holds must be what the index says: the same shape and dtype, every element once.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.checkpoint.named import Known
from shoal.core.container import CODES

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
