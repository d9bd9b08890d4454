"""The numbers of a step as trackers get them: DeepSpeed's names, over the number of samples trained.

Called on rank 0 once for each committed step. Knows no tracker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.training.engine import Engine


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Of one committed step."""

    step: int
    samples: int
    """Trained so far: of all steps."""
    loss: float
    rates: list[float]
    """Of the optimizer's groups, as the next step has them."""
    loss_scale: float | None
    reports: dict[str, float]
    """What the script has reported, by name."""
    milliseconds: dict[str, float]
    """By phase, where times are wanted: of this worker, in its loop."""

    @classmethod
    def of(cls, engine: Engine, milliseconds: dict[str, float]) -> StepNumbers:
        state, config = engine.context.state, engine.context.config
        rates = [float(group["lr"]) for group in state.optimizer.param_groups]
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        samples = engine.global_step * config.train_batch_size
        return cls(engine.global_step, samples, engine.loss, rates, scale, engine.reports, milliseconds)

    def named(self) -> dict[str, float]:
        """By the names under which DeepSpeed writes them; what scripts report under its own."""
        found = {"train_loss": self.loss, "lr": self.rates[0]}
        if self.loss_scale is not None:
            found["loss_scale"] = self.loss_scale
        found |= {f"elapsed_time_ms_{phase}": value for phase, value in self.milliseconds.items()}
        return {f"Train/Samples/{name}": value for name, value in found.items()} | self.reports
