"""A script's own DataLoader: the loop over it is the training loop of an engine that was given no data.

Scripts for DeepSpeed make a DataLoader with a DistributedSampler, before or after `initialize`, and go over it once for
each epoch. Which worker reads which samples changes here, so such a pass is one over the engine's own loader, of the
dataset, the collate function and the ways of reading of the one that the loop goes over. Every other DataLoader (one of
an evaluation, in which the model is in eval mode or no gradient is made) is torch's own.

`LateSource` stands in place of the dataset until that loop begins: nothing can be read, and no length is known. Made by
initializing.py; `OwnLoaders` gives the fetcher the real one in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch.utils.data import DataLoader

from shoal.core.stream_position import Bookmark
from shoal.data.given_data import data_of
from shoal.data.source import Place
from shoal.data.stream_source import source_of
from shoal.deepspeed import rank_reads
from shoal.deepspeed.elastic_loader import ElasticLoader
from shoal.training.engine import Engine

log = get_logger("shoal")


class OwnLoaders:
    """Those of one script, whose engine has no data before its loop begins."""

    def __init__(self, engine: Engine, loader: ElasticLoader) -> None:
        self._engine, self._loader = engine, loader
        self._dataset: Any = None
        self._is_given = False

    def passes_over(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """One pass of the engine's, where this is the loop that trains; None: it is not. Raises `UserError`."""
        trains = torch.is_grad_enabled() and self._engine.module.training
        return iter(self._loader) if trains and self.take(loader) else None

    def take(self, loader: DataLoader[Any]) -> bool:
        """Whether the engine trains on this loader's dataset: on the first one that it is given. Raises `UserError`."""
        if not self._is_given:
            self._give(loader)
        return loader.dataset is self._dataset

    def _give(self, loader: DataLoader[Any]) -> None:
        """What the engine trains on from now on. Raises `UserError` where its order would not be kept."""
        context = self._engine.context
        config = context.config
        rank_reads.check()
        try:
            data = data_of(loader, None, "training_data")
        except UserError as error:
            evaluates = "A loop that evaluates comes after engine.eval(), or in torch.no_grad()."
            raise UserError(f"{error} {evaluates}") from None
        source = source_of(data.dataset, data.collate_fn, config, data.reading)
        source.sampler.last_step(config.max_steps, None)
        context.loop.fetcher.give_late(source, data.collate_fn, data.reading)
        self._dataset, self._is_given = loader.dataset, True
        micro = config.micro_batch_size // config.micro_batches_per_call
        if loader.batch_size not in (None, micro):
            means = f"micro-batches have {micro} samples, as the configuration says"
            log.info("the DataLoader's batch_size is left alone", batch_size=loader.batch_size, means=means)


class Feed:
    """An iterator over a loader that knows it: a pipeline's `train_batch` and `eval_batch` take its samples in Shoal's
    order. A loop over it gets torch's own batches.
    """

    repeats = False
    """Whether it begins anew at its end."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        """`begin`: makes the iterator that its batches come from, once one is asked for."""
        self.loader, self._begin = loader, begin
        self.evaluated = 0
        """Samples that evaluations have taken since its beginning."""
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        try:
            return next(self._batches)
        except StopIteration:
            if not self.repeats:
                raise
        self._batches = self._begin()
        return next(self._batches)


class FedLoaders(OwnLoaders):
    """Those of a script whose engine is asked for whole steps: none is gone over by a loop that trains."""

    def passes_over(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """An iterator for the engine."""
        assert _iterate is not None
        return Feed(loader, partial(_iterate, loader))


_here = threading.local()
"""`newest`: those of the last engine that this thread has made without data."""
_iterate: Callable[[DataLoader[Any]], Iterator[Any]] | None = None
"""torch's own, once it is in use no more."""


def watch(loaders: OwnLoaders) -> None:
    """From now on a loop over a DataLoader that trains is one of these. They live as long as their engine."""
    global _iterate
    _here.newest = ref(loaders)
    if _iterate is None:
        _iterate, DataLoader.__iter__ = DataLoader.__iter__, _passes  # type: ignore[method-assign,assignment]


def _passes(loader: DataLoader[Any]) -> Iterator[Any]:
    assert _iterate is not None
    newest: ReferenceType[OwnLoaders] | None = getattr(_here, "newest", None)
    loaders = newest() if newest is not None else None
    ours = loaders.passes_over(loader) if loaders is not None else None
    return ours if ours is not None else _iterate(loader)


NONE_YET = "deepspeed.initialize got no training_data, and no loop over a DataLoader has begun"


class NoOrder:
    """Of no samples."""

    samples = 0

    @property
    def steps_per_epoch(self) -> NoReturn:
        raise UserError(f"{NONE_YET}; how long an epoch is follows from its dataset.")

    def last_step(self, max_steps: int | None, epochs: int | None) -> int:
        """Raises `UserError` for epochs of an unknown length."""
        if epochs is not None:
            raise UserError(
                f"`shoal.epochs` is {epochs}, and deepspeed.initialize got no training_data; give it the dataset, or "
                "leave `shoal.epochs` out: the job then ends with the script's own loop over its DataLoader."
            )
        return max_steps or 0


class LateSource:
    """A `Source` that has none."""

    dataset: Any = None
    keeps_lanes = False

    def __init__(self) -> None:
        self.sampler: Any = NoOrder()

    def check(self) -> None:
        raise UserError(f"{NONE_YET}; loop over a DataLoader, or give initialize the dataset.")

    def read(self, place: Place, bookmark: Bookmark | None = None) -> NoReturn:
        raise AssertionError(f"{place} was to be read from {bookmark}, and check comes first")

    def samples(self, place: Place) -> str:
        return f"nothing, for {place}"

    def close(self) -> None:
        """Nothing is open."""
