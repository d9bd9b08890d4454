"""What a controller has promised, and must keep over every death: starts, ends, a drain's grace, saves.

The promises are noted where they are made, apart from what the machine itself remembers of them; `kept` is asked once
everything is well again, and what can be late is looked at while the faults still rage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.events import Cancel, Event, Save
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.phases.scaling import LAST_ONE

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

START_SECONDS = 2.0
"""After so long in one life a controller has started whatever an earlier one was about to."""

TOGETHER_SECONDS = 1.0
"""Within which all hear of it who are let go at one time."""


class Promises:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._graces: dict[str, tuple[float, float]] = {}
        """Of every worker that was told to leave: when, and how much time it has."""
        self._let_go: dict[str, float] = {}
        """When each of the last ones was told that it is let go."""
        self.cancelled = False
        """Whether the job was to be cancelled."""
        self._saves: list[int] = []
        """The steps at which saves were asked for and accepted, that were not answered yet."""

    # ---- promised

    def accepted(self, event: Event, job: Job) -> None:
        """An operator was answered 202."""
        if isinstance(event, Save) and job.durable.save is not None:
            self._saves.append(job.durable.save.step)
        self.cancelled |= isinstance(event, Cancel)

    def stored(self, durable: Durable) -> None:
        for record in durable.roster.values():
            if record.leaving and record.worker not in self._graces:
                self._graces[record.worker] = self.simulation.clock.now, record.grace_seconds

    # ---- kept

    def begins(self, life: int) -> None:
        """A controller has started: it owes a process to whoever an earlier one was about to start."""
        roster = self.simulation.host.stored.roster.values()
        owed = [record.worker for record in roster if record.launched and record.serves and not record.incarnation]
        if owed:
            self.simulation.clock.after(START_SECONDS + 4 * self.simulation.host.late, self._look, owed, life)

    def _look(self, owed: list[str], life: int) -> None:
        host = self.simulation.host
        if not host.alive or host.life != life or host.job.durable.phase.is_over:
            return
        roster = host.job.durable.roster
        forgotten = [name for name in owed if roster[name].serves and not self.simulation.launcher.has(name)]
        if forgotten:
            self.simulation.watch.violated("workers are being started by nobody", *forgotten)

    def parts(self, worker: SimWorker, why: str) -> None:
        """A worker is let go. One that is the last has all of its grace; where the state is saved, half of the shortest
        grace of those that leave with it.
        """
        if LAST_ONE not in why:
            return
        name = worker.membership.worker
        end = sum(self._graces[name])
        if self.simulation.checkpoints.every:
            self._let_go[name] = now = self.simulation.clock.now
            with_it = {one for one, at in self._let_go.items() if now - at < TOGETHER_SECONDS}  # some have ended since
            others = ({one.membership.worker for one in self.simulation.workers()} | with_it) & self._graces.keys()
            end = min(at + grace / 2 for at, grace in (self._graces[one] for one in {name, *others}))
        if self.simulation.clock.now + self.simulation.host.set_clock.forward < end:
            self.simulation.watch.violated("a grace was cut short", worker, f"{end - self.simulation.clock.now:.3f} s")

    def saved(self, step: int) -> None:
        """A save of that step was made, or given up and told of: it answers what was asked for before."""
        self._saves = [asked for asked in self._saves if asked > step]

    def went_back(self, step: int) -> None:
        self._saves = [min(asked, step) for asked in self._saves]

    def kept(self) -> bool:
        """Whether nothing is owed any more."""
        durable = self.simulation.host.job.durable
        saved = durable.phase.is_over or not (self._saves or self.cancelled)
        return saved and not any(self._is_to_end(durable, name) for name in self.simulation.launcher.started)

    def _is_to_end(self, durable: Durable, name: str) -> bool:
        """Whether a process lives that was told to end."""
        record = durable.roster.get(name)
        ending = durable.phase.is_over or record is None or record.ending is not None
        return ending and self.simulation.launcher.started[name].alive
