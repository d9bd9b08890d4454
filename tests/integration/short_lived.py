"""A controller that dies by SIGKILL between two transactions of one change: it has written a plan ahead of its head.

Its transactions are so small that a change of the world needs several. A program of `Cluster.start_controller`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from integration.scripts import controller as lives_on
from shoal_controller.jobs import job_repository
from shoal_controller.jobs.job_repository import JobRepository
from shoal_controller.store.store import Operation

SMALLEST = {"MAX_OPERATIONS": 3, "EVENTS_PER_TRANSACTION": 1}


def controller(**settings: str) -> None:
    for name, value in SMALLEST.items():
        setattr(job_repository, name, value)
    guarded = JobRepository._guarded

    async def dies_with_a_plan(self: JobRepository, operations: Sequence[Operation]) -> None:
        await guarded(self, operations)
        if any("/plans/" in operation.key for operation in operations):
            os.kill(os.getpid(), signal.SIGKILL)

    JobRepository._guarded = dies_with_a_plan  # type: ignore[method-assign]
    lives_on(**settings)
