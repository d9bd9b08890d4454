"""What takes more at once than mirrors are for: all who hold a block die; the store is put back to an older state.

Drawn apart from the other faults, so that a seed without them goes as it did before there were any.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from shoal_controller.core.machine.durable import Durable
from shoal_protos.shape import full_cells

if TYPE_CHECKING:
    from .simulation import Simulation
    from .stored import StoredJob

SHARE_OF_SEEDS = 0.3
BACKUPS = 4
"""Of a store, some of which all who live have gone beyond."""


class Disasters:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.chance = Random(f"disasters of {simulation.seed}")
        self.count = 0
        self._backups: list[StoredJob] = []

    def rage(self, seconds: float) -> None:
        if self.chance.random() >= SHARE_OF_SEEDS or self.simulation.kinds:
            return
        if self.simulation.spec.launcher == "none":
            self.clock.after(self.chance.uniform(0, seconds), self.lose_a_block)
        for _ in range(BACKUPS):
            self.clock.after(self.chance.uniform(0, seconds), self.back_up)

    def back_up(self) -> None:
        """Of a job that trains, whose world may be another one later."""
        host = self.simulation.host
        if host.stored.current is not None and not host.stored.phase.is_over:
            self._backups.append(host.store.copy())

    def calm(self) -> None:
        """The network is whole, and the controller is to start: with the newest backup of which all who live have gone
        beyond what it knows, where nothing else is amiss that it does not know of.
        """
        simulation = self.simulation
        amiss = simulation.stubborn or simulation.bits.flips or simulation.promises.cancel_was_asked
        members = [worker for worker in simulation.workers() if worker.training.generation]
        if amiss or not members or simulation.host.job.durable.phase.is_over:
            return
        least = min(worker.training.generation for worker in members)
        older = [one for one in self._backups if _is_whole(then := one.read()) and then.last_generation < least]
        if older:
            self.count += 1
            simulation.put_back += 1
            simulation.host.put_back(older[-1])

    def lose_a_block(self) -> None:
        """All its holders die at once, where nobody but people starts others: some have, some do soon."""
        holders = [worker for worker in self.simulation.workers() if worker.training.blocks]
        if not holders or self.simulation.host.job.durable.phase.is_over:
            return
        self.count += 1
        block = self.chance.choice(sorted({block for worker in holders for block in worker.training.blocks}))
        for worker in holders:
            if block in worker.training.blocks:
                worker.end(-9, f"killed with all who hold block {block}")
        for _ in range(self.chance.randint(0, 3)):
            self.clock.after(self.chance.uniform(0, 3), self.simulation.start_process)


def _is_whole(durable: Durable) -> bool:
    """Whether a cell was to stay: the graces of a world that leaves are of another time."""
    members = durable.current.members if durable.current is not None else ()
    staying = (member.coordinate for member in members if not durable.roster[member.worker].leaving)
    return full_cells(staying, durable.cell.processes) > 0
