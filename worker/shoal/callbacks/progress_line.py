"""`Progress`: a line with step, loss, samples per second, time left and world, on rank 0's standard output."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from shoal_protos.errors import UserError
from shoal_protos.readable import duration, number

if TYPE_CHECKING:
    from shoal.training.engine import Engine


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
