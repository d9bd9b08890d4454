"""The door of the gRPC port: what the tokens that a stream shows prove.

A worker shows `authorization: Bearer TOKEN`: the operators' token, the join token of its run, or its session token
while that is fresh; later both, the join token there and the session token beside it. A session token whose time is
over opens nothing by itself, but still says whose it is: a worker keeps its identity however long no controller was
there. `service.py` asks here when a stream opens; whom the proof lets in is the job's affair (`phases/proofs.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from shoal_protos.channel import SESSION_TOKEN
from shoal_protos.errors import Refused, ShoalError
from shoal_protos.quoting import of_shoal
from shoal_protos.release import RELEASE

from shoal_controller.core.machine.proof import Proof
from shoal_controller.failed_logins import FailedLogins
from shoal_controller.tasks import end_task, guarded, only_logged
from shoal_controller.worker_tokens import ShownToken, WorkerTokens, is_for_workers

Headers = Mapping[str, str | bytes]


class TokenExpired(ShoalError):
    """A session token came too late, and alone. Not final: the worker shows its join token beside it next."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Door:
    """`tokens`: None where everybody who reaches the port may open any session."""

    def __init__(self, tokens: WorkerTokens | None, clock: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._clock = clock
        self._failed_logins = FailedLogins()
        self._late: set[asyncio.Task[None]] = set()
        """Wrong tokens that wait for their answers, each to its end: whoever hangs up has not made room for a guess."""

    @property
    def asks(self) -> bool:
        """Whether a stream must show a token."""
        return self._tokens is not None

    async def proof_of(self, headers: Headers, address: str, wrong: Callable[[], None]) -> Proof | None:
        """What a stream's tokens prove; None: it may open any session. Raises `Refused`, `TokenExpired`, or
        `TooManyFailures`. A right token never waits, however many wrong ones of its address do; `wrong` hears of one
        before it does.
        """
        if self._tokens is None:
            return None
        authorization = _text(headers.get("authorization"))
        kind, _, bearer = authorization.partition(" ")
        shown = self._tokens.read(bearer) if kind == "Bearer" else None
        if shown is not None:
            return self._proof_of(shown, headers)
        if kind == "Bearer" and self._tokens.is_operators(bearer):
            return None
        self._failed_logins.check(address)
        wrong()
        await self._keep_waiting(address)
        raise Refused(
            f"the worker showed {_found(authorization)}; set SHOAL_TOKEN to what `shoal token JOB` prints there"
        )

    async def stop(self) -> None:
        """Nobody waits any more."""
        for task in list(self._late):
            await end_task(task)

    def _proof_of(self, shown: ShownToken, headers: Headers) -> Proof:
        proof = shown.proof
        if shown.expires is not None:
            if shown.expires <= self._clock():
                raise TokenExpired(
                    f"the session token of worker {proof.worker} of job {proof.job} has expired; expected the job's "
                    f"join token beside it (SHOAL_TOKEN, as `shoal token {proof.job}` prints it)"
                )
            return proof
        assert self._tokens is not None
        beside = self._tokens.read(_text(headers.get(SESSION_TOKEN)))
        is_of_the_run = beside is not None and (beside.proof.job, beside.proof.run) == (proof.job, proof.run)
        return beside.proof if beside is not None and is_of_the_run else proof

    async def _keep_waiting(self, address: str) -> None:
        task = guarded("a wrong token waits for its answer", self._failed_logins.delay(address), only_logged)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        await asyncio.wait([task])


def _found(authorization: str) -> str:
    """What was shown in place of a right token. Of one that only looks like a worker's, what it may be."""
    kind, _, bearer = authorization.partition(" ")
    if kind == "Bearer" and is_for_workers(bearer):
        return (
            f"another token: one for workers that this controller (of {of_shoal(RELEASE)}) has not made, so it was "
            "made from another SHOAL_TOKEN, or by a controller of another release of shoal"
        )
    return "another token" if authorization else "no token"


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
