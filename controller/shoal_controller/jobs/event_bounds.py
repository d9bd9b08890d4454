"""How much of the jobs' histories is kept: so many events of each job, and so many bytes over all jobs; beside them so
many bytes of each job's audit, which is kept longest.

Where there is more the oldest go, of all jobs' those of the one whose history is the largest. The shell looks now and
then, beside the jobs: what an event costs its own job does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from shoal_controller.jobs.job_repository import JobRepository

EVENTS_KEPT = 10_000
"""Of each job."""

EVENT_BYTES_KEPT = 64 << 20
"""Over all jobs."""

AUDIT_BYTES_KEPT = 1 << 20
"""Of each job: some 4,000 requests of operators."""

DROPPED_AT_ONCE = 100
"""In one transaction."""


async def bound_events(repositories: Collection[JobRepository]) -> None:
    """Drop what is too much. Raises `StoreError` where the store cannot be read or another controller has written."""
    for repository in repositories:
        while repository.may_drop_events and (surplus := repository.event_count - EVENTS_KEPT) > 0:
            await repository.drop_events(min(surplus, DROPPED_AT_ONCE))
        while repository.may_drop_audit and repository.audit_bytes > AUDIT_BYTES_KEPT:
            await repository.drop_audit(DROPPED_AT_ONCE)
    while (surplus := sum(one.event_bytes for one in repositories) - EVENT_BYTES_KEPT) > 0:
        by_size = sorted((one for one in repositories if one.may_drop_events and one.event_bytes), key=_event_bytes)
        if not by_size:
            return
        largest, second = by_size[-1], by_size[-2].event_bytes if len(by_size) > 1 else 0
        size = min(surplus, max(largest.event_bytes - second, EVENT_BYTES_KEPT // 1000))
        count = ceil(largest.event_count * size / largest.event_bytes)
        await largest.drop_events(min(count, DROPPED_AT_ONCE))


def _event_bytes(repository: JobRepository) -> int:
    return repository.event_bytes
