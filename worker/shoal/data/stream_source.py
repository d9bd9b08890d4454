"""Streams as a `Source`: lane l's micro-batch n has the samples of its stream after those of n − 1, in every world.

A process keeps the streams of its lanes open. A lane that it has not read, or that goes back, is opened at its bookmark
and read through up to the requested micro-batch; the last batches are kept, because a lane that is run again after a
loss reads the same samples again. Every micro-batch is read under its own seed, so that reading through draws what
reading has drawn. `source_of` chooses by the script's data: such streams, or numbered samples in Shoal's order.
"""

from __future__ import annotations

import pickle
from typing import Any

from shoal_protos.errors import UserError
from shoal_protos.text import plural
from shoal_protos.training_log import get_logger
from torch.utils.data import default_collate, default_convert

from shoal.config.training import TrainingConfig
from shoal.core.sampler import Sampler
from shoal.core.stream_position import Bookmark, StreamOrder
from shoal.data.data_workers import HERE, Reading
from shoal.data.opened_stream import END, OpenedStream, is_stream
from shoal.data.seeds import seed_everything, seed_from
from shoal.data.source import (
    Collate,
    NumberedSamples,
    Place,
    Read,
    Source,
    collated,
    noting,
    one_thread,
    samples_of,
    where,
)

log = get_logger("shoal")
STATE_EVERY = 8
"""Micro-batches of a lane between two states of its stream."""


class StreamSamples:
    """A stream for each lane: a `Source`."""

    keeps_lanes = True

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate | None,
        order: StreamOrder,
        seed: int,
        reading: Reading = HERE,
    ) -> None:
        self.dataset, self.sampler, self._seed, self._reading = dataset, order, seed, reading
        self._collate = collate_fn or (default_convert if reading.gives_batches else default_collate)
        self._lanes: dict[int, _LaneReader] = {}

    def check(self) -> None:
        """A stream may have any length."""

    def read(self, place: Place, bookmark: Bookmark | None = None) -> Read:
        """The batch, and where its lane stands after it. `bookmark`: a place of the lane before it."""
        step, lane, micro = place
        with one_thread():
            if lane not in self._lanes:
                size = 1 if self._reading.gives_batches else self.sampler.micro_batch_size
                self._lanes[lane] = _LaneReader(lane, size, self)
            reader, number = self._lanes[lane], self.sampler.number(step, micro)
            samples = reader.samples(number, bookmark)
            seed_everything(self._seed, *place, purpose="collate")
            given = samples[0] if self._reading.gives_batches else samples
            return Read(collated(self._collate, given, self.samples(place)), reader.bookmark)

    def samples(self, place: Place) -> str:
        """They have no numbers."""
        return f"the samples of {where(place)}"

    def opened(self, lane: int) -> OpenedStream:
        """A lane's own stream, not begun."""
        seed_from(f"{self._seed} lane {lane}")
        return OpenedStream(self.dataset, lane, self.sampler.lanes, self._seed, self._reading.init)

    def seed_pass(self, lane: int, number: int) -> None:
        """A pass of a lane begins, wherever in a micro-batch."""
        seed_from(f"{self._seed} lane {lane} pass {number}")

    def seed_batch(self, lane: int, number: int) -> Place:
        """A micro-batch of a lane begins."""
        step, micro = self.sampler.step_of(number)
        seed_everything(self._seed, step, lane, micro)
        return step, lane, micro

    def close(self) -> None:
        """Ends the lanes' streams; what is read after it opens them anew."""
        while self._lanes:
            self._lanes.popitem()[1].close()

    @property
    def most_kept(self) -> int:
        """Micro-batches of a lane that may be asked for again: those read ahead, and of two steps."""
        return 2 * self.sampler.micro_batches_per_lane + self._reading.processes * self._reading.ahead


class _LaneReader:
    """One lane's stream in this process, and where it stands."""

    def __init__(self, lane: int, size: int, source: StreamSamples) -> None:
        self._lane, self._size, self._source = lane, size, source
        self._stream: OpenedStream | None = None
        self._taken = self._begun = self._offset = self._passes = 0
        """The lane's samples until now, and until this pass; the stream's in this pass; passes that have ended."""
        self._least = 0
        """So many samples the stream had in this pass when it was read before."""
        self._stretch = 0
        """Of `STATE_EVERY` micro-batches, that up to which states were taken: one of each, whichever are read here."""
        self._batches: dict[int, tuple[bytes, Bookmark | None]] = {}
        """The last ones, pickled: who is given samples may change them."""
        self.bookmark: Bookmark | None = None
        """After the last micro-batch that was asked for; None: the one of another tells as much."""

    def samples(self, number: int, bookmark: Bookmark | None) -> list[Any]:
        """Of that micro-batch of the lane. Raises `UserError` for a stream that gives none."""
        if number in self._batches:
            kept, self.bookmark = self._batches[number]
            found: list[Any] = pickle.loads(kept)
            return found
        is_ahead = self._taken > number * self._size
        if self._stream is None or is_ahead or self._is_shorter_from(bookmark):
            self._open(bookmark)
            self._stretch = number // STATE_EVERY
        while self._taken < number * self._size:
            self._read_batch()
        samples = self._read_batch()
        self.bookmark = self._bookmark(number)
        self._keep(number, samples)
        return samples

    def close(self) -> None:
        """Ends the stream, wherever it stands."""
        if self._stream is not None:
            self._stream.close()

    def _is_shorter_from(self, bookmark: Bookmark | None) -> bool:
        """Whether the stream's own state is ahead of where it stands here: others have trained the lane meanwhile."""
        return bookmark is not None and bool(bookmark.state) and bookmark.batches * self._size > self._taken

    def _open(self, bookmark: Bookmark | None) -> None:
        """At the bookmark where it has the stream's state; else at the beginning of its pass."""
        self.close()
        self._stream = self._source.opened(self._lane)
        self._taken, self._begun, self._offset, self._passes, self._least = 0, 0, 0, 0, 0
        if bookmark is not None:
            self._taken = self._begun = bookmark.begun
            self._least = bookmark.offset
            self._passes = bookmark.passes
            if bookmark.state:
                self._taken, self._offset = bookmark.batches * self._size, bookmark.offset
        self._begin_pass(bookmark.state if bookmark is not None else "")
        if self._passes and self._taken == self._begun:  # a pass begins within a micro-batch, which has its seed
            self._read_samples(self._size - self._taken % self._size)

    def _begin_pass(self, state: str) -> None:
        assert self._stream is not None
        self._source.seed_pass(self._lane, self._passes)
        self._stream.begin(self._passes, state)

    def _read_batch(self) -> list[Any]:
        place = self._source.seed_batch(self._lane, self._taken // self._size)
        with noting(place):
            return self._read_samples(self._size)

    def _read_samples(self, count: int) -> list[Any]:
        return [self._next_sample() for _ in range(count)]

    def _next_sample(self) -> Any:
        assert self._stream is not None
        while True:
            sample = self._stream.next()
            if sample is END:
                self._end_pass()
                continue
            self._offset += 1
            if self._stream.is_turn(self._offset - 1):
                self._taken += 1
                return sample

    def _end_pass(self) -> None:
        """The lane reads its stream again from the beginning."""
        name, lanes = type(self._source.dataset).__name__, self._source.sampler.lanes
        if self._offset < self._least:
            raise UserError(
                f"stream {name} ends after {plural(self._offset, 'sample')} in pass {self._passes + 1} of lane "
                f"{self._lane}, and had at least {self._least} there when it was read before; a job goes on only with "
                "the data that it began with."
            )
        if self._taken == self._begun:
            which = "in its first pass" if self._passes == 0 else f"in pass {self._passes + 1}"
            raise UserError(
                f"stream {name} gives lane {self._lane} of {lanes} no sample {which}; every lane needs some: use no "
                "more lanes than the stream has parts, or let it not ask get_worker_info(), and Shoal deals it out."
            )
        if self._passes == 0:
            log.info("stream_ended", lane=self._lane, samples=self._taken,
                     means="the lane reads it again from its beginning, now and each time")  # fmt: skip
        self._passes += 1
        self._begun, self._offset, self._least = self._taken, 0, 0
        self._begin_pass("")

    def _bookmark(self, number: int) -> Bookmark | None:
        assert self._stream is not None
        state = ""
        if self._stream.has_state:
            before, self._stretch = self._stretch, (number + 1) // STATE_EVERY
            if self._stretch == before:
                return None
            state = self._stream.state()
        return Bookmark(self._lane, number + 1, self._passes, self._begun, self._offset, state)

    def _keep(self, number: int, samples: list[Any]) -> None:
        try:
            self._batches[number] = pickle.dumps(samples), self.bookmark
        except Exception:
            return  # they are read again where they are asked for again
        for old in [one for one in self._batches if one <= number - self._source.most_kept]:
            del self._batches[old]


def source_of(dataset: Any, collate_fn: Collate | None, config: TrainingConfig, reading: Reading) -> Source:
    """Raises `UserError` for a dataset of another kind, or one that is smaller than a step."""
    shape = config.lanes, config.micro_batch_size, config.micro_batches_of_cell
    if not is_stream(dataset):
        return NumberedSamples(dataset, collate_fn, Sampler(samples_of(dataset), *shape, config.seed), config.seed)
    length = len(dataset) if hasattr(dataset, "__len__") else None
    return StreamSamples(dataset, collate_fn, StreamOrder(*shape, length), config.seed, reading)
