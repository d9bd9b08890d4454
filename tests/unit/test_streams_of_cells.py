"""Streams whose lanes several places of a cell read, each its own micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from shoal.core.stream_position import StreamOrder
from shoal.data.stream_source import STATE_EVERY, StreamSamples
from torch.utils.data import IterableDataset


class Counts(IterableDataset[int]):
    """Without an end, and with a state of its own."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_place_of_a_cell_that_trains_every_second_micro_batch_tells_where_its_streams_stand(place: int) -> None:
    source = StreamSamples(Counts(), list, StreamOrder(4, 2, 2), 5)
    reads = [source.read((step, 1, place)).bookmark for step in range(2 * STATE_EVERY)]
    batches = [one.batches for one in reads if one is not None and one.state]
    assert len(batches) > 2 and {later - before for before, later in pairwise(batches)} == {STATE_EVERY}
