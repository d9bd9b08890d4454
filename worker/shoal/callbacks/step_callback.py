"""Callbacks of steps: what those of this package have in common, and `Progress`, a line on rank 0's standard output.

`engine.on_step` has them called on rank 0, once for each step, and for evaluations after it. They read no parameters,
so they are called while those of the step may still be on their way. A tracker that fails in the midst of a job does
not end training: it says so once, and gets no more numbers.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_protos.errors import UserError
from shoal_protos.text import duration, number
from shoal_protos.training_log import get_logger

from shoal.training.monitoring import AttachedCallback, StepNumbers, why_unusable

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


class StepCallback(AttachedCallback):
    """Gets each step's numbers; `engine.on_step(…)` takes it."""

    def __init__(self) -> None:
        self._failed = False

    def attach(self, engine: Engine) -> None:
        engine.parts.boundary.add_observer(lambda: self(engine))
        engine.parts.evaluation.measured.add_observer(lambda numbers: self.on_evaluation(engine, numbers))
        engine.training.add_ending(lambda: self.at_end(engine))

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


class Progress:
    """`engine.on_step(shoal.callbacks.Progress(every_steps=10))`. On a terminal the line is drawn again in place."""

    def __init__(self, every_steps: int = 1) -> None:
        """Raises `UserError` unless `every_steps` is a number from 1."""
        if not isinstance(every_steps, int) or every_steps < 1:
            raise UserError(f"shoal.callbacks.Progress: every_steps is {every_steps!r}; expected a number from 1.")
        self._every = every_steps
        self._shown: tuple[float, int] | None = None
        """When which step was shown."""

    def __call__(self, engine: Engine) -> None:
        """One committed step, on rank 0."""
        step, last = engine.global_step, engine.context.state.last_step
        if step % self._every and step != last and self._shown is not None:
            return
        now = time.monotonic()
        rate = None
        if self._shown is not None and step > self._shown[1] and now > self._shown[0]:
            rate = (step - self._shown[1]) / (now - self._shown[0])
        self._shown = now, step
        line = line_of(step, last, engine.loss, rate, engine.context.config.train_batch_size, engine.world_size)
        line = ", ".join([line, *(f"{name} {number(value)}" for name, value in engine.reports.items())])
        redraws = sys.stdout.isatty()
        sys.stdout.write(f"\r{line}\x1b[K" if redraws else f"{line}\n")
        if redraws and step >= last > 0:
            sys.stdout.write("\n")
        sys.stdout.flush()


def line_of(step: int, last: int, loss: float, rate: float | None, samples: int, world: int) -> str:
    """`rate`: steps per second; None: not known yet. `samples`: of a step. `last`: 0: the last step is not known."""
    parts = [f"step {step}/{last}" if last >= step else f"step {step}", f"loss {number(loss)}"]
    if rate is not None:
        parts.append(f"{number(rate * samples)} samples/s")
        if last > step:
            parts.append(f"{duration((last - step) / rate)} left")
    return ", ".join([*parts, f"world of {world}"])
