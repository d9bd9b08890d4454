"""What a script reads of averages of weights: `engine.averaged()`, and what is refused meanwhile.

How they come is the parameters' affair (parameters.py, sharded_averages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from shoal_protos.errors import UserError

from shoal.training.context import TrainingContext
from shoal.training.evaluation import untouched
from shoal.training.parameters import Parameters


class AveragesRead:
    """On one worker."""

    def __init__(self, context: TrainingContext, parameters: Parameters) -> None:
        self._context, self._parameters = context, parameters
        self.are_shown = False
        """Whether the module's parameters are the averages: what a loop does with a step is refused then."""

    def check(self, call: str) -> None:
        """Raises `UserError` where this job has no averages to be read. `call`: how the script asks."""
        if self._context.config.average is None:
            raise UserError(f"{call} needs averages of weights, and this job keeps none; set `shoal.average`.")

    @contextmanager
    def here(self) -> Iterator[None]:
        """`Engine.averaged`."""
        context = self._context
        self.check("engine.averaged")
        context.first_weights.check("engine.averaged")
        if self.are_shown:
            raise UserError("engine.averaged was entered within engine.averaged; leave the first one before it.")
        with untouched(context.state.module), context.forward_seed.away(), torch.no_grad(), self._parameters.averaged():
            self.are_shown = True
            try:
                yield
            finally:
                self.are_shown = False

    def refuse(self, call: str) -> None:
        """Raises `UserError`: averages are shown."""
        raise UserError(f"{call} was called within engine.averaged; leave that context before it.")
