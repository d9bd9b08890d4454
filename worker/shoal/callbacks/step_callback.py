"""What the callbacks of this package have in common: `engine.on_step` calls them on rank 0, once for each step.

They read no parameters, so they are called while those of the step may still be on their way. A tracker that fails in
the midst of a job ends no training: it says so once, and gets no more numbers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_protos.errors import UserError

from shoal.callbacks.step_numbers import StepNumbers
from shoal.logs import get_logger

if TYPE_CHECKING:
    from shoal.training.engine import Engine

Row = dict[str, float]
"""The numbers of one step by name: `step` first, then `samples`, `time` (seconds of the epoch), `world_size`, `loss`,
`lr`, and what the script has reported.
"""

log = get_logger("shoal")


@dataclass(frozen=True, slots=True)
class JobOfRow:
    """Whose numbers they are."""

    name: str
    """Of the job; empty without a controller."""
    run: str
    """What tells this run of the job from others."""


class StepCallback(ABC):
    """Gets each step's numbers; `engine.on_step(…)` takes it."""

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, engine: Engine) -> None:
        """One committed step, on rank 0."""
        if self._failed:
            return
        job = engine.context.link.job
        try:
            self.write(row_of(engine), JobOfRow(job.name, job.run))
            if engine.context.is_over:
                self.close()
        except Exception as error:  # trackers have errors of their own, and training goes on without them
            self._failed = True
            log.error("tracker_failed", tracker=type(self).__name__, step=engine.global_step, reason=str(error),
                      means="it gets no more numbers from this worker")  # fmt: skip

    @abstractmethod
    def write(self, row: Row, job: JobOfRow) -> None:
        """The numbers of one step. A step that is not above the last one: the job has gone back."""

    def close(self) -> None:
        """The job's last step is written."""
        return


def row_of(engine: Engine) -> Row:
    """The last step's numbers."""
    numbers = StepNumbers.of(engine, {})
    row: Row = {
        "step": numbers.step, "samples": numbers.samples, "time": round(time.time(), 3),
        "world_size": engine.world_size, "loss": numbers.loss, "lr": numbers.rates[0],
    }  # fmt: skip
    row |= {f"lr_{group}": rate for group, rate in enumerate(numbers.rates[1:], 1)}
    if numbers.loss_scale is not None:
        row["loss_scale"] = numbers.loss_scale
    return row | numbers.reports


def check_installed(callback: str, package: str) -> None:
    """Raises `UserError` where a package is missing."""
    if find_spec(package) is None:
        raise UserError(f"shoal.callbacks.{callback} needs the package {package}, which is not installed: "
                        f"pip install {package}.")  # fmt: skip


def check_folder(callback: str, folder: Path) -> None:
    """Makes a folder; raises `UserError` where it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"shoal.callbacks.{callback}: {folder} cannot be made ({error.strerror}); name a folder that all workers "
            "can write."
        ) from None
