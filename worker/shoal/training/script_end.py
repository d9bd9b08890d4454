"""The end of a script where nothing else says at which step its job ends: the last step is the one at which all end.

Alone that is the step at hand. With a controller this worker waits until it is told, outside all exchange: another
script may be at work for long, or go on with a step that is none here. Called at the script's end (exit.py), and by
doors whose scripts say that they are through.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.group.group import WorldChanged
from shoal.training.context import TrainingContext
from shoal.training.parts import Parts
from shoal.training.training_loop import IDLE_SECONDS, TrainingLoop


class ScriptEnd:
    """Of one engine's script."""

    def __init__(self, context: TrainingContext, parts: Parts, training: TrainingLoop) -> None:
        self._context, self._parts, self._training = context, parts, training
        self._loops: list[Callable[[], None]] = []

    def add_loop(self, close: Callable[[], None]) -> None:
        """Called when the script goes over nothing any more, which may be its first word of a loop that it has left."""
        self._loops.append(close)

    def close_loops(self) -> None:
        """No loop of the script goes on."""
        for close in self._loops:
            close()

    @property
    def is_open(self) -> bool:
        """Whether nothing but the script says at which step the job ends, and it has come to where that may be."""
        context = self._context
        has_trained = context.world is not None and context.state.step > 0
        is_there = has_trained or context.may_begin_at_its_end
        return not context.state.last_step and is_there and not context.left_at

    def reach(self) -> None:
        """The script is through with its epochs: returns once the job's last step is known, and all that is left of it
        is done. Before the last step, it does nothing where something else says which one that is. May raise as
        `Resize.take_part`.
        """
        self.close_loops()
        context = self._context
        if context.is_over and not context.left_loop:
            self._training.end()  # a loop that comes back for each epoch was left in the last step's body
        if not self.is_open:
            return
        if context.world is None:
            self._training.enter()
        self._end_body()
        context.is_through = True
        if context.link.alone:
            context.state.last_step = context.state.step
        while not context.state.last_step:
            self._wait()
        self._training.end()

    def _end_body(self) -> None:
        try:
            self._parts.boundary.end_body()
        except WorldChanged:
            self._parts.resize.take_part(broken=True)

    def _wait(self) -> None:
        context = self._context
        if context.world is None or context.link.stopping:
            self._parts.resize.take_part()
            self._end_body()  # the members of a new world wait for this one's word, too
            return
        context.awaits_end = True
        self._parts.status.publish()
        while not context.link.stopping:
            context.link.pause(IDLE_SECONDS)
        context.awaits_end = False
