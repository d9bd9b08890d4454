"""A grid of jobs on one window of a trace: what each comes to in steps, time and money, and which one to take. Pure.

The batch is the same in all of them: with more lanes each is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shoal_protos.errors import UserError

from shoal_controller.core.machine.job_size import JobSize, broken_spares
from shoal_controller.core.machine.spec import WorkerBounds
from shoal_controller.simulation.outcome import TraceOutcome, simulate
from shoal_controller.simulation.paces import Paces, SimulatedJob
from shoal_controller.simulation.traces import TraceWindow

MOST_JOBS = 100
"""Of a grid."""
HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class Aims:
    """What a job is to come to."""

    price: float = 0.0
    """Of a machine, an hour."""
    steps: int = 0
    """That the job is to make; 0: that is not given."""
    deadline: float | None = None
    """Seconds in which they are to be made."""
    budget: float | None = None
    """What they may cost."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """One job of the grid, as it came out."""

    outcome: TraceOutcome
    aims: Aims

    @property
    def cost_of_a_step(self) -> float | None:
        """Return what the machines cost for each step that is kept; None: there is no price, or no step."""
        spent = self.outcome.machine_seconds / HOUR * self.aims.price
        return spent / self.outcome.steps if self.outcome.steps and self.aims.price else None

    @property
    def seconds(self) -> float | None:
        """Return how long the wanted steps take at this pace; None: no number is wanted, or none is made."""
        if not (self.aims.steps and self.outcome.steps) or self.outcome.failure:
            return None
        return self.aims.steps / self.outcome.steps * self.outcome.seconds

    @property
    def cost(self) -> float | None:
        """Return what they cost."""
        each = self.cost_of_a_step
        return each * self.aims.steps if each is not None and self.aims.steps else None

    @property
    def is_kept(self) -> bool:
        """Whether deadline and budget are kept, where there are any."""
        in_time = self.aims.deadline is None or (self.seconds is not None and self.seconds <= self.aims.deadline)
        in_budget = self.aims.budget is None or (self.cost is not None and self.cost <= self.aims.budget)
        return not self.outcome.failure and bool(self.outcome.steps) and in_time and in_budget


def grid(job: SimulatedJob, values: Mapping[str, Sequence[int]]) -> list[SimulatedJob]:
    """Return the job with every combination of the values of these fields. Raises `UserError` for one that cannot be,
    and where there are more than `MOST_JOBS`.
    """
    each = [list(dict.fromkeys(numbers)) for numbers in values.values()]
    if (count := math.prod(map(len, each))) > MOST_JOBS:
        raise UserError(f"the grid has {count} jobs; expected at most {MOST_JOBS}: give fewer values.")
    found = []
    for chosen in product(*each):
        fields: dict[str, Any] = dict(zip(values, chosen, strict=True))
        found.append(replace(job, **fields))
        _check(found[-1])
    return found


def _check(job: SimulatedJob) -> None:
    """Raises `UserError` for a job that cannot be."""
    if job.lanes < job.workers:
        raise UserError(
            f"--lanes has {job.lanes}, and --workers is {job.workers}: every worker trains at least one lane; expected "
            f"at least {job.workers}."
        )
    if job.mirrors >= job.workers:
        raise UserError(
            f"--mirrors has {job.mirrors}, and --workers is {job.workers}: a block's mirrors and its owner are "
            f"different workers; expected at most {job.workers - 1}."
        )
    if job.least > job.workers:
        raise UserError(f"--min has {job.least}; expected at most {job.workers}, the workers that are wanted.")
    bounds = WorkerBounds(job.least, None)
    size = JobSize("what-if", job.workers, bounds, job.lanes, spares=job.spares, mirrors=job.mirrors)
    if why := broken_spares(size):
        raise UserError(why)


def tries(jobs: Iterable[SimulatedJob], paces: Paces, window: TraceWindow, aims: Aims) -> Iterator[GridRow]:
    """Simulate each job in the window, by what its own machines see of it."""
    for job in jobs:
        yield GridRow(simulate(job, paces.of(job.lanes), within(window, job)), aims)


def within(window: TraceWindow, job: SimulatedJob) -> TraceWindow:
    """Return what a job's own machines see of a window: those with the lowest numbers."""
    first = frozenset(machine for machine in window.first if machine < job.slots)
    return replace(window, first=first, moves=tuple(move for move in window.moves if move.machine < job.slots))


def best(tried: Sequence[GridRow]) -> GridRow | None:
    """Return what to take: of those that keep deadline and budget the cheapest, then the quickest; None: none does."""
    kept = [one for one in tried if one.is_kept]
    return min(kept, key=lambda one: (one.cost_of_a_step or 0.0, -one.outcome.steps), default=None)
