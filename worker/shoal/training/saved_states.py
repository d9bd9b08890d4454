"""The script's own states in checkpoints: they are taken when the script is through with the step, not with the blocks.

So what it makes of an evaluation right after the step is saved with the step. Only the worker that leads a save takes
them. Made by checkpoint_saving.py, called by boundary.py.
"""

from __future__ import annotations

from contextlib import suppress

from shoal_protos.errors import ShoalError

from shoal.checkpoint.draft import TakenStates
from shoal.checkpoint.saver import Saver
from shoal.group.group import WorldChanged
from shoal.out_of_memory import is_out_of_memory
from shoal.training.context import TrainingContext
from shoal.training.parameters import Parameters


class SavedStates:
    """Those of one worker. `saver`: None where nothing is saved."""

    def __init__(self, context: TrainingContext, parameters: Parameters, saver: Saver | None) -> None:
        self._context, self._parameters, self._saver = context, parameters, saver

    def take(self) -> None:
        """The script is through with the last step: what it has registered is part of the checkpoint of that step,
        where this member leads one. Raises `WorldChanged`; then it is still to be taken.
        """
        if self._saver is not None and self._saver.lacks_states:
            if self._context.state.registered:
                self._parameters.settle()  # a state of the user's may be one of parameters
            self._saver.states = self._now()

    def retake(self) -> None:
        """Callbacks were told of an evaluation right after the last step: it may have been another member's, and the
        states were taken before.
        """
        if self._saver is not None and self._saver.may_retake(self._context.state.step):
            self._saver.states = self._now()

    def on_left(self) -> None:
        """The script has left the loop, or ends: it changes no state of the last step any more."""
        with suppress(Exception, WorldChanged):  # then the save fails, and says so
            self.take()

    def on_return(self) -> None:
        """All have gone back to a checkpoint, or to the start."""
        if self._saver is not None and self._saver.lacks_states:
            self._saver.states = "all went back to a checkpoint before the script's own states could be taken"

    def _now(self) -> TakenStates | str:
        try:
            return TakenStates.of(self._context.state.registered)
        except ShoalError as error:
            return str(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return f"no memory for a copy of the states that the script has registered ({error})"
