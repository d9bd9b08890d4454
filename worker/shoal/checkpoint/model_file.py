"""A plain model file: tensors by name, from safetensors, a torch state dict or a `torch.distributed.checkpoint` folder.

Read in parts by imports; no code of a file or folder is run. A torch file in today's format is mapped, not read. A
folder can come from any program and any number of processes, and may have optimizer states. `dcp_folder.py` reads its
index, checks and reads its tensors; `sort_places` says which entries are the model's and which are states (pure: names
and places only).

Known forms of a folder: a state dict at the top, with an optimizer and other entries beside it (torchtitan); one under
a key, as in `{"model": …, "optimizer": …}` (Shoal, FSDP, Lightning); the same once more within one mapping (`{"app":
…}`, PyTorch's recipe). An optimizer's states are `{"state": {name: {key: …}}}`, or flat: `{"state.<name>.<key>": …}`.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.loaded_state import AVERAGE, MASTER, WEIGHTS
from shoal.checkpoint.dcp_folder import INDEX, LARGEST, FolderTensors, Index, Place, Shape, read_index
from shoal.checkpoint.named import Known
from shoal.core.container import CODES, DTYPES
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


REMEDY = "import the model alone (--model-only)"


class DcpFolder:
    """A `ModelFile`. Raises `UserError` where the folder holds no model, or not all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, read_index(folder)
        self._tensors = FolderTensors(folder, self._index)
        self._places = sort_places(self._index, str(folder))
        self.left_out = self._places.left_out
        if not self._places.model:
            raise UserError(
                f"{folder} is a torch.distributed.checkpoint folder without a model: it holds "
                f'{_listed(list(self._index.places))}; expected a state dict, at the top or under "model".'
            )
        self.tied: Mapping[str, str] = {}
        self.known = {name: self._tensors.known(stored) for name, stored in self._places.model.items()}
        self._stored: dict[tuple[str, str], str] = {}
        """The index's name of each state that is a tensor, by the parameter's name and the state's key."""
        self._numbers: dict[tuple[str, str], float] = {}
        """The same of states that are plain numbers."""

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, Known]]:
        """What the optimizer keeps of each parameter. Raises `UserError` for what no parameter has so."""
        self._check_forms()
        found: dict[str, dict[str, Known]] = {}
        for kept in self._places.states:
            state = self._state(kept)
            if state is not None:
                found.setdefault(kept.parameter, {})[kept.key] = state
        return found

    def _check_forms(self) -> None:
        first: dict[bool, str] = {}
        for kept in self._places.states:
            first.setdefault(kept.is_flat, kept.stored)
        if len(first) > 1:
            raise UserError(
                f'{self._folder} has optimizer states in two forms, as "{first[False]}" and, flat, as '
                f'"{first[True]}"; expected one. Save one optimizer, or {REMEDY}.'
            )

    def _state(self, kept: StoredState) -> Known | None:
        """None where there is none: a momentum, say, that was never used."""
        where, at = f'{self._folder} has optimizer state "{kept.key}" of "{kept.parameter}"', (kept.parameter, kept.key)
        if kept.parameter not in self.known:
            raise UserError(f"{where}, which its model does not have; {REMEDY}.")
        if at in self._stored or at in self._numbers:
            raise UserError(f'{where} twice, once as "{kept.stored}"; save one optimizer, or {REMEDY}.')
        if kept.stored not in self._index.tensors:
            return self._number(kept, where)
        state, known = self._tensors.known(kept.stored), self.known[kept.parameter]
        if state.shape not in ((), known.shape) or kept.key in (AVERAGE, MASTER, WEIGHTS):
            raise UserError(
                f"{where} with shape {state.shape}; expected a state of its shape {known.shape}, or one number. "
                f"{REMEDY.capitalize()}."
            )
        if state.dtype.is_complex and not known.dtype.is_complex:
            raise UserError(f"{where} with dtype {state.dtype}; the parameter is {known.dtype}. {REMEDY.capitalize()}.")
        self._stored[at] = kept.stored
        return state

    def _number(self, kept: StoredState, where: str) -> Known | None:
        """A state that is no tensor: as torch's optimizers take it when they load one."""
        value = self._tensors.value(kept.stored)
        if value is None:
            return None
        number = _as_number(value)
        if number is None:
            raise UserError(
                f"{where} as a {type(value).__name__}; expected a tensor or a number. {REMEDY.capitalize()}."
            )
        self._numbers[kept.parameter, kept.key] = number
        return Known((), torch.float32)

    @property
    def rates(self) -> Sequence[float]:
        """The optimizer's learning rates, each once, as far as they are numbers that can be read."""
        found = set[float | None]()
        for stored in self._places.rates:
            with suppress(UserError):  # nothing is made of them, they are only said
                found.add(_as_number(self._rate(stored)))
        return sorted(rate for rate in found if rate is not None)

    def _rate(self, stored: str) -> Any:
        if stored not in self._index.tensors:
            return self._tensors.value(stored)
        return self._tensors.part(stored, 0, 1).item() if self._tensors.known(stored).shape == () else None

    # ---- values

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the tensor's dtype
        """Elements of a tensor, flat."""
        return self._tensors.part(self._places.model[name], first, last)

    def state_part(self, name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,)
        """Elements of a parameter's optimizer state, flat."""
        if (name, key) in self._numbers:
            return torch.tensor([self._numbers[name, key]], dtype=torch.float32)[first:last]
        return self._tensors.part(self._stored[name, key], first, last)


def _as_number(value: Any) -> float | None:
    is_number = type(value) is float or (type(value) is int and abs(value) < LARGEST)
    return float(value) if is_number else None


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most]) or "nothing"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


MODELS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which programs keep the model."""
OPTIMIZERS = ("optimizer", "optim")
"""Keys under which they keep the optimizer; others are found by their `param_groups`."""
STATE, GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one parameter. `stored`: its name in the index."""

    parameter: str
    key: str
    stored: str
    is_flat: bool


@dataclass(slots=True)
class FolderContents:
    """What lies in a folder, by the index's names."""

    model: dict[str, str] = field(default_factory=dict)
    """Of each tensor of the model."""
    states: list[StoredState] = field(default_factory=list)
    rates: list[str] = field(default_factory=list)
    """Of learning rates, of a group or of a parameter each."""
    left_out: list[str] = field(default_factory=list)
    """What is neither."""


def sort_places(index: Index, where: str) -> FolderContents:
    """Raises `UserError` where two models lie there, or something in the model is no tensor."""
    optimizers = _optimizers(index.places.values())
    prefixes = {name: _prefix(place, optimizers) for name, place in index.places.items()}
    tensors = [name for name in index.tensors if prefixes[name] is None]
    root = _root({index.places[name]: index.tensors[name].shape for name in tensors}, where)
    found, kept = FolderContents(), list[tuple[str, Place]]()
    for name, place in index.places.items():
        prefix = prefixes[name]
        if prefix is not None:
            kept.append((name, place[len(prefix) :]))
        elif not _is_in_model(place, root):
            found.left_out.append(name)
        elif name in index.tensors:
            _add(found.model, ".".join(place[len(root or ()) :]), name, where)
        elif root:
            raise UserError(f'{where} holds "{name}" without a tensor; expected tensors only in a model.')
        else:
            found.left_out.append(name)
    for name, rest in kept:
        _sort_state(found, name, rest)
    return found


def _optimizers(places: Iterable[Place]) -> set[Place]:
    """Of each the place of its mapping."""
    found = set[Place]()
    for place in places:
        found |= {place[:at] for at, key in enumerate(place) if _is(GROUPS, key)}
        found |= {
            place[: at + 1]
            for at, key in enumerate(place[:2])
            if key in OPTIMIZERS and len(place) > at + 1 and _is(STATE, place[at + 1])
        }
    return found


def _is(word: str, key: str) -> bool:
    """Whether a key is that word, or begins with it where the mapping is flat."""
    return key == word or key.startswith(f"{word}.")


def _prefix(place: Place, optimizers: Collection[Place]) -> Place | None:
    """The place of the optimizer's mapping that something lies in. One at the top may have other things beside it."""
    for at in range(len(place) - 1, 0, -1):
        if place[:at] in optimizers:
            return place[:at]
    return () if () in optimizers and (_is(GROUPS, place[0]) or _is(STATE, place[0])) else None


def _root(tensors: Mapping[Place, Shape], where: str) -> Place | None:
    """The place of the model's mapping; () for one at the top, None where mappings at the top are its parts.

    `tensors`: those that are in no optimizer. A lone number at the top (a loss, an epoch) is not taken for a model.
    """
    for key in MODELS:
        if any(place[0] == key and len(place) > 1 for place in tensors):
            return (key,)
    if any(shape and len(place) == 1 for place, shape in tensors.items()):
        return ()
    wrapped = dict[str, str]()
    for key in reversed(MODELS):
        wrapped |= {place[0]: key for place in tensors if len(place) > 2 and place[1] == key}
    if len(wrapped) > 1:
        listed = ", ".join(f'"{outer}.{inner}"' for outer, inner in sorted(wrapped.items()))
        raise UserError(f"{where} holds {len(wrapped)} models, {listed}; expected one. Save the one that is meant.")
    return next(iter(wrapped.items()), None)


def _is_in_model(place: Place, root: Place | None) -> bool:
    if root is None:
        return len(place) == 1 or place[0] not in OPTIMIZERS
    return place[: len(root)] == root and (len(place) > len(root) if root else len(place) == 1)


def _add(model: dict[str, str], name: str, stored: str, where: str) -> None:
    if name in model:
        raise UserError(f'{where} holds the tensor "{name}" twice, as "{model[name]}" and "{stored}".')
    model[name] = stored


def _sort_state(found: FolderContents, name: str, rest: Place) -> None:
    """`rest`: the place within the optimizer's mapping."""
    flat = rest[0].removeprefix(f"{STATE}.")
    if rest[0] == STATE and len(rest) > 2:
        found.states.append(StoredState(rest[1], ".".join(rest[2:]), name, is_flat=False))
    elif flat != rest[0] and "." in flat:
        found.states.append(StoredState(*_parted(flat, found.model), name, is_flat=True))
    elif not _is(GROUPS, rest[0]):
        found.left_out.append(name)
    elif rest[-1] == "lr" or rest[-1].endswith(".lr"):
        found.rates.append(name)


def _parted(flat: str, model: Mapping[str, str]) -> tuple[str, str]:
    """The parameter's name, and the state's key, either of which may have stops in it."""
    at = flat.rfind(".")
    while at > 0:
        if flat[:at] in model:
            return flat[:at], flat[at + 1 :]
        at = flat.rfind(".", 0, at)
    name, _, key = flat.rpartition(".")
    return name, key
