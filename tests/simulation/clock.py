"""The clock of the controller's machine, which may be set; virtual time itself is the product's `Clock`."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulation import Simulation

EPOCH = 1_000_000.0
"""What a clock that will be set says at first: it stays above zero."""
STEPS = (-7200.0, -60.0, -3.0, 0.0, 0.0, 3.0, 60.0, 7200.0)
"""By how many seconds it is set between two lives."""
SHARE_OF_SEEDS = 0.3


class SetClock:
    """The clock of the controller's machine, which is set while no controller lives there: each life reads it once."""

    def __init__(self, simulation: Simulation) -> None:
        self._chance = Random(f"{simulation.seed} clock")
        self._is_set = simulation.has_operators and self._chance.random() < SHARE_OF_SEEDS
        self._say = simulation.say
        self.by = EPOCH if self._is_set else 0.0
        """How much later it is there than in truth."""
        self.forward = 0.0
        """By how much it was set forward, in all: so much time has passed for whoever waits by the clock."""

    def begin_life(self, life: int) -> None:
        if self._is_set and life > 1:
            seconds = self._chance.choice(STEPS)
            self.by += seconds
            self.forward += max(0.0, seconds)
            self._say("the controller's clock was set by", seconds)
