"""From (step, lane, micro-batch) to a batch on the device: seed, read, collate, move, seed again.

The engine calls it on the training thread. Whatever the user's dataset or collate function raises goes through
untouched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch.utils.data import IterableDataset, default_collate

from shoal.core.sampler import Sampler
from shoal.data.seeds import seed_everything


def samples_of(dataset: Any) -> int:
    """The length of a map-style dataset; a `UserError` says what a dataset of another kind lacks."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(f"dataset {name} has no numbered samples; give a map-style dataset (__getitem__ and __len__).")
    if not hasattr(dataset, "__len__"):
        raise UserError(f"dataset {name} has no length; give a map-style dataset (__getitem__ and __len__).")
    return len(dataset)


class Fetcher:
    """Reads micro-batches. The model's own random numbers start from the same seed, whatever reading has drawn."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        sampler: Sampler,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self.sampler = sampler
        self._seed = seed
        self._device = torch.device(device)

    def micro_batch(self, step: int, lane: int, micro: int) -> Any:
        """The batch, on the device; all generators stand at the start of this micro-batch's numbers."""
        seed_everything(self._seed, step, lane, micro)
        batch = self.collate(self._dataset, self.sampler.indices(step, lane, micro))
        seed_everything(self._seed, step, lane, micro)
        return batch

    def collate(self, dataset: Any, indices: Sequence[int]) -> Any:
        """Samples of any dataset as a batch, on the device."""
        return to_device(self._collate(_read(dataset, indices)), self._device)


def _read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    several = getattr(dataset, "__getitems__", None)
    if several is not None:
        return list(several(indices))
    return [dataset[index] for index in indices]


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a value to the device: containers are rebuilt, anything with `.to` moves itself."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if type(value) is dict else _rebuilt(value, moved)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(to_device(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(
            value, **{field.name: to_device(getattr(value, field.name), device) for field in fields}
        )
    return value


def _rebuilt(original: dict[Any, Any], moved: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of a class of its own (OrderedDict, defaultdict, …) keeps it."""
    copy = original.copy()
    copy.update(moved)
    return copy
