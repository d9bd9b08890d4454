"""What a script gives as its data: a dataset as it is, or the parts of a DataLoader that Shoal can use.

Which samples a worker reads changes with the world, so the reading is Shoal's. What of a DataLoader decides the order
in another way than a shuffle is refused; how it reads ahead is kept; what is left alone is named once in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from shoal.data.data_workers import HERE, Reading
from shoal.data.opened_stream import is_stream

log = get_logger("shoal")
IGNORED: dict[str, tuple[object, str]] = {
    "drop_last": (False, "the rest of an epoch, less than a step, is always left out"),
    "generator": (None, "the order follows from shoal.seed"),
    "in_order": (True, "batches come in order"),
    "pin_memory_device": ("", "batches go to the model's device"),
    "snapshot_every_n_steps": (1, "the position is in every checkpoint of the job"),
}
"""Attributes of a DataLoader that are left alone, with the value that needs no mention, and what holds instead."""

SHUFFLES = ("torch.utils.data.sampler.RandomSampler", "torchdata.stateful_dataloader.sampler.RandomSampler")
"""Classes of samplers that shuffle, and no class derived from them."""


@dataclass(frozen=True, slots=True)
class GivenData:
    """Samples, and how they become batches."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    reading: Reading = HERE
    """How it is read ahead."""


def data_of(given: Any, collate_fn: Callable[[list[Any]], Any] | None, name: str = "dataset") -> GivenData:
    """`name`: of the argument. Raises `UserError` for a DataLoader whose order Shoal would not keep."""
    if not isinstance(given, DataLoader):
        return GivenData(given, collate_fn)
    _check_order(given, name)
    ignored = {name: means for name, (usual, means) in IGNORED.items() if getattr(given, name, usual) != usual}
    if ignored:
        log.info("parts of the DataLoader are left alone", **ignored)
    own = given.collate_fn if given.collate_fn is not default_collate else None
    if None not in (own, collate_fn) and own is not collate_fn:
        raise UserError(f"collate_fn is given, and {name} is a DataLoader with a collate_fn of its own; keep one.")
    return GivenData(given.dataset, collate_fn or own, reading_of(given))


def batch_size_of(given: Any) -> int | None:
    """A DataLoader's."""
    return given.batch_size if isinstance(given, DataLoader) else None


def reading_of(loader: DataLoader[Any]) -> Reading:
    """How a DataLoader reads. Its data workers live as long as the job, whatever `persistent_workers` says."""
    context = loader.multiprocessing_context
    return Reading(
        processes=loader.num_workers,
        ahead=loader.prefetch_factor or HERE.ahead,
        start_method=context.get_start_method() if context is not None else None,
        timeout_seconds=loader.timeout,
        init=loader.worker_init_fn,
        gives_batches=loader.batch_size is None and is_stream(loader.dataset),
        pinned=loader.pin_memory,
    )


def check_batch_size(given: Any, micro_batch: int, batch: int) -> None:
    """Raises `UserError` if a DataLoader's batches are neither micro-batches nor batches of a whole step, which are
    split into micro-batches.
    """
    if batch_size_of(given) not in (None, micro_batch, batch):
        raise UserError(
            f"the DataLoader's batch_size is {batch_size_of(given)}, and micro-batches have {micro_batch} samples "
            f"(`train_micro_batch_size_per_gpu`); give it that, or the {batch} of a step (`train_batch_size`)."
        )


def micro_batches_of(given: Any, batch: int) -> int | None:
    """Return the length of a DataLoader whose batches are smaller than a step; None for any other dataset."""
    size = batch_size_of(given)
    return None if size in (None, batch) or is_stream(given.dataset) else len(given)


def _check_order(loader: DataLoader[Any], name: str) -> None:
    if is_stream(loader.dataset):
        return  # it has its own
    sampler = loader.sampler
    shuffles = (
        f"{type(sampler).__module__}.{type(sampler).__qualname__}" in SHUFFLES
        and not sampler.replacement  # type: ignore[attr-defined]
        and sampler.num_samples == len(loader.dataset)  # type: ignore[attr-defined,arg-type]
    )
    if loader.batch_size is None or not (shuffles or (isinstance(sampler, DistributedSampler) and sampler.shuffle)):
        kind = type(loader.batch_sampler if loader.batch_size is None else sampler).__name__
        raise UserError(
            f"{name} is a DataLoader whose order is that of a {kind}, and Shoal shuffles every epoch, alike in every "
            f"world; build it with shuffle=True, or give its dataset ({name}=loader.dataset)."
        )
