"""From (step, lane, micro-batch) to a batch on the device: read, or taken from a data worker; moved; seeded again.

The engine calls it on the training thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from shoal_protos.training_log import get_logger
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from shoal.core.sampler import Sampler
from shoal.core.stream_position import Bookmark, StreamOrder, StreamPositions
from shoal.data.data_workers import HERE, DataWorkers, Reading
from shoal.data.seeds import seed_everything
from shoal.data.source import Collate, Place, Source, collated, named, read_numbered

log = get_logger("shoal")


class Fetcher:
    """Reads micro-batches. The model's own random numbers start from the same seed, whatever reading has drawn."""

    def __init__(
        self,
        source: Source,
        collate_fn: Collate | None,
        seed: int,
        device: torch.device | str,
        reading: Reading = HERE,
    ) -> None:
        """`collate_fn`: for other datasets than the job's, in evaluations."""
        self._seed, self._device = seed, torch.device(device)
        self._workers: DataWorkers | None = None
        self._give(source, collate_fn, reading)
        self.given_late = 0
        """Samples of a dataset that was given after the job knew of this worker: all workers must have as many."""
        self.positions = StreamPositions()
        """What all members know of the lanes' streams."""
        self._bookmarks: dict[int, Bookmark] = {}
        """The newest one of each lane that was read here."""

    def _give(self, source: Source, collate_fn: Collate | None, reading: Reading) -> None:
        self._source, self._collate = source, collate_fn or default_collate
        self._is_pinned = reading.pinned and self._device.type != "cpu"
        if reading.pinned and not self._is_pinned:
            log.info("pin_memory_is_left_alone", means="the model is on the CPU, and batches stay where they are")
        self._workers = DataWorkers(source, reading, self._seed) if reading.processes else None

    def give_late(self, source: Source, collate_fn: Collate | None, reading: Reading) -> None:
        """What is read from now on, in place of nothing (`deepspeed.own_loader`)."""
        self._give(source, collate_fn, reading)
        self.given_late = source.sampler.samples

    @property
    def sampler(self) -> Sampler | StreamOrder:
        """The data order of the job."""
        return self._source.sampler

    def micro_batch(self, step: int, lane: int, micro: int, upcoming: Iterable[Place] = ()) -> Any:
        """The batch, on the device; all generators stand at the start of this micro-batch's numbers. `upcoming`: the
        places that are most likely next, for data workers.
        """
        place = step, lane, micro
        self._source.check()
        if self._workers is not None:
            read = self._workers.take(place, upcoming, self._before)
        else:
            read = self._source.read(place, self._before(place))
        if read.bookmark is not None:
            self._bookmarks[lane] = read.bookmark
        moved = self._moved(read.batch)
        seed_everything(self._seed, *place)
        return moved

    def bookmark(self, lanes: Iterable[int]) -> str:
        """What this member tells the others of these lanes, whose step is about to be committed; empty: nothing."""
        found = self.positions.most_useful(self._bookmarks[lane] for lane in lanes if lane in self._bookmarks)
        return found.to_text() if found is not None else ""

    def _before(self, place: Place) -> Bookmark | None:
        step, lane, micro = place
        order = self._source.sampler
        return self.positions.before(lane, order.number(step, micro)) if isinstance(order, StreamOrder) else None

    def collate(self, dataset: Any, indices: Sequence[int]) -> Any:
        """Samples of any dataset as a batch, on the device."""
        return self._moved(collated(self._collate, read_numbered(dataset, indices), f"samples {named(indices)}"))

    def close(self) -> None:
        """Ends data workers and open streams; from then on samples are read on the training thread."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._source.close()

    def _moved(self, batch: Any) -> Any:
        return to_device(pin_memory(batch) if self._is_pinned else batch, self._device, self._is_pinned)


def upcoming(place: Place, lanes: Sequence[int], micro_batches: Sequence[int], last_step: int) -> Iterator[Place]:
    """What a worker with these lanes reads after `place`, if the world stays. `micro_batches`: numbers of those that it
    trains of each lane. `last_step`: 0: it is not known.
    """
    step, *at = place
    in_step = [(lane, micro) for lane in lanes for micro in micro_batches]
    yield from ((step, *other) for other in in_step[in_step.index((at[0], at[1])) + 1 :])
    for later in range(step + 1, last_step) if last_step else count(step + 1):
        yield from ((later, *other) for other in in_step)


def to_device(value: Any, device: torch.device, beside: bool = False) -> Any:
    """Move the tensors of a value to the device: containers are rebuilt, anything with `.to` moves itself.

    `beside`: the host does not wait for tensors that are in pinned memory.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=beside)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        moved = {key: to_device(item, device, beside) for key, item in value.items()}
        return moved if type(value) is dict else _rebuilt(value, moved)
    if isinstance(value, Mapping):
        return {key: to_device(item, device, beside) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [to_device(item, device, beside) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(to_device(item, device, beside) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(
            value, **{field.name: to_device(getattr(value, field.name), device, beside) for field in fields}
        )
    return value


def _rebuilt(original: dict[Any, Any], moved: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of a class of its own (OrderedDict, defaultdict, …) keeps it."""
    copy = original.copy()
    copy.update(moved)
    return copy
