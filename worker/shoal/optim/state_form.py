"""The form of an optimizer's state, which only its twin sees: elsewhere a key has a value an element, or one for all.

So all that cuts or digests state needs to know nothing of it. A number that is no tensor goes as one without
dimensions. A tensor that wraps others (torchao's) goes as these. Of a value for each k elements, as a scale of 8-bit
state is, the bytes are laid over its elements, one on each, zeros behind them, which are neither sent nor saved
(core/value_places.py): any cut at a block's border is one at a value's. A table that is the same for tensors of any
size, and that no step changes, does not go: each worker's optimizer has made the same. Called by segments, by the probe
and by what begins with a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shoal.core.layout import SMALLEST_BLOCK
from shoal.core.value_places import Strides

PER = " per "
"""Within the key of a value that some elements share."""

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Types of a state's numbers that are carried, and as what."""
KINDS = {dtype: kind for kind, dtype in NUMBERS.items()}


class OddState(Exception):
    """A key of which no block has a part; its text says so."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A tensor that wraps others: how it is made of them."""

    kind: type[Any]
    names: tuple[str, ...]
    meta: Any


@dataclass(frozen=True, slots=True)
class StateForm:
    """By the optimizer's own keys; of what is wrapped, `key.name`."""

    numbers: Mapping[str, type] = field(default_factory=dict)
    """Numbers that are no tensors, with their types after the first step."""
    shared: Mapping[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    """Keys with one value for so many elements."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Those of all sizes; each of any shape."""
    wrapped: Mapping[str, Wrapped] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, Strides]:
        """Which elements have a byte of what some share, by the keys under which that is carried."""
        return {f"{key}{PER}{each}": Strides(each, dtype.itemsize) for key, (each, dtype) in self.shared.items()}

    @property
    def title(self) -> str:
        """What of it the optimizer alone can read; empty: nothing."""
        wrapped = (f"{key} ({one.kind.__name__})" for key, one in sorted(self.wrapped.items()))
        return ", ".join([*sorted(self.places), *wrapped])

    @property
    def is_packed(self) -> bool:
        """Whether elements share values: then no part of a block can be looked at alone."""
        return bool(self.shared or self.wrapped)

    def carried(self, state: Mapping[str, Any]) -> dict[str, Tensor]:  # each (elements,), or ()
        """What others are given of a parameter's state."""
        found = dict[str, Tensor]()
        for key, value in carried(state).items():
            if key in self.shared:
                found[f"{key}{PER}{self.shared[key][0]}"] = _spread(value, self.shared[key][0])
            elif key not in self.tables:
                found[key] = value
        return found

    def given_back(
        self,
        state: Mapping[str, Tensor],  # each (elements,), or ()
    ) -> dict[str, Any]:
        """The inverse of `carried`."""
        found = given_back(state, self.numbers)
        if not self.is_packed or not found:
            return found
        for key, (elements, dtype) in self.shared.items():
            if (spread := found.pop(f"{key}{PER}{elements}", None)) is not None:
                found[key] = _together(spread, elements, dtype)
        device = next(value.device for value in state.values() if value.dim())
        found |= {key: table.to(device) for key, table in self.tables.items()}
        for key, one in self.wrapped.items():
            inner = {name: found.pop(f"{key}.{name}") for name in one.names}
            size = inner[one.names[0]].shape
            found[key] = one.kind.__tensor_unflatten__(inner, one.meta, size, (1,))
        return found


PLAIN_FORM = StateForm()
"""Each tensor has a value for each element, or one for all; there are no numbers."""


def form_of(
    small: Sequence[Mapping[str, Any]], large: Sequence[Mapping[str, Any]], sizes: tuple[int, int]
) -> StateForm:
    """Of the states that a smaller and a larger tensor of these sizes have after each of the same steps. Raises
    `OddState` for a key that no block has a part of.
    """
    wrapped = {
        key: Wrapped(type(value), tuple(value.__tensor_flatten__()[0]), value.__tensor_flatten__()[1])
        for key, value in large[-1].items()
        if is_traceable_wrapper_subclass(value)
    }
    of_small, of_large = [carried(one) for one in small], [carried(one) for one in large]
    shared, tables = dict[str, tuple[int, torch.dtype]](), dict[str, Tensor]()
    for key, value in of_large[-1].items():
        other = of_small[-1].get(key)
        if other is None or not value.dim() or (other.shape, value.shape) == ((sizes[0],), (sizes[1],)):
            continue
        each = sizes[1] // max(1, value.numel())
        is_table = other.shape == value.shape and _are_equal(one[key] for one in (*of_small, *of_large) if key in one)
        if is_table:
            tables[key] = value.detach().clone()
        elif _is_shared(value, each, sizes[1]) and _is_shared(other, each, sizes[0]):
            shared[key] = each, value.dtype
        else:
            shape = " × ".join(map(str, value.shape))
            raise OddState(f"keeps {shape} numbers as {key!r} of {sizes[1]} parameters, neither one of each nor one of "
                           "all, nor one of each so many")  # fmt: skip
    return StateForm(numbers_in(small[0]), shared, tables if shared or wrapped else {}, wrapped)


def _is_shared(
    value: Tensor,  # of any shape
    each: int,
    elements: int,
) -> bool:
    """Whether it is one number for each so many of these elements, within a block, and its bytes have room on them."""
    fits = each * value.numel() == elements and SMALLEST_BLOCK % each == 0
    return value.dim() == 1 and fits and value.element_size() <= each


def _are_equal(tensors: Iterable[Tensor]) -> bool:
    first, *others = tensors
    return all(first.dtype == one.dtype and torch.equal(first, one) for one in others)


def _spread(
    value: Tensor,  # (elements / each,) of any dtype
    each: int,
) -> Tensor:  # (elements,) uint8
    """Its bytes, each on an element."""
    spread = torch.zeros(value.numel(), each, dtype=torch.uint8, device=value.device)
    spread[:, : value.element_size()] = value.contiguous().view(torch.uint8).view(value.numel(), -1)
    return spread.view(-1)


def _together(
    spread: Tensor,  # (elements,) uint8
    each: int,
    dtype: torch.dtype,
) -> Tensor:  # (elements / each,)
    """The inverse, in memory of its own."""
    return spread.view(-1, each)[:, : dtype.itemsize].contiguous().view(dtype).view(-1)


def is_packed(keys: Iterable[str]) -> bool:
    """Whether state that is carried under these keys has values that some elements share."""
    return any(PER in key for key in keys)


def numbers_in(state: Mapping[str, Any]) -> dict[str, type]:
    """Keys of numbers that are no tensors, with their types."""
    return {key: type(value) for key, value in state.items() if type(value) in NUMBERS}


def carried(state: Mapping[str, Any]) -> dict[str, Tensor]:  # each of any shape
    """All tensors of a parameter's state, of wrapped ones what they wrap, and numbers as such."""
    return dict(_parts(state))


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if type(value) in NUMBERS:
            yield key, torch.tensor(value, dtype=NUMBERS[type(value)], device="cpu")
        elif is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield f"{key}.{name}", getattr(value, name)
        elif isinstance(value, Tensor):
            yield key, value


def given_back(
    state: Mapping[str, Tensor],  # each (elements,), or ()
    numbers: Mapping[str, type],
) -> dict[str, Any]:
    """Numbers as what they were. `numbers`: as `numbers_in` tells them of the first step; a later one may have made a
    fraction of a whole number. A script may have loaded one as a tensor.
    """
    kinds = {key: KINDS.get(one.dtype, numbers[key]) for key, one in state.items() if key in numbers and not one.dim()}
    return {key: kinds[key](one.item()) if key in kinds else one for key, one in state.items()}
