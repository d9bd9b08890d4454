"""A script that never passes one step: it raises there, or a signal ends its workers. Its job must end, in few tries.

Drawn apart from the faults, so that a seed with a sound script goes as it did before there were others.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from shoal_controller.core.machine.phases.failures import DEATHS_PER_RESTART
from shoal_protos.messages import Fault

if TYPE_CHECKING:
    from .simulation import Simulation
    from .training import Training

SHARE_OF_SEEDS = 0.1
SOUND, RAISES, OUTAGE, DIES = "", "raises", "outage", "dies"
LAST_STEP = 12
"""Below any job's last one."""


class BadScript:
    """See the module's text. `kind` is empty where the script is sound."""

    def __init__(self, simulation: Simulation, shape: dict[str, object]) -> None:
        self.simulation = simulation
        chance = Random(f"script of {simulation.seed}")
        bad = not simulation.still and chance.random() < SHARE_OF_SEEDS
        drawn = chance.choice((RAISES, OUTAGE, DIES)) if bad else SOUND
        self.kind = str(shape.get("script", drawn))
        self.at = int(shape.get("script_step", chance.randint(1, LAST_STEP)))  # type: ignore[call-overload]
        self.one_lane = chance.random() < 0.5
        """Only whoever trains lane 0 is struck."""
        self.struck: set[int] = set()
        """The generations in which it was."""

    def restarts(self, sound: int) -> int:
        return sound if not self.kind else 1 if self.kind == DIES else 3

    @property
    def most_tries(self) -> int:
        """An exception whose last word is lost with its process looks like a death; and steps are heard of late, so
        that one committed before a failure may come to be known after it, and seem to forgive it. None does so twice.
        """
        restarts = self.simulation.spec.max_restarts
        return 4 * (restarts + 1 + DEATHS_PER_RESTART * restarts)

    def strikes(self, training: Training) -> bool:
        """Whether this worker does not get through its lanes."""
        world, worker = training.world, training.worker
        if not self.kind or world is None or training.step + 1 != self.at:
            return False
        if self.one_lane and 0 not in world.plan.shares[training.rank].lanes:
            return False
        self.struck.add(training.generation)
        if self.kind == DIES:
            worker.end(-9, "killed by its script")
        else:
            worker.fail("ValueError: no such column", fault=Fault("ValueError", "", "", self.kind == OUTAGE))
        return True

    def is_given_up_for(self, reason: str) -> bool:
        """Whether a job that has failed has failed for its script."""
        if len(self.struck) > self.most_tries:
            self.simulation.watch.violated("a script that never passes a step was tried too often", len(self.struck))
        return bool(self.kind) and ("without a committed step" in reason or "failed in the same way" in reason)
