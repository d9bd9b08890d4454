"""What takes more at once than mirrors are for: all who hold a block die.

Drawn apart from the other faults, so that a seed without them goes as it did before there were any.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulation import Simulation

SHARE_OF_SEEDS = 0.3


class Disasters:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.chance = Random(f"disasters of {simulation.seed}")
        self.count = 0

    def rage(self, seconds: float) -> None:
        if self.chance.random() >= SHARE_OF_SEEDS or self.simulation.kinds:
            return
        if self.simulation.spec.launcher == "none":
            self.clock.after(self.chance.uniform(0, seconds), self.lose_a_block)

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
