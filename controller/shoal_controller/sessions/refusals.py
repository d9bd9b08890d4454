"""Why streams were refused, counted by a few kinds that `metrics.py` shows: the sentences themselves are in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal_protos.errors import ShoalError

OF_ITS_JOB = "job"
"""The job has turned the worker away: another config, another run, a second process."""
OTHER = "other"
BY_STATUS: Mapping[str, str] = {
    "PERMISSION_DENIED": "token",
    "UNAUTHENTICATED": "expired_token",
    "RESOURCE_EXHAUSTED": "too_many",
    "NOT_FOUND": "unknown_job",
    "INVALID_ARGUMENT": "unreadable",
    "UNAVAILABLE": "not_leading",
}
"""Kinds by gRPC's status of the error; every other one is `other`."""


class StreamRefusals:
    """Every kind exists as 0 from the start."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys((*BY_STATUS.values(), OF_ITS_JOB, OTHER), 0))

    def count(self, error: ShoalError) -> None:
        """The stream itself was refused."""
        self.counts[BY_STATUS.get(error.grpc_status, OTHER)] += 1

    def count_of_job(self) -> None:
        """Its job has refused the worker."""
        self.counts[OF_ITS_JOB] += 1
