"""How far the job is and how fast, as far as anyone has said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from shoal_protos.messages import MOST_REPORTS

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.phases import step_figures
from shoal_controller.core.machine.turn import Turn

SHOW_SECONDS = 1.0
"""How often the step that people are shown moves: workers say theirs with their heartbeats."""


def known_step(turn: Turn) -> int:
    """The highest step that any worker is known to have committed in this life of the job."""
    floor = max(turn.durable.first_valid_generation, 1)
    steps = (p.status.step for p in turn.job.processes.values() if p.status.generation >= floor)
    return max(steps, default=turn.durable.step)


def update(turn: Turn) -> None:
    """Notice the step that every member has committed, and count it."""
    job, world = turn.job, turn.world
    if world is None:
        return
    processes = (job.processes.get(member.worker) for member in world.members)
    steps = [p.status.step if p is not None and p.status.generation == world.generation else -1 for p in processes]
    step = min(steps)
    if step < 0:
        return
    step_figures.count_steps(turn, step)
    if not turn.job.figures_known:
        turn.change(figures_known=True)
    if step > turn.durable.step and turn.now - job.step_shown_at >= SHOW_SECONDS:
        turn.keep(step=step)
        turn.change(step_shown_at=turn.now)


def as_of_now(job: Job) -> Durable:
    """What to write where a controller ends in good order: with the steps that were not written yet."""
    return job.durable if job.durable.phase.is_over else replace(job.durable, figures=job.figures)


def shown_loss(job: Job) -> float | None:
    """The loss at the furthest member of the current world that knows it."""
    world = job.durable.current
    reported = [
        (process.status.step, process.telemetry.loss)
        for process in (job.processes.get(member.worker) for member in (world.members if world is not None else ()))
        if process is not None and process.telemetry.loss is not None and job.durable.roster[process.worker].serves
    ]
    return max(reported)[1] if reported else job.durable.loss


def shown_reports(job: Job) -> Mapping[str, float]:
    """Return the reported numbers by name; those of the furthest member win, among equals those of the lowest rank."""
    world = job.durable.current
    members = world.members if world is not None else ()
    known = [(rank, job.processes.get(member.worker)) for rank, member in enumerate(members)]
    reported = [
        (process.status.step, -rank, process.telemetry.reports) for rank, process in known if process is not None
    ]
    found: dict[str, float] = {}
    for _, _, reports in sorted(reported, key=lambda one: one[:2]):
        found.update(reports)
    return dict(sorted(found.items())[:MOST_REPORTS]) or job.durable.reports


def step_seconds_median(job: Job) -> float | None:
    """Over the run's workers, the median of what each says of its last steps; what was kept once they are gone."""
    reported = (process.telemetry.step_seconds_median for process in job.processes.values())
    seconds = [one for one in reported if one > 0]
    return median(seconds) if seconds else job.durable.step_seconds_median
