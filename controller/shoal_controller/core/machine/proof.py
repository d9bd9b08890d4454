"""What the token of a worker's stream proves. Plain data: `worker_tokens.py` reads it, `phases/proofs.py` judges it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_protos.plan import WorkerId


@dataclass(frozen=True, slots=True)
class Proof:
    """A join token names a run of a job; a session token also one process of it."""

    job: str
    run: str
    worker: WorkerId = ""
    """Empty: a join token, which proves nothing of who shows it."""
    incarnation: str = ""

    @property
    def names_a_process(self) -> bool:
        return bool(self.incarnation)
