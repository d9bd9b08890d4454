"""What a job's curves keep of it once a second: a few figures, made without a look at every worker's row. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.phases.progress import shown_loss, shown_reports, step_seconds_median
from shoal_controller.core.machine.view import active_members, goodput, samples_read


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a job."""

    step: int
    loss: float | None
    step_seconds: float | None
    """The median of what workers say of their last steps."""
    samples: int | None
    """Read in committed steps; None: not known yet."""
    goodput_ratio: float
    active: int
    wanted: int
    reports: Mapping[str, float] = field(default_factory=dict)
    """The last number that the script has reported under each name."""


def sample(job: Job, now: float) -> Sample:
    """The job as it is now."""
    return Sample(
        step=job.durable.step,
        loss=shown_loss(job),
        step_seconds=step_seconds_median(job),
        samples=samples_read(job),
        goodput_ratio=goodput(job, now),
        active=len(active_members(job)),
        wanted=job.durable.wanted,
        reports=shown_reports(job),
    )
