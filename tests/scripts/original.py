"""Run an original on the samples and seeds that its port has: `python -m scripts.original NAME`.

What PyTorch shuffles by its own generator Shoal shuffles by the job's seed, so the two read other batches; whoever
compares losses has to give both the same. A DataLoader that shuffles yields Shoal's order here, and positions that a
script draws itself are those of that order. Nothing else of the original is touched.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from ports import free_port
from scripts.table import Order, script
from shoal.core.sampler import Sampler
from shoal.data.seeds import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""What torchrun tells the one process that it starts."""

Place = tuple[int, int, int]
"""Step, lane, micro-batch."""


def places(order: Order) -> Iterator[Place]:
    """All micro-batches, from the first step on, as one process would train them."""
    for step in count():
        for lane in range(order.lanes):
            for micro in range(order.micro_batches_per_lane):
                yield step, lane, micro


def order_loaders(order: Order) -> None:
    """Let every DataLoader that shuffles read the port's samples."""
    plain = DataLoader.__iter__
    begun: dict[int, Iterator[Place]] = {}  # by dataset, as some make a loader of their own for each epoch

    def ordered(loader: DataLoader[Any]) -> Iterator[Any]:
        if not isinstance(getattr(loader.batch_sampler, "sampler", None), RandomSampler | DistributedSampler):
            return iter(plain(loader))
        return _epoch(loader, order, begun.setdefault(id(loader.dataset), places(order)))

    DataLoader.__iter__ = ordered  # type: ignore[method-assign,assignment]


def _epoch(loader: DataLoader[Any], order: Order, given: Iterator[Place]) -> Iterator[Any]:
    """A batch of the original is as many whole micro-batches as it has room for."""
    dataset: Any = loader.dataset
    size, micros = order.micro_batch_size, order.micro_batches_per_lane
    sampler = Sampler(len(dataset), order.lanes, size, micros, order.seed)
    together = loader.batch_sampler.batch_size // size  # type: ignore[union-attr]
    for _ in range(sampler.steps_per_epoch * order.lanes * micros // together):
        samples: list[Any] = []
        for place in islice(given, together):
            seed_everything(order.seed, *place)
            samples += [dataset[index] for index in sampler.indices(*place)]
        batch = loader.collate_fn(samples)
        seed_everything(order.seed, *place, purpose="forward")
        yield batch


def seed_when_given_out(order: Order) -> None:
    """Let what the loop draws come from the seed of the batch at hand, not of the one that was read after it."""
    from accelerate.data_loader import DataLoaderShard

    plain, given = DataLoaderShard.__iter__, places(order)

    def seeded(loader: Any) -> Iterator[Any]:
        for batch in plain(loader):
            *_, place = islice(given, loader.total_batch_size // order.micro_batch_size)
            seed_everything(order.seed, *place)
            yield batch

    DataLoaderShard.__iter__ = seeded


def order_draws(order: Order) -> None:
    """Let the positions of a batch be those that the port reads from its dataset of all positions.

    Draws without gradients are an evaluation's, and are left alone.
    """
    plain, given = torch.randint, places(order)

    def drawn(high: int, size: tuple[int, ...], **keywords: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return plain(high, size, **keywords)
        place = next(given)
        sampler = Sampler(high, order.lanes, order.micro_batch_size, order.micro_batches_per_lane, order.seed)
        seed_everything(order.seed, *place, purpose="forward")
        return torch.tensor(sampler.indices(*place))

    torch.randint = drawn  # type: ignore[assignment]


def main() -> None:
    chosen = script(sys.argv[1])
    if chosen.order is not None:
        (order_draws if chosen.order.draws else order_loaders)(chosen.order)
        if chosen.order.ahead:
            seed_when_given_out(chosen.order)
    os.environ.update({**ALONE, "MASTER_PORT": str(free_port())})
    sys.argv = [str(chosen.original), *chosen.arguments]
    runpy.run_path(str(chosen.original), run_name="__main__")


if __name__ == "__main__":
    main()
