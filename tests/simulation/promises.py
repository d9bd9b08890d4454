"""What a controller has promised, and must keep over every death: starts, ends, a drain's grace, saves.

The promises are noted where they are made, apart from what the machine itself remembers of them; `kept` is asked once
everything is well again, and what can be late is looked at while the faults still rage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.phases.scaling import LAST_ONE
from shoal_protos.acts import Cancel, Save

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

START_SECONDS = 2.0
"""After so long in one life a controller has started whatever an earlier one was about to."""


class Promises:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._graces: dict[str, tuple[float, float]] = {}
        """Of every worker that was told to leave: when, and how much time it has."""
        self._is_parting = False
        self._parting: set[str] = set()
        """Who has ever been of the last ones, whose state was to be saved."""
        self.cancel_was_asked = False
        """A controller that dies before it answers has cancelled the job, or not."""
        self.cancelled = False
        """Whether the job was to be cancelled."""
        self._saves: list[int] = []
        """The steps at which saves were asked for and accepted, that were not answered yet."""

    # ---- promised

    def asked(self, event: Event) -> None:
        """An operator's request has come."""
        self.cancel_was_asked |= isinstance(event, Cancel)

    def accepted(self, event: Event, job: Job) -> None:
        """An operator was answered 202."""
        if isinstance(event, Save) and job.durable.save is not None:
            self._saves.append(job.durable.save.step)
        self.cancelled |= isinstance(event, Cancel)

    def preempted(self, worker: str, grace_seconds: float) -> None:
        """Its machine is to go: of several graces the one that ends first counts."""
        now = self.simulation.clock.now
        if worker in self._graces and now + grace_seconds < sum(self._graces[worker]):
            self._graces[worker] = now, grace_seconds

    def stored(self, durable: Durable) -> None:
        for record in durable.roster.values():
            if not record.leaving:
                self._graces.pop(record.worker, None)  # it stays after all
            elif record.worker not in self._graces:
                self._graces[record.worker] = self.simulation.clock.now, record.grace_seconds
        if durable.final_drain and not self._is_parting and durable.current is not None:
            self._part({member.worker for member in durable.current.members})
        self._is_parting = durable.final_drain

    def _part(self, members: set[str]) -> None:
        """All of a world leave and nobody has come: half of the shortest grace is over, whoever has that."""
        self._parting |= members
        leaving = sorted(one for one in members if one in self._graces)
        self._has_ended(min(at + grace / 2 for at, grace in (self._graces[one] for one in leaving)), *leaving)

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
        """A worker is let go. One that is the last has all of its grace, but where the state of all is saved."""
        name = worker.membership.worker
        if LAST_ONE in why and not (self.simulation.checkpoints.every and name in self._parting):
            self._has_ended(sum(self._graces[name]), str(worker))

    def _has_ended(self, end: float, *whose: str) -> None:
        """A grace that ends then."""
        now = self.simulation.clock.now
        if now + self.simulation.host.set_clock.forward < end:
            self.simulation.watch.violated("a grace was cut short", *whose, f"{end - now:.3f} s")

    def saved(self, step: int) -> None:
        """A save of that step was made, or given up and told of: it answers what was asked for before."""
        self._saves = [asked for asked in self._saves if asked > step]

    def put_back(self) -> None:
        """What was promised since is forgotten with the store."""
        self._graces, self._saves, self._parting, self._is_parting = {}, [], set(), False

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
