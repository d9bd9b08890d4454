"""How many streams one address, one token and one worker may have open: none of them takes the places of all others.

`service.py` counts a stream here while it lasts. The bound over all streams is gRPC's (`MOST_STREAMS` there).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from shoal_protos.errors import ShoalError

from shoal_controller.access.callers import network_of
from shoal_controller.core.machine.events import Proof

OPERATORS = "the operators' token"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Most streams that are open at a time."""

    of_address: int = 1 << 12
    of_token: int = 1 << 12
    """Of the workers that show one join token, or the operators'."""
    of_worker: int = 8
    """A worker's new stream may come before its old ones are known to be broken."""


class TooManyStreams(ShoalError):
    """One caller has as many streams as it may. Not final: a place may become free."""

    http_status = HTTPStatus.TOO_MANY_REQUESTS
    grpc_status = "RESOURCE_EXHAUSTED"


class StreamCounts:
    """The open streams, by whose they are."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._open: Counter[str | Proof] = Counter()

    @contextmanager
    def of_address(self, address: str) -> Iterator[None]:
        """A stream of this address while it lasts. Raises `TooManyStreams`."""
        with self._counted(network_of(address), self._limits.of_address, f"address {address}"):
            yield

    @contextmanager
    def of_token(self, proof: Proof | None) -> Iterator[None]:
        """A stream that shows a token which proves this while it lasts. Raises `TooManyStreams`."""
        if proof is None:
            most, whose = self._limits.of_token, OPERATORS
        elif proof.names_a_process:
            most, whose = self._limits.of_worker, f"worker {proof.worker} of job {proof.job}"
        else:
            most, whose = self._limits.of_token, f"the join token of job {proof.job}"
        with self._counted(proof or OPERATORS, most, whose):
            yield

    @contextmanager
    def _counted(self, key: str | Proof, most: int, whose: str) -> Iterator[None]:
        if self._open[key] >= most:
            raise TooManyStreams(f"{whose} has {most} streams open, the most that it may; try again when one has ended")
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
