"""One lane's stream, opened: whatever kind of stream it is, it gives samples one by one, and says where it stands.

A stream shares itself among lanes as it would among a DataLoader's workers: `get_worker_info()` names the lane as `id`
and the number of lanes as `num_workers`. One that does not ask is dealt out, every lane keeping the samples that are
its turn. Streams of Hugging Face are split by its own means. Never by rank: a worker comes and goes, a lane stays.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from shoal_protos.errors import UserError
from shoal_protos.text import plural
from shoal_protos.training_log import get_logger
from torch.utils.data import IterableDataset

from shoal.core.stream_position import STATE_BYTES

log = get_logger("shoal")
END = object()
LOSSY = "BufferShuffledExamplesIterable"
"""The part of a stream of Hugging Face whose own state leaves its buffer out."""


def is_stream(dataset: Any) -> bool:
    """Whether samples come one after the other, without numbers."""
    return isinstance(dataset, IterableDataset) or _is_hugging_face(dataset)


def _is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__.split(".")[0] == "datasets" and hasattr(dataset, "_ex_iterable")


class LaneInfo:
    """What `get_worker_info()` gives to a lane's stream; notes whether it was asked which lane it is."""

    def __init__(self, lane: int, lanes: int, seed: int, dataset: Any) -> None:
        self._lane, self._lanes, self.dataset, self.asked = lane, lanes, dataset, False
        self.seed = int.from_bytes(hashlib.blake2b(f"{seed} {lane}".encode(), digest_size=6).digest(), "little")

    @property
    def id(self) -> int:
        self.asked = True
        return self._lane

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self._lanes


@contextmanager
def _as_worker(info: LaneInfo | None) -> Iterator[None]:
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_worker._worker_info = before


class OpenedStream:
    """A copy of the dataset that belongs to one lane, and its iterator."""

    def __init__(self, dataset: Any, lane: int, lanes: int, seed: int, init: Callable[[int], None] | None) -> None:
        self._lane, self._lanes = lane, lanes
        try:
            own = copy.deepcopy(dataset)
        except Exception as error:
            raise UserError(
                f"stream {type(dataset).__name__} cannot be copied, and each lane needs its own: {error}. Open files "
                "and connections in __iter__."
            ) from error
        self._info: LaneInfo | None = LaneInfo(lane, lanes, seed, own)
        if _is_hugging_face(own):
            own, self._info = _split(own, lane, lanes), None
        self.dataset = own
        self._is_dealt: bool | None = False if self._info is None else None
        """None: not known before its first sample."""
        self._iterator: Iterator[Any] = iter(())
        self.has_state = hasattr(own, "state_dict") and hasattr(own, "load_state_dict") and not _is_lossy(own)
        if init is not None:
            with _as_worker(self._info):
                init(lane)

    def begin(self, number: int, state: str) -> None:
        """A pass, from its beginning or from a state in its midst."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        if state:
            self.dataset.load_state_dict(json.loads(state))
        with _as_worker(self._info):
            self._iterator = iter(self.dataset)

    def next(self) -> Any:
        """The next sample, whoever's turn it is; `END` where there is none."""
        with _as_worker(self._info):
            sample = next(self._iterator, END)
        if self._is_dealt is None:
            assert self._info is not None
            self._is_dealt = not self._info.asked
            if self._is_dealt and self._lane == 0:
                log.info("stream_is_dealt_out", stream=type(self.dataset).__name__, means=f"it does not ask "
                         f"get_worker_info() which part is its own: every lane reads all of it and keeps every "
                         f"{self._lanes}th sample")  # fmt: skip
        return sample

    def close(self) -> None:
        """Ends a pass in its midst: a generator's own clean-up runs here and now.

        The collector would run it on any thread: a stream of Hugging Face waits in it for threads that read ahead, and
        on one of these it would wait for itself.
        """
        if isinstance(self._iterator, Generator):
            self._iterator.close()

    def is_turn(self, offset: int) -> bool:
        """Whether the pass's sample of that number is this lane's."""
        return not self._is_dealt or offset % self._lanes == self._lane

    def state(self) -> str:
        """Where the stream says that it stands; empty where that cannot be sent."""
        try:
            text = json.dumps(self.dataset.state_dict(), separators=(",", ":"))
        except (TypeError, ValueError):
            text = ""
        if not text or len(text.encode()) > STATE_BYTES:
            self.has_state = False
            log.info("stream_state_is_not_kept", stream=type(self.dataset).__name__, bytes=len(text.encode()),
                     means=f"positions are counts; a state of at most {STATE_BYTES} bytes of JSON would save reading "
                           "where a lane moves")  # fmt: skip
            return ""
        return text


def _split(dataset: Any, lane: int, lanes: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    shards = dataset.num_shards
    if lane == 0 and shards % lanes:
        log.info("stream_has_uneven_shards", shards=shards, lanes=lanes, means=f"every lane reads through "
                 f"{plural(shards, 'shard')} and keeps one sample in {lanes}; a multiple of {lanes} shards is read "
                 "once")  # fmt: skip
    return split_dataset_by_node(dataset, rank=lane, world_size=lanes)


def _is_lossy(dataset: Any) -> bool:
    """Whether it goes on from its own state with other samples than it would have given."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == LOSSY:
            return True
        part = getattr(part, "ex_iterable", None)
    return False
