"""A folder of `torch.distributed.checkpoint`, read tensor by tensor, whoever wrote it: a model, and optimizer states.

Any number of processes may have written it. `dcp_index.py` says what lies there, `dcp_places.py` what of it is meant,
`dcp_tensors.py` checks and reads it. No code of such a folder is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.blocks.held import MASTER
from shoal.blocks.state_home import WEIGHTS
from shoal.checkpoint.dcp_index import LARGEST, read_index
from shoal.checkpoint.dcp_places import StoredState, sort_places
from shoal.checkpoint.dcp_tensors import FolderTensors
from shoal.checkpoint.named import Known

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
        if state.shape not in ((), known.shape) or kept.key in (MASTER, WEIGHTS):
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
