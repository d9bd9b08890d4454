"""When averages of weights are updated, and how much of them stays: the configuration's `shoal.average`.

The averages themselves lie with the blocks (blocks/segments.py). Whether a block has one tells whether any has been
made: the first update that counts makes it of the weights, as `torch.optim.swa_utils.AveragedModel` does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AverageRule:
    """An exponential moving average: `decay` × average + (1 - `decay`) × weights."""

    decay: float
    every: int
    """Steps between two updates."""
    from_step: int
    """The step after which the first one is counted."""

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step count."""
        return step > self.from_step and (step - self.from_step) % self.every == 0

    def is_past(self, step: int) -> bool:
        """Whether some have counted by this step, as far as there were updates."""
        return step >= self.from_step + self.every

    @property
    def taken(self) -> float:
        """How much of the weights enters the averages: as torch's own function computes it."""
        return 1 - self.decay
