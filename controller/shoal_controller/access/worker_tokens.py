"""The tokens of workers: a join token for a run of a job, and a session token for one process of it.

Both are derived from `SHOAL_TOKEN`, and nothing of them is stored: whatever controller of the store looks at one, now
or after a take-over, finds the same. Both open sessions only (`sessions/service.py`), nothing in REST. See
docs/decisions/0018-tokens-of-workers-are-derived.md.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from shoal_controller.access.tokens import is_same
from shoal_controller.core.machine.events import Proof

JOIN, SESSION = "join", "session"

SESSION_SECONDS = 600.0
"""How long a session token opens its session by itself."""

SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}
"""16 MiB and some 50 ms, once in a controller's life: whoever has a worker's token cannot try out operators' tokens
fast, where somebody has chosen a short one."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A sound token."""

    proof: Proof
    expires: float | None = None
    """Seconds since the epoch; None: with its run."""


@dataclass(frozen=True, slots=True)
class WorkerTokens:
    """Makes and reads them. `secret`: the operators' token, the same on every controller of a store."""

    secret: str = field(repr=False)
    _key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = hashlib.scrypt(self.secret.encode(errors="surrogateescape"), salt=b"shoal workers", **SCRYPT)
        object.__setattr__(self, "_key", key)

    def is_operators(self, shown: str) -> bool:
        """Whether it is the operators' own token, which opens every session."""
        return is_same(shown, self.secret)

    def join(self, job: str, run: str) -> str:
        """What the workers of a run are started with: `join:JOB:RUN:` and 64 digits that only a controller can make."""
        return self._signed(JOIN, job, run)

    def session(self, proof: Proof, expires: float) -> str:
        """What one process is given: `session:JOB:RUN:WORKER:INCARNATION:SECONDS:` and as many."""
        return self._signed(SESSION, proof.job, proof.run, proof.worker, proof.incarnation, str(int(expires)))

    def read(self, shown: str) -> ShownToken | None:
        """What it proves; None where it was not made from the secret. Takes as long for a near miss as for nonsense."""
        *parts, _ = shown.split(":")
        if not is_same(shown, self._signed(*parts)):
            return None
        match parts:
            case [kind, job, run] if kind == JOIN:
                return ShownToken(Proof(job, run))
            case [kind, job, run, worker, incarnation, expires] if kind == SESSION:
                return ShownToken(Proof(job, run, worker, incarnation), float(expires))
        return None

    def _signed(self, *parts: str) -> str:
        """Names of jobs, runs and workers have no colon, so no two lists of parts give one text."""
        text = ":".join(parts)
        return f"{text}:{hmac.new(self._key, text.encode(errors='surrogateescape'), hashlib.sha256).hexdigest()}"


def is_for_workers(shown: str) -> bool:
    """Whether it looks like a token for workers, sound or not."""
    return shown.startswith((f"{JOIN}:", f"{SESSION}:"))
