"""What a job shows of itself, as the config settles it: DeepSpeed's keys for progress, times and trackers.

Nothing of it changes a bit, and workers need not agree on it. `shoal.callbacks` makes it true.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.document import CsvMonitor, Document, TensorBoard, Wandb

BREAKDOWN_STEPS = 10
"""Steps between two lines of times where nothing else is said: DeepSpeed's default of `steps_per_print`."""


@dataclass(frozen=True, slots=True)
class Monitoring:
    """Of one job. None: not wanted."""

    steps_per_line: int | None
    times: bool
    dump: bool
    tensorboard: TensorBoard | None
    csv: CsvMonitor | None
    wandb: Wandb | None

    @classmethod
    def of(cls, document: Document) -> Monitoring:
        given, times = document.steps_per_print, document.wall_clock_breakdown is True
        steps = given if isinstance(given, int) else BREAKDOWN_STEPS if times else None
        return cls(
            steps, times, document.dump_state is True,
            document.tensorboard if document.tensorboard.enabled else None,
            document.csv_monitor if document.csv_monitor.enabled else None,
            document.wandb if document.wandb.enabled else None,
        )  # fmt: skip

    @property
    def has_writers(self) -> bool:
        """Whether numbers are written for a tracker."""
        return any(one is not None for one in (self.tensorboard, self.csv, self.wandb))
