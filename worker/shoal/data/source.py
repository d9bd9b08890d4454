"""From (step, lane, micro-batch) to a batch in host memory: seed, read, collate. The same in every process.

A `Source` is what the fetcher (fetch.py) asks, in the training process or in a data worker (data_workers.py). Numbered
samples are here, streams in stream_source.py. What the user's dataset raises goes through untouched, with a note of
where it was; what a collate function raises becomes one sentence that names the samples.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from shoal_protos.errors import ShoalError, UserError
from torch.utils.data import default_collate

from shoal.core.sampler import Sampler
from shoal.core.stream_position import Bookmark, StreamOrder
from shoal.data.seeds import seed_everything

Place = tuple[int, int, int]
"""Step, lane, micro-batch: what decides which samples are read, and from which random numbers."""
Collate = Callable[[list[Any]], Any]
NO_SAMPLES = object()
"""In place of a batch: the step at hand has fewer micro-batches than others, and this is one that it lacks."""
MOST_NAMED = 16
"""Samples that a sentence names."""


@dataclass(frozen=True, slots=True)
class Read:
    """What reading a micro-batch gives."""

    batch: Any
    bookmark: Bookmark | None = None
    """Where the lane's stream stands after it."""


class Source(Protocol):
    """What reads micro-batches. Pickled for data workers that are spawned."""

    dataset: Any
    keeps_lanes: bool
    """Whether it is quicker for whoever has read the lane's batch before."""

    @property
    def sampler(self) -> Sampler | StreamOrder:
        """The data order of the job."""

    def check(self) -> None:
        """Raises `UserError` where the dataset is not what it was when the job began."""

    def read(self, place: Place, bookmark: Bookmark | None = None) -> Read:
        """The batch, in host memory. `bookmark`: from where it is quicker."""

    def samples(self, place: Place) -> str:
        """What is read for a place, in words."""

    def close(self) -> None:
        """Ends what is open in this process; reading opens it anew."""


def samples_of(dataset: Any) -> int:
    """The length of a map-style dataset; a `UserError` says what a dataset of another kind lacks."""
    name = type(dataset).__name__
    if isinstance(dataset, dict):
        raise UserError(f"dataset {name} is a dict of {', '.join(map(str, dataset))}; give one of them.")
    if not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"dataset {name} has no numbered samples; give a map-style dataset (__getitem__ and __len__), or an "
            "IterableDataset for a stream."
        )
    if not hasattr(dataset, "__len__"):
        raise UserError(f"dataset {name} has no length; give a map-style dataset (__getitem__ and __len__).")
    return len(dataset)


class NumberedSamples:
    """A map-style dataset in the order of a sampler: a `Source`."""

    keeps_lanes = False

    def __init__(self, dataset: Any, collate_fn: Collate | None, sampler: Sampler, seed: int) -> None:
        self.dataset, self._collate, self.sampler, self._seed = dataset, collate_fn or default_collate, sampler, seed

    def check(self) -> None:
        """Raises `UserError` where the dataset has another length now."""
        found = len(self.dataset)
        if found != self.sampler.samples:
            raise UserError(
                f"dataset {type(self.dataset).__name__} has {found} samples now, and had {self.sampler.samples} when "
                "the job began; the order of samples follows from their number, so it must stay."
            )

    def read(self, place: Place, bookmark: Bookmark | None = None) -> Read:  # noqa: ARG002  (nothing is quicker)
        """Under the seed of the place, which reading and collating share."""
        with one_thread():
            seed_everything(self._seed, *place)
            indices = self.sampler.indices(*place)
            with noting(place, indices):
                samples = read_numbered(self.dataset, indices)
            return Read(collated(self._collate, samples, self.samples(place)))

    def samples(self, place: Place) -> str:
        """Their numbers, and where they belong."""
        return f"samples {named(self.sampler.indices(*place))} of {where(place)}"

    def close(self) -> None:
        """Nothing is open."""


def read_numbered(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Samples by their numbers."""
    several = getattr(dataset, "__getitems__", None)
    if several is not None:
        return list(several(indices))
    return [dataset[index] for index in indices]


def collated(collate: Collate, samples: list[Any], described: str) -> Any:
    """The batch. Raises `UserError` naming the samples where the function fails on them, or gives no batch."""
    try:
        batch = collate(samples)
    except ShoalError:
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"collate_fn failed on {described}: {type(error).__name__}: {error} ({line.filename}:{line.lineno}). "
            "Samples of unequal shape are padded only by a collate_fn of yours; a sample that it cannot take is to be "
            "left out of the dataset."
        ) from error
    if batch is None or isinstance(batch, Iterator):
        found = "nothing (None)" if batch is None else f"a {type(batch).__name__}, which is read once"
        raise UserError(f"collate_fn gave {found} for {described}; expected a batch, such as a dict of tensors.")
    return batch


@contextmanager
def noting(place: Place, indices: Sequence[int] = ()) -> Iterator[None]:
    """What is raised within gets a note of what was read."""
    try:
        yield
    except Exception as error:
        error.add_note(f"shoal: read for {where(place)}" + (f", samples {named(indices)}" if indices else ""))
        raise


def where(place: Place) -> str:
    """The place in words; steps are counted from 1 there."""
    step, lane, micro = place
    return f"step {step + 1}, lane {lane}" + (f", micro-batch {micro}" if micro else "")


def named(indices: Sequence[int]) -> str:
    """Numbers of samples, the first ones of many."""
    shown = ", ".join(map(str, indices[:MOST_NAMED]))
    return f"{shown} and {len(indices) - MOST_NAMED} more" if len(indices) > MOST_NAMED else shown


@contextmanager
def one_thread() -> Iterator[None]:
    """Samples are read with one thread of torch everywhere: data workers have no more, and other counts give other
    bits.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
