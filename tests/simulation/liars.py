"""Workers that say what is not so: of an earlier run of the job's name, or broken. Nothing of it may be believed.

Drawn apart from the other faults, so that a seed without liars goes as it did before there were any.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from shoal_protos.messages import MemberState, Status
from shoal_protos.runs import every

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

OLD_RUN = "run-0"
NUMBERS = ("generation", "promised", "step", "committed_in")
SHARE_OF_SEEDS = 0.3


class Liars:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.chance = Random(f"lies of {simulation.seed}")

    def rage(self, seconds: float) -> None:
        if self.chance.random() < SHARE_OF_SEEDS:
            for _ in range(self.chance.randint(1, 4)):
                act = self.chance.choice((self._come, self.lie, self.lie, self._stand_in))
                self.simulation.clock.after(self.chance.uniform(0, seconds), act)

    def _stand_in(self) -> None:
        self.stand_in(self.chance.uniform(0.3, 3.0))

    def stand_in(self, seconds: float) -> None:
        """The controller is started with an empty store, and then with its own again."""
        host = self.simulation.host
        host.crash()
        host.is_empty = True
        self.simulation.say("a controller with an empty store is there")
        self.simulation.clock.after(seconds, host.start)

    def lie(self) -> None:
        """One heartbeat of a worker has one number that cannot be; the next one is right again."""
        awake = [worker for worker in self.simulation.workers() if not worker.frozen]
        if awake:
            worker, name = self.chance.choice(awake), self.chance.choice(NUMBERS)
            worker.say("lies about", name)
            self.simulation.liars.add(worker.membership.worker)
            number = self.chance.choice((10**6, 1 << 61))
            is_possible = name == "step" and self.simulation.open_end
            worker.session.lie(name, 1 << 61 if is_possible else number)

    def _come(self) -> None:
        taken = [worker.membership.worker for worker in self.simulation.workers()]
        self.come_from_an_earlier_run(self.chance.choice(("", "w900", *taken)), self.chance.randint(-2, 2))

    def come_from_an_earlier_run(self, claimed: str, ahead: int = 0) -> SimWorker:
        """It was frozen while its run was cancelled and submitted again; generations begin at 1 in every run."""
        simulation = self.simulation
        generation = max(1, simulation.host.job.durable.last_generation + ahead)
        worker = simulation.start_process(claimed, is_built=True)
        dialogue = worker.session.dialogue
        dialogue.job = replace(dialogue.job, run=OLD_RUN)
        worker.session.claims = Status(
            0, generation, MemberState.TRAINING, generation, 5000, generation, 5000, every(simulation.blocks), True,
        )  # fmt: skip
        return worker
