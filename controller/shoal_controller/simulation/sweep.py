"""Jobs on one window of a trace: what one commits there and where its time goes; and of a grid of them, what each comes
to in steps, time and money, and which one to take. Pure.

The batch is the same in all of them: with more lanes each is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shoal_protos.errors import UserError

from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.job_size import JobSize, broken_spares
from shoal_controller.core.machine.phases import worker_seconds
from shoal_controller.core.machine.spec import Phase, WorkerBounds
from shoal_controller.simulation.clock import Clock
from shoal_controller.simulation.fleet import Fleet
from shoal_controller.simulation.paces import Paces, SimulatedJob
from shoal_controller.simulation.traces import TraceWindow

SETTLED_STEPS = 4
"""Before the window begins, where machines are there then."""
MOST_SETTLING = 100_000.0
"""Virtual seconds in which they have to be made."""
MOST_JOBS = 100
"""Of a grid."""
HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class TraceOutcome:
    """What became of a job in a window."""

    job: SimulatedJob
    seconds: float
    steps: int
    """Committed, each once."""
    uses: Mapping[Use, float]
    """Seconds of the wanted workers, as the job machine counts them; they add up to all that were wanted, and more
    where spares are there."""
    machine_seconds: float
    """Of the machines that were there, which are paid for."""
    possible_steps: float
    """Of the same machines, if nothing had changed at any time."""
    losses: int
    joins: int
    worlds: int
    returns: int
    """Times that the job went back to a checkpoint, or to its beginning."""
    lost_steps: int
    """Steps that were made again, or are to be."""
    failure: str
    """Why the job has failed; empty: it has not."""

    @property
    def goodput(self) -> float:
        """Return the part of the wanted workers' seconds that trained, from 0 to 1: `shoal_job_goodput_ratio`."""
        return min(1.0, self.uses[Use.TRAINING] / (self.job.workers * self.seconds))

    @property
    def undisturbed(self) -> float:
        """Return the steps, as a part of what the machines that were there would have made undisturbed: what
        `benchmarks/goodput.py` calls goodput.
        """
        return self.steps / self.possible_steps if self.possible_steps else 1.0


def simulate(job: SimulatedJob, paces: Paces, window: TraceWindow) -> TraceOutcome:
    """Run the job through the window, whose machines are numbered from 0 to below `job.slots`. What is there at its
    beginning trains already.
    """
    clock = Clock()
    fleet = Fleet(clock, job, paces)
    for machine in sorted(window.first):
        fleet.come(machine)
    if len(window.first) >= job.least:
        _settle(clock, fleet)
    began, steps = clock.now, fleet.host.job.figures.highest_step
    before, notes = fleet.host.job.figures.worker_seconds, len(fleet.host.notes)
    worlds = fleet.world.worlds
    for move in window.moves:
        clock.after(move.at, fleet.come if move.comes else fleet.go, move.machine)
    clock.after(window.seconds, fleet.look_at_barrier)
    fleet.world.may_leap = True
    clock.run_until(began + window.seconds)
    _finish(clock, fleet, clock.now + paces.step(job.lanes))
    more = clock.now - began - window.seconds
    figures = fleet.host.job.figures
    uses = {use: seconds - before[use] for use, seconds in figures.worker_seconds.items()}
    _add_rest(uses, figures.unsettled_seconds, job.workers * (window.seconds + more))
    history = [note for _, note in fleet.host.notes[notes:]]
    durable = fleet.host.job.durable
    counts = [*window.counts(), (len(fleet.members), more)]
    lost = [int(str(note.data.get("lost_steps") or 0)) for note in history]
    return TraceOutcome(
        job,
        window.seconds + more,
        figures.highest_step - steps,
        uses,
        sum(there * seconds for there, seconds in counts),
        sum(rate(job, paces, there) * seconds for there, seconds in counts),
        losses=sum(not move.comes for move in window.moves),
        joins=sum(move.comes for move in window.moves),
        worlds=fleet.world.worlds - worlds,
        returns=sum(number > 0 for number in lost),
        lost_steps=sum(lost),
        failure=durable.reason if durable.phase is Phase.FAILED else "",
    )


def rate(job: SimulatedJob, paces: Paces, workers: int) -> float:
    """Return the steps a second of so many undisturbed workers; spares beyond the wanted ones add nothing."""
    trainers = min(workers, job.workers)
    return 1 / paces.step(-(-job.lanes // trainers)) if trainers >= job.least else 0.0


def _settle(clock: Clock, fleet: Fleet) -> None:
    """Until its first steps are committed, and the controller knows of them."""
    while fleet.world.commits < SETTLED_STEPS and clock.now < MOST_SETTLING:
        clock.step()
    fleet.look()
    clock.run_until(clock.now)
    host = fleet.host
    host.job = replace(host.job, figures=worker_seconds.end(host.job.figures))  # no step is under way at a barrier


def _finish(clock: Clock, fleet: Fleet, until: float) -> None:
    """Until the step under way is done, if one is: in its middle it is not known what becomes of its seconds."""
    while fleet.look_is_due and clock.next_at <= until:
        clock.step()
    clock.run_until(clock.now)


def _add_rest(uses: dict[Use, float], unsettled: float, wanted: float) -> None:
    """What the machine has not counted: seconds that no commit has settled, and those after a failure."""
    uses[Use.PAUSED] += unsettled
    uses[Use.MISSING] += max(0.0, wanted - sum(uses.values()))


# ---- a grid of them


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
