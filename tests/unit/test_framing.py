"""Framed messages whose sender says what is not so."""

from __future__ import annotations

import pytest
from shoal.exchange.packing import MOST_BYTES, receive_framed
from shoal_protos.errors import PeerError
from torch import Tensor


class Announced:
    """A group in which everybody announces a message of so many bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def receive(self, tensor: Tensor, source: int, tag: int) -> Announced:
        tensor.fill_(self.size)
        return self

    def wait(self) -> None:
        """It has arrived."""


@pytest.mark.parametrize("size", [-1, MOST_BYTES + 1, (1 << 63) - 1])
def test_a_length_that_cannot_be_is_refused_before_any_memory_is_taken(size: int) -> None:
    with pytest.raises(PeerError, match=f"rank 3 announced a message of {size} bytes; expected 0 to {MOST_BYTES}"):
        receive_framed(Announced(size), 3, 7)
