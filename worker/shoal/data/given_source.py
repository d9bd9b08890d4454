"""From what a script gives as its data to what reads it: numbered samples in Shoal's order, or streams of lanes."""

from __future__ import annotations

from typing import Any

from shoal.config.training import TrainingConfig
from shoal.core.sampler import Sampler
from shoal.core.stream_position import StreamOrder
from shoal.data.data_workers import Reading
from shoal.data.opened_stream import is_stream
from shoal.data.source import Collate, NumberedSamples, Source, samples_of
from shoal.data.stream_source import StreamSamples


def source_of(dataset: Any, collate_fn: Collate | None, config: TrainingConfig, reading: Reading) -> Source:
    """Raises `UserError` for a dataset of another kind, or one that is smaller than a step."""
    shape = config.lanes, config.micro_batch_size, config.micro_batches_per_lane
    if not is_stream(dataset):
        return NumberedSamples(dataset, collate_fn, Sampler(samples_of(dataset), *shape, config.seed), config.seed)
    length = len(dataset) if hasattr(dataset, "__len__") else None
    return StreamSamples(dataset, collate_fn, StreamOrder(*shape, length), config.seed, reading)
