"""The job machine of `core/` in the shape that the shell knows it by (`seams.Machine`). Wiring, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_controller.core.machine import durable as state
from shoal_controller.core.machine import job as jobs
from shoal_controller.core.machine import machine
from shoal_controller.core.machine.effects import Effect
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.core.machine.view import view


class CoreMachine:
    """What decides for every job of this controller."""

    def new_job(self, spec: JobSpec, now: float) -> Job:
        return jobs.new_job(spec, now)

    def restore(self, durable: str, step: int | None, now: float) -> Job:
        return jobs.restore(state.from_json(durable), now, step)

    def step(self, job: Job, event: Event, now: float) -> tuple[Job, Sequence[Effect]]:
        return machine.step(job, event, now)

    def view(self, job: Job, now: float) -> JobView:
        return view(job, now)

    def durable(self, job: Job) -> str:
        return state.to_json(job.durable)
