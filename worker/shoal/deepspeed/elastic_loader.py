"""The loader that `deepspeed.initialize` returns: one pass over it is one epoch, whatever this worker has of it.

The loop of a script for DeepSpeed goes over its loader once for each epoch. Here the engine knows where the job is: a
pass yields this worker's micro-batches until its epoch's last step is committed, and nothing where the job is further
already. So a worker that joins comes to the epoch that the others are in by going through the passes before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal_protos.errors import UserError

from shoal.training.engine import Engine


class ElasticLoader:
    """Iterable once for each epoch of the job."""

    def __init__(self, engine: Engine, steps_per_epoch: int) -> None:
        self._engine, self._steps = engine, steps_per_epoch
        self._passes = 0
        self._left = ""
        """Where a pass was left before its end."""
        self.is_behind = False
        """Whether the job was past the last pass before it was over: the epoch had its end without this worker."""
        self.batch_size = engine.context.config.micro_batch_size

    def __len__(self) -> int:
        """Micro-batches of one lane in an epoch."""
        return self._steps * self._engine.context.config.micro_batches_per_lane

    def begin_at(self, step: int) -> None:
        """The next pass is the epoch of the step after this one."""
        self._passes = step // self._steps

    def __iter__(self) -> Iterator[Any]:
        if self._left:
            raise UserError(
                f"the loop over the loader was left {self._left}, in the middle of an epoch; go through each to its "
                "end. A job ends early by engine.stop(), or by `shoal.max_steps` in the config."
            )
        self._passes += 1
        return self._pass(self._passes * self._steps)

    def _pass(self, end: int) -> Iterator[Any]:
        engine = self._engine
        self.is_behind = engine.global_step >= end
        try:
            yield from engine.times.reading(engine.training.batches_to(end))
            self.is_behind = self.is_behind or engine.global_step > end
        finally:
            if not engine.context.is_over and engine.global_step < end:
                self._left = f"at step {engine.global_step} of {end}"
