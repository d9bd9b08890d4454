"""How far the job is and how fast, as far as anyone has said."""

from __future__ import annotations

from statistics import median

from shoal_controller.core.job import Job
from shoal_controller.core.phases import step_figures
from shoal_controller.core.turn import Turn


def known_step(turn: Turn) -> int:
    """The highest step that any worker is known to have committed in this life of the job."""
    floor = max(turn.durable.floor, 1)
    steps = (p.status.step for p in turn.job.processes.values() if p.status.generation >= floor)
    return max(steps, default=turn.durable.step)


def look(turn: Turn) -> None:
    """Notice the step that every member has committed, and count it."""
    job, world = turn.job, turn.world
    if world is None:
        return
    processes = (job.processes.get(member.worker) for member in world.members)
    steps = [p.status.step if p is not None and p.status.generation == world.generation else -1 for p in processes]
    step = max(job.step, min(steps))
    if step != job.step:
        turn.change(step=step)
    step_figures.passed(turn, step)
    if min(steps) >= 0 and not turn.job.figures_known:
        turn.change(figures_known=True)


def shown_step(job: Job) -> int:
    """What people are shown. It never goes back but to step 0, where the job starts anew."""
    return max(job.durable.step, job.step)


def step_seconds_median(job: Job) -> float | None:
    """Over the run's workers, the median of what each says of its last steps; what was kept once they are gone."""
    told = (process.telemetry.step_seconds_median for process in job.processes.values())
    seconds = [one for one in told if one > 0]
    return median(seconds) if seconds else job.durable.step_seconds_median
