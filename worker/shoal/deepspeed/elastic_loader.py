"""The loader that `deepspeed.initialize` returns: one pass over it is one epoch, whatever this worker has of it.

The loop of a script for DeepSpeed goes over its loader once for each epoch. Here the engine knows where the job is: a
pass yields this worker's micro-batches until its epoch's last step is committed, and nothing where the job is further
already. So a worker that joins comes to the epoch that the others are in by going through the passes before it. Where
nothing else says at which step the job ends, a pass that is left before its end says it, if the script has asked the
engine's counter: its own counts batches, of which workers have different numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any
from weakref import ReferenceType, ref

from shoal_protos.errors import UserError

from shoal.checkpoint.failure import script_line
from shoal.training.engine import Engine

WHOLE_JOB = 10**15
"""Steps of an epoch whose length is not known."""


class ElasticLoader:
    """Iterable once for each epoch of the job."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._passes = self._begins_at = 0
        self._pass: ReferenceType[Generator[Any, None, None]] | None = None
        """The one that the script is in. A loop that is left lets go of it, and that is seen at once."""
        self._left = ""
        """Why no other pass may follow one that was left before its end."""
        self._is_through = False
        """A pass was left where the job ends: others may be begun, and train nothing."""
        self._asked_at = -1
        """The step at which the script has asked for the number of steps the last time."""
        self.is_behind = False
        """Whether the job was past the last pass before it was over: the epoch had its end without this worker."""
        self.batch_size = engine.context.config.micro_batch_size // engine.micro_batches
        engine.script_end.add_loop(self.close)

    def __len__(self) -> int:
        """Micro-batches of one lane in an epoch."""
        return self.steps * self._engine.context.config.micro_batches_per_lane * self._engine.micro_batches

    @property
    def steps(self) -> int:
        """Of an epoch; 0 where that is not known."""
        return self._engine.context.loop.steps_per_epoch

    def begin_at(self, step: int) -> None:
        """The next pass is the epoch of the step after this one."""
        self._passes, self._begins_at = 0, step

    def asked_steps(self) -> int:
        """How many steps the job has made, as the script reads it. Before the first pass those at which the passes
        begin: a script counts its epochs on from there.
        """
        self._asked_at = self._engine.global_step
        begins_here = not self._passes and self._engine.context.world is None
        return self._begins_at if begins_here else self._asked_at

    def check_goes_on(self) -> None:
        """Before a micro-batch is trained. Raises `UserError` after a pass that the script has left."""
        if self._is_through:
            raise UserError(
                f"the loop over the loader was left by engine.global_steps at step {self._engine.global_step}, in the "
                "middle of an epoch, and another one trains on; a job ends where its loop is left so. Leave the outer "
                "loop there too, or go through each epoch to its end."
            )

    def __iter__(self) -> Iterator[Any]:
        self.close()
        if self._left:
            raise UserError(self._left)
        steps = self.steps or WHOLE_JOB
        if not self._passes:
            self._passes = self._begins_at // steps
        self._passes += 1
        batches = self._batches_to(self._passes * steps)
        self._pass = ref(batches)
        return batches

    def close(self) -> None:
        """The script goes over the batches of the last pass no more."""
        one = self._pass() if self._pass is not None else None
        if one is not None:
            one.close()

    def _batches_to(self, end: int) -> Generator[Any, None, None]:
        engine, begin = self._engine, self._engine.global_step
        self.is_behind = begin >= end
        try:
            yield from engine.times.reading(engine.training.batches_to(end))
            self.is_behind = self.is_behind or engine.global_step > end
        finally:
            if not engine.context.is_over and engine.global_step < end:
                self._on_left(begin, end)

    def _on_left(self, begin: int, end: int) -> None:
        """In the midst of a pass. One in which nothing was trained is a look at the data."""
        context, step = self._engine.context, self._engine.global_step
        has_begun = context.loop.has_begun
        context.loop.give_back()
        if step <= begin and not has_begun:
            self._passes -= 1
            return
        if context.state.last_step:
            self._left = (
                f"the loop over the loader was left at step {step} of {end}, in the middle of an epoch; go through "
                "each to its end. A job ends early by engine.stop(), or by `shoal.max_steps` in the config."
            )
        elif has_begun or self._asked_at != step:
            self._left = context.left_at = (
                f"{script_line() or 'the script'} has left the loop over the loader at step {step}, in the middle of "
                f"an epoch, by a count of its own, and workers have different numbers of batches; leave it by "
                "engine.global_steps, right after engine.step, or call engine.stop()."
            )
        else:
            self._is_through = True
