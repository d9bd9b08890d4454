"""The moments of a step that all guards of a worker are told of: each looks at one thing that a script can change.

A step is other bits without a word where a script writes parameters or gradients, or sets modes and rates at the wrong
place; a guard refuses that in a sentence. The loop and the step tell every guard of `TrainingState.guards`, in that
order, and know none of them by name; guards do not know each other. What one guard alone hears (a hand-out that has
come, another member's modes) its owner says to it. Refusals that belong to no moment of a step are functions of this
room, called where a script calls.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.exchange.pieces import Extent
from shoal.exchange.vote import Record


class StepGuard:
    """In the order of a step; each may raise `UserError`. A guard has those methods in which it has something to do."""

    def before_batch(self, world: object, record: Record | None, /) -> None:
        """A batch is to be made in this world. `record`: the last step's."""

    def on_batch(self) -> None:
        """It is made, and the loop's body is about to run."""

    def before_backward(self, where: str, is_continued: bool, /) -> None:
        """`engine.backward` was called. `where`: the micro-batch in sentences, "step 3, lane 2"; `is_continued`: it has
        a part of its gradient already.
        """

    def after_backward(self, arriving: Iterable[Extent], /) -> None:
        """It has come to its end. `arriving`: where other workers' values may still come in."""

    def before_step(self) -> None:
        """`engine.step` was called."""

    def before_last_step(self, world: object, /) -> None:
        """It was called for the last micro-batch that this worker has of a step: the step is about to be made."""

    def before_vote(self) -> None:
        """All that the vote commits is here."""
