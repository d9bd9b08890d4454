"""Operators at awkward moments: what they ask for while other faults rage, and a machine whose clock is set.

Drawn apart from the other faults, so that a seed without them goes as it did before there were any.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from shoal_protos.acts import Cancel, DrainWorker, Pause, Resume, Scale

if TYPE_CHECKING:
    from .simulation import Simulation

SHARE_OF_SEEDS = 0.3
CANCELS = 0.3
"""The part of these seeds in which the job is cancelled."""
GRACES = (0.0, 0.1, 1.0, 100.0)


class Operators:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.chance = Random(f"operators of {simulation.seed}")
        self.spares = Random(f"spares that operators of {simulation.seed} ask for")

    def rage(self, seconds: float) -> None:
        if not self.simulation.has_operators or self.chance.random() >= SHARE_OF_SEEDS:
            return
        acts = [self.drain, self.bound, self.hurry]
        for _ in range(self.chance.randint(1, 6)):
            self.simulation.clock.after(self.chance.uniform(0, seconds), self.chance.choice(acts))
        if self.chance.random() < CANCELS:
            self.simulation.clock.after(self.chance.uniform(0, seconds), self.cancel)

    def drain(self) -> None:
        """Any worker there ever was, with any grace."""
        roster = self.simulation.host.job.durable.roster
        if roster:
            worker, grace = self.chance.choice(sorted(roster)), self.chance.choice(GRACES)
            self.simulation.say("an operator drains", worker, "with a grace of", grace)
            self.simulation.host.request(DrainWorker(worker, grace))

    def bound(self) -> None:
        """Size and bounds at once; many a request is refused."""
        least, most = self.chance.randint(0, 4), self.chance.randint(0, 8)
        request = Scale(
            self.chance.choice((None, 1, 3, 6)), self.chance.choice((None, least)), self.chance.choice((None, most)),
            self.spares.choice((None, None, 0, 1)),
        )  # fmt: skip
        self.simulation.say("an operator asks for", request)
        self.simulation.host.request(request)

    def hurry(self) -> None:
        """Pause and resume, one right after the other."""
        for request in self.chance.choice(
            ((Pause(), Resume()), (Resume(), Pause(), Resume()), (Pause(), Resume(), Pause()))
        ):
            self.simulation.host.request(request)
        self.simulation.clock.after(self.chance.uniform(0.2, 3.0), self.simulation.host.request, Resume())

    def cancel(self) -> None:
        self.simulation.say("an operator cancels the job")
        self.simulation.host.request(Cancel())
