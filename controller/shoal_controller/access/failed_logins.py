"""Answers to wrong tokens are delayed more and more, per address, so that programs with an old token cost little.

A right token is compared first and never gets here: requests without one cost no other request of their address. So
this does not bound guesses; the length of tokens does. Each port has one of these: REST (`api/guard.py`) and the
workers' (`sessions/service.py`). It keeps time by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus

from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import ShoalError

from shoal_controller.access.callers import network_of

FREE_FAILURES = 5
"""Answered at once: a typo, a token that was just revoked."""
FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
FORGIVEN_SECONDS = 60.0
"""After so long without a failure an address begins anew."""
MOST_WAITING = 16
"""Failures of one address that wait at a time."""
MOST_ADDRESSES = 4096
"""Addresses that are remembered; of more, whoever failed longest ago is forgotten."""


class TooManyFailures(ShoalError):
    """A token is wrong, and too many wrong ones of its address wait for their answers already."""

    http_status = HTTPStatus.TOO_MANY_REQUESTS
    grpc_status = "RESOURCE_EXHAUSTED"
    problem_code = ErrorCode.TOO_MANY_FAILURES


@dataclass(slots=True)
class _Failures:
    count: int = 0
    last: float = 0.0
    waiting: int = 0


class FailedLogins:
    """What is remembered of the addresses that showed wrong tokens."""

    def __init__(self) -> None:
        self._by_network: OrderedDict[str, _Failures] = OrderedDict()

    def check(self, address: str) -> None:
        """Refuse to let one more wrong token of this address wait. Raises `TooManyFailures`."""
        failures = self._by_network.get(network_of(address))
        if failures is not None and failures.waiting >= MOST_WAITING:
            raise TooManyFailures(
                f"the request shows no right token, and {failures.waiting} such requests from {address} wait for their "
                f"answers; try again in {LONGEST_DELAY_SECONDS:g} s"
            )

    async def delay(self, address: str) -> None:
        """Wait before a wrong token is answered, also where nobody waits for the answer any more."""
        failures = self._noted(network_of(address), asyncio.get_running_loop().time())
        over = failures.count - FREE_FAILURES
        if over <= 0:
            return
        failures.waiting += 1
        try:
            await asyncio.sleep(min(FIRST_DELAY_SECONDS * 2 ** min(over - 1, 16), LONGEST_DELAY_SECONDS))
        finally:
            failures.waiting -= 1

    def _noted(self, network: str, now: float) -> _Failures:
        failures = self._by_network.setdefault(network, _Failures())
        if now - failures.last > FORGIVEN_SECONDS:
            failures.count = 0
        failures.count, failures.last = failures.count + 1, now
        self._by_network.move_to_end(network)
        if len(self._by_network) > MOST_ADDRESSES:
            self._by_network.popitem(last=False)
        return failures
