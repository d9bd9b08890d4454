"""What a script gives as its data: a dataset as it is, or the parts of a DataLoader that Shoal can use.

Which samples a worker reads changes with the world, so the reading is Shoal's. What of a DataLoader decides the order
in another way than a shuffle is refused; what merely paces it is left alone, and named once in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_protos.errors import UserError
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, default_collate

from shoal.logs import get_logger

log = get_logger("shoal")
PACING: dict[str, object] = {"num_workers": 0, "pin_memory": False, "drop_last": False, "prefetch_factor": None}
"""Attributes of a DataLoader that change no sample, with the values that need no mention."""


@dataclass(frozen=True, slots=True)
class GivenData:
    """Samples, and how they become batches."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    micro_batch_size: int | None = None


def data_of(given: Any, collate_fn: Callable[[list[Any]], Any] | None, name: str = "dataset") -> GivenData:
    """`name`: of the argument. Raises `UserError` for a DataLoader whose order Shoal would not keep."""
    if not isinstance(given, DataLoader):
        return GivenData(given, collate_fn)
    _check_order(given, name)
    paced = [part for part, usual in PACING.items() if getattr(given, part) != usual]
    if paced:
        log.info("parts of the DataLoader are left alone", names=paced, means="samples are read on the training thread")
    own = given.collate_fn if given.collate_fn is not default_collate else None
    return GivenData(given.dataset, collate_fn or own, given.batch_size)


def check_batch_size(data: GivenData, settled: int) -> None:
    """Raises `UserError` where a DataLoader's batches are others than micro-batches."""
    if data.micro_batch_size not in (None, settled):
        raise UserError(
            f"the DataLoader's batch_size is {data.micro_batch_size}, and micro-batches have {settled} samples "
            "(`train_micro_batch_size_per_gpu`); make them equal."
        )


def _check_order(loader: DataLoader[Any], name: str) -> None:
    if isinstance(loader.dataset, IterableDataset):
        return  # refused with all that have no numbered samples
    sampler = loader.sampler
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    if loader.batch_size is None or not (shuffles or (isinstance(sampler, DistributedSampler) and sampler.shuffle)):
        kind = type(loader.batch_sampler if loader.batch_size is None else sampler).__name__
        raise UserError(
            f"{name} is a DataLoader whose order is that of a {kind}, and Shoal shuffles every epoch, alike in every "
            f"world; build it with shuffle=True, or give its dataset ({name}=loader.dataset)."
        )
