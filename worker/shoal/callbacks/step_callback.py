"""What the callbacks of this package have in common: `engine.on_step` has them called on rank 0, once for each step,
and for evaluations after it.

They read no parameters, so they are called while those of the step may still be on their way. A tracker that fails in
the midst of a job ends no training: it says so once, and gets no more numbers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_protos.errors import UserError

from shoal.callbacks.packages import why_unusable
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
        self._guarded(engine, lambda job: self.write(row_of(engine), job))

    def on_evaluation(self, engine: Engine, numbers: Mapping[str, float]) -> None:
        """An evaluation after that step, on rank 0, perhaps again."""
        row = {"step": engine.global_step, "time": round(time.time(), 3), **numbers}
        self._guarded(engine, lambda job: self.add(row, job))
        if engine.context.left_loop:
            self.at_end(engine)

    def at_end(self, engine: Engine) -> None:
        """The loop is over."""
        self._guarded(engine, lambda _: self.close())

    def _guarded(self, engine: Engine, act: Callable[[JobOfRow], None]) -> None:
        if self._failed:
            return
        job = engine.context.link.job
        try:
            act(JobOfRow(job.name, job.run))
        except Exception as error:  # trackers have errors of their own, and training goes on without them
            self._failed = True
            log.error("tracker_failed", tracker=type(self).__name__, step=engine.global_step, reason=str(error),
                      means="it gets no more numbers from this worker")  # fmt: skip

    @abstractmethod
    def write(self, row: Row, job: JobOfRow) -> None:
        """The numbers of one step. A step that is not above the last one: the job has gone back."""

    def add(self, row: Row, job: JobOfRow) -> None:
        """The numbers of an evaluation after a step; `row` has `step` and `time` besides."""
        self.write(row, job)

    def close(self) -> None:
        """All is written, as far as is known; there may be an evaluation after it."""
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
    """Raises `UserError` where a package cannot be used."""
    if why := why_unusable(package):
        raise UserError(f"shoal.callbacks.{callback} needs the package {package}, which {why}.")


def check_folder(callback: str, folder: Path) -> None:
    """Makes a folder; raises `UserError` where it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"shoal.callbacks.{callback}: {folder} cannot be made ({error.strerror}); name a folder that all workers "
            "can write."
        ) from None
