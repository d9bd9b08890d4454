"""A folder of `torch.distributed.checkpoint`, read tensor by tensor, whoever wrote it: a model, and optimizer states.

`{"model": state dict, "optimizer": {"state": {name: {key: …}}, "param_groups": …}}` is the form that
`torch.distributed.checkpoint.state_dict` gives and that our export has; a state dict that is not within another
mapping, with or without an optimizer beside it, is taken too. Any number of processes may have written it. The folder's
index is a pickle: nothing is made of it but what such an index consists of, and no code of it is run.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shoal.blocks.held import MASTER
from shoal.blocks.state_home import WEIGHTS
from shoal.checkpoint.container import CODES
from shoal.checkpoint.named import Known

INDEX = ".metadata"
MODELS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which programs keep the model."""
OPTIMIZERS = ("optimizer", "optim")
_METADATA = "torch.distributed.checkpoint.metadata"
_PARTS: dict[str, set[str]] = {
    _METADATA: {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""What an index consists of, beside dtypes."""

Place = tuple[str, ...]
"""Where a tensor was in the mapping that was saved."""


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PARTS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


class DcpFolder:
    """A `ModelFile`. Raises `UserError` where the folder holds no model, or not all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = _read_index(folder)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)
        places = {name: _place(self._index, name) for name in sorted(self._index.state_dict_metadata)}
        wrapped = next((key for key in MODELS if any(place[:-1][:1] == (key,) for place in places.values())), None)
        self._names: dict[str, str] = {}
        """The index's name of each tensor of the model."""
        self._states: dict[tuple[str, str], str] = {}
        """The same of optimizer states, by the parameter's name and the state's key."""
        self.left_out: list[str] = []
        """What lies there and is neither."""
        for name, place in places.items():
            self._sort(name, place, wrapped)
        if not self._names:
            raise UserError(
                f"{folder} is a torch.distributed.checkpoint folder without a model: it holds "
                f'{_listed(list(places))}; expected a state dict, at the top or under "model".'
            )
        self.tied: Mapping[str, str] = {}
        self.known = {name: self._known(stored) for name, stored in self._names.items()}
        self.states = self._states_by_name()
        self._whole: tuple[str, Tensor] | None = None
        """What was read last, flat."""

    def _sort(self, name: str, place: Place, wrapped: str | None) -> None:
        is_tensor = isinstance(self._index.state_dict_metadata[name], TensorStorageMetadata)
        if place[0] in OPTIMIZERS and len(place) > 1:
            if is_tensor and len(place) == 4 and place[1] == "state":
                self._states[place[2], place[3]] = name
            elif place[1] != "param_groups":
                self.left_out.append(name)
        elif wrapped is not None and place[0] != wrapped:
            self.left_out.append(name)
        elif not is_tensor and wrapped is not None:
            raise UserError(f'{self._folder} holds "{name}" without a tensor; expected tensors only in a model.')
        elif not is_tensor:
            self.left_out.append(name)
        else:
            self._names[".".join(place[1:] if wrapped is not None else place)] = name

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _known(self, name: str) -> Known:
        entry = self._entry(name)
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if dtype not in CODES:
            raise UserError(f'{self._folder} holds "{name}" with dtype {dtype}, which a checkpoint cannot hold.')
        self._check_chunks(name, shape, entry)
        return Known(shape, dtype)

    def _check_chunks(self, name: str, shape: tuple[int, ...], entry: TensorStorageMetadata) -> None:
        """Raises `UserError` where not all of a tensor is there."""
        elements = 0
        for chunk in entry.chunks:
            ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            inside = (
                len(ends) == len(shape) and all(map(int.__le__, ends, shape)) and min(chunk.offsets, default=0) >= 0
            )
            elements += math.prod(chunk.sizes)
            stored = self._index.storage_data.get(MetadataIndex(name, chunk.offsets))
            if not inside or stored is None:
                raise UserError(
                    f'{self._folder} is damaged: a part of "{name}" with offsets {tuple(chunk.offsets)} and shape '
                    f"{tuple(chunk.sizes)} {'is in no file' if inside else f'does not lie in its shape {shape}'}."
                )
            self._check_file(name, stored.relative_path, stored.offset + stored.length)
        if elements != math.prod(shape):
            raise UserError(
                f'{self._folder} is damaged: "{name}" has shape {shape}, which is {math.prod(shape):,} elements, and '
                f"{elements:,} are there. Save it again, or copy the whole folder."
            )

    def _check_file(self, name: str, file: str, end: int) -> None:
        path = self._folder / file
        if Path(file).name != file or not path.is_file():
            raise UserError(f'{self._folder} lacks the file {file}, which holds "{name}"; copy the whole folder.')
        if path.stat().st_size < end:
            raise UserError(
                f'{path} has {path.stat().st_size:,} bytes, and "{name}" ends at byte {end:,}; copy the whole folder.'
            )

    def _states_by_name(self) -> dict[str, dict[str, Known]]:
        """What the optimizer keeps of each parameter. Raises `UserError` for what no parameter has so."""
        found: dict[str, dict[str, Known]] = {}
        for (parameter, key), stored in self._states.items():
            if parameter not in self.known:
                raise UserError(
                    f'{self._folder} has optimizer state "{key}" of "{parameter}", which its model does not have; '
                    "import the model alone (--model-only)."
                )
            state, shape = self._known(stored), self.known[parameter].shape
            if state.shape not in ((), shape) or key in (MASTER, WEIGHTS):
                raise UserError(
                    f'{self._folder} has optimizer state "{key}" of "{parameter}" with shape {state.shape}; expected a '
                    f"state of its shape {shape}, or one number. Import the model alone (--model-only)."
                )
            found.setdefault(parameter, {})[key] = state
        return found

    # ---- values

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the tensor's dtype
        """Elements of a tensor, flat."""
        return self._part(self._names[name], first, last)

    def state_part(self, name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,)
        """Elements of a parameter's optimizer state, flat."""
        return self._part(self._states[name, key], first, last)

    def _part(self, stored: str, first: int, last: int) -> Tensor:  # (last - first,)
        if self._whole is None or self._whole[0] != stored:
            self._whole = None  # no more than one is in memory at a time
            self._whole = stored, self._read(stored)
        return self._whole[1][first:last]

    def _read(self, name: str) -> Tensor:  # (elements,)
        entry = self._entry(name)
        found = torch.zeros(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner({name: found}, self._index, is_coordinator=True)
            self._reader.read_data(self._reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        except (OSError, EOFError, AssertionError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise UserError(f'{self._folder} is damaged: "{name}" cannot be read: {_first_line(error)}.') from error
        return found.reshape(-1)


def _read_index(folder: Path) -> Metadata:
    file = folder / INDEX
    if not file.is_file():
        raise UserError(
            f"{folder} is neither a torch.distributed.checkpoint folder nor one of safetensors files: it has no "
            f"{INDEX}, which is written last. Name the folder that holds it."
        )
    try:
        with file.open("rb") as opened:
            found = _Index(opened).load()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    except Exception as error:  # a damaged pickle raises whatever the damage makes of it
        raise UserError(
            f"{file} is not the index of a torch.distributed.checkpoint folder: {_first_line(error)}."
        ) from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UserError(f"{file} is not the index of a torch.distributed.checkpoint folder: it holds something else.")
    return found


def _place(index: Metadata, name: str) -> Place:
    known = (index.planner_data or {}).get(name)
    return tuple(map(str, known)) if known else (name,)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most]) or "nothing"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
