"""How far the job is, as far as anyone has said."""

from __future__ import annotations

from shoal_controller.core.job import Job
from shoal_controller.core.turn import Turn


def known_step(turn: Turn) -> int:
    """The highest step that any worker is known to have committed in this life of the job."""
    floor = max(turn.durable.floor, 1)
    steps = (p.status.step for p in turn.job.processes.values() if p.status.generation >= floor)
    return max(steps, default=turn.durable.step)


def passed_by_all(job: Job) -> int:
    """The step that every member has committed: what people are shown. It never goes back but to step 0."""
    world = job.durable.current
    if world is None:
        return job.durable.step
    processes = (job.processes.get(member.worker) for member in world.members)
    steps = [p.status.step if p is not None and p.status.generation == world.generation else -1 for p in processes]
    return max(job.durable.step, job.step, min(steps, default=-1))
