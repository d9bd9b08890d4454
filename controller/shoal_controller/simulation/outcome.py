"""One simulated job on one window of a trace, from its first steps on: what it committed, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.spec import Phase
from shoal_controller.simulation.clock import Clock
from shoal_controller.simulation.fleet import Fleet
from shoal_controller.simulation.paces import Paces, SimulatedJob
from shoal_controller.simulation.traces import TraceWindow

SETTLED_STEPS = 4
"""Before the window begins, where machines are there then."""
MOST_SETTLING = 100_000.0
"""Virtual seconds in which they have to be made."""


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


def _finish(clock: Clock, fleet: Fleet, until: float) -> None:
    """Until the step under way is done, if one is: in its middle it is not known what becomes of its seconds."""
    while fleet.look_is_due and clock.next_at <= until:
        clock.step()
    clock.run_until(clock.now)


def _add_rest(uses: dict[Use, float], unsettled: float, wanted: float) -> None:
    """What the machine has not counted: seconds that no commit has settled, and those after a failure."""
    uses[Use.PAUSED] += unsettled
    uses[Use.MISSING] += max(0.0, wanted - sum(uses.values()))
